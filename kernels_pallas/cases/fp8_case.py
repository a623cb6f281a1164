"""Problems for products in fp8, and for the rounding of their tokens."""

import math
from typing import Any

import jax
import jax.numpy as jnp

from jaxrunner.kernels_pallas.cases.case import Case
from jaxrunner.kernels_pallas.cases.quantized_case import few_bits
from jaxrunner.kernels_pallas.quantized.add_norm_fp8 import add_norm_fp8
from jaxrunner.kernels_pallas.quantized.fp8_blocks import fp8_blocks
from jaxrunner.kernels_pallas.quantized.fp8_gates import fp8_gates
from jaxrunner.kernels_pallas.quantized.fp8_rounding import fp8_rounding
from jaxrunner.kernels_pallas.quantized.fp8_tiles import TuningConfig
from jaxrunner.types import Array


def fp8_products(T: int, E: int, F: int, run: int = 128, **sizes: Any) -> Case:
    """T tokens in fp8 times a weight in fp8, with scales of 128 terms, and of `run` outputs.

    sizes: of a TuningConfig. Where a sum is cut into parts, they are added up.
    """
    config = TuningConfig(**sizes)

    def make(seed: int) -> tuple[Array, ...]:
        x, weight, scale = few_bits(T, E, F, "float8_e4m3fn", run, 128, False, seed)
        x_scale = jax.random.uniform(jax.random.key(seed + 1), (E // 128, T), jnp.float32, 0.5, 1.5)
        return x.astype(weight.dtype), x_scale, weight, scale

    def run_it(*args: Array) -> Array:
        if config.parts == 1:
            return fp8_blocks(*args, config=config)
        return fp8_blocks(*args, dtype=jnp.float32, config=config).sum(0).astype(jnp.bfloat16)

    name = ", ".join([f"{T} x {E} x {F}", *(f"{key} {value}" for key, value in sizes.items())])
    return Case("fp8_blocks", name, make, run_it, 2.0 * T * E * F, "TFLOP/s", {})


def fp8_units(T: int, E: int, F: int, run: int = 128, **sizes: Any) -> Case:
    """Units of T tokens, [T, F], of gates and units in fp8, as floats again."""
    config = TuningConfig(**sizes)

    def run_it(*args: Array) -> Array:
        return _floats(*fp8_gates(*args, config=config))

    name = ", ".join([f"{T} x {E} x {F}", *(f"{key} {value}" for key, value in sizes.items())])
    make = fp8_products(T, E, 2 * F, run).make
    return Case("fp8_gates", name, make, run_it, 4.0 * T * E * F, "TFLOP/s", {})


def rounded_norms(T: int, E: int, parts: int | None = None) -> Case:
    """Norms of tokens, [T, E], and of what is added to them first, as floats again."""

    def make(seed: int) -> tuple[Array, ...]:
        keys = jax.random.split(jax.random.key(seed), 3)
        x, weight = (
            jax.random.normal(key, shape, jnp.bfloat16)
            for key, shape in zip(keys[:2], ((T, E), (E,)), strict=True)
        )
        shape, dtype = ((T, E), jnp.bfloat16) if parts is None else ((parts, T, E), jnp.float32)
        return x, jax.random.normal(keys[2], shape, dtype), weight

    def run_it(*args: Array) -> tuple[Array, Array]:
        total, *both = add_norm_fp8(*args, eps=1e-5)
        return total, _floats(*both)

    name = f"{T} x {E}" + ("" if parts is None else f", {parts} parts")
    moved = T * E * (5.0 + (2.0 if parts is None else 4.0 * parts))
    return Case("add_norm_fp8", name, make, run_it, moved, "TB/s", dict(eps=1e-5))


def _floats(numbers: Array, scale: Array) -> Array:
    return numbers.astype(jnp.float32) * jnp.repeat(scale.T[: len(numbers)], 128, 1)


def roundings(*shape: int) -> Case:
    """Tokens, [T, E], or gates and units of tokens, [T, 2, E], that are rounded."""

    def make(seed: int) -> tuple[Array]:
        return (jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16),)

    name, moved = " x ".join(map(str, shape)), 2.0 * math.prod(shape) + shape[0] * shape[-1]
    return Case("fp8_rounding", name, make, fp8_rounding, moved, "TB/s", {})


FP8 = (
    fp8_products(304, 512, 384), fp8_products(72, 1024, 512, 256), fp8_products(256, 384, 256),
    fp8_products(512, 5120, 1024, parts=2, num_ctas=8), fp8_products(64, 2048, 256, parts=4),
    fp8_products(1096, 512, 512, halves=2, num_ctas=6), fp8_products(200, 640, 512, 256, halves=2),
    rounded_norms(72, 4096), rounded_norms(16, 2048, 3), rounded_norms(8, 5120, 1),
    rounded_norms(8, 2048, 0), fp8_units(304, 512, 384), fp8_units(72, 1024, 256, 256),
    fp8_units(512, 640, 128, num_ctas=4), fp8_units(304, 512, 384, width=64),
)  # fmt: skip
BENCH_FP8 = (
    *(fp8_products(8192, E, F) for E, F in ((4096, 6144), (4096, 28672), (14336, 4096))),
    *(fp8_products(T, 4096, F) for T in (64, 256) for F in (6144, 28672)),
    *(fp8_products(64, E, 4096, parts=4) for E in (4096, 14336)),
    *(fp8_products(256, E, 4096, parts=2) for E in (4096, 14336)),
    *(fp8_units(T, 4096, 14336) for T in (64, 256, 8192)),
    rounded_norms(64, 4096, 4), rounded_norms(8192, 4096),
    *(roundings(T, *shape) for T in (64, 256, 8192) for shape in ((4096,), (2, 14336))),
)  # fmt: skip
