"""Problems for products with tokens as pairs of fp8, and for what makes these."""

import functools
from typing import Any

import jax.numpy as jnp

from jaxrunner.kernels_pallas.cases.case import Case
from jaxrunner.kernels_pallas.cases.fp8_case import rounded_norms, roundings
from jaxrunner.kernels_pallas.cases.quantized_case import few_bits
from jaxrunner.kernels_pallas.quantized.add_norm_pairs import add_norm_pairs
from jaxrunner.kernels_pallas.quantized.fp8_pairs import fp8_pairs
from jaxrunner.kernels_pallas.quantized.quantized_fit import TuningConfig
from jaxrunner.kernels_pallas.quantized.quantized_tile import multiply, quantized_tile
from jaxrunner.types import Array

CODE = "float8_e4m3fn"


def pairs(*shape: int) -> Case:
    """Tokens, [T, E], or gates and units of tokens, [T, 2, E], as the sums of their pairs."""

    def run_it(x: Array) -> Array:
        return sums(*fp8_pairs(x))

    like = roundings(*shape)
    return Case("fp8_pairs", like.name, like.make, run_it, like.amount, "TB/s", {})


def paired_norms(T: int, E: int, parts: int | None = None) -> Case:
    """Norms of tokens, [T, E], and of what is added to them first, as the sums of their pairs."""

    def run_it(*args: Array) -> tuple[Array, Array]:
        total, *both = add_norm_pairs(*args, eps=1e-5)
        return total, sums(*both)

    like = rounded_norms(T, E, parts)
    return Case("add_norm_pairs", like.name, like.make, run_it, like.amount, "TB/s", like.options)


def paired_tiles(
    T: int, E: int, F: int, run: int = 1, group: int = 0, *, in_parts: bool = False, **sizes: Any
) -> Case:
    """T tokens as pairs times a weight in fp8, of which `run` x `group` numbers share a scale.

    sizes: of a TuningConfig; without any those that `fit` finds. Parts of a sum are added up.
    """

    def run_it(x: Array, weight: Array, scale: Array) -> Array:
        numbers, x_scale = fp8_pairs(x)
        how: Any = dict(code=CODE, dtype=jnp.float32)
        if sizes:
            how["config"] = TuningConfig(**sizes)
            y = quantized_tile(numbers, weight, scale, x_scale, **how)
        else:
            y = multiply(numbers, weight, scale, x_scale, in_parts=in_parts, **how)
        return (y.sum(0) if y.ndim == 3 else y).astype(x.dtype)

    make = functools.partial(few_bits, T, E, F, CODE, run, group or E, False)
    told = ", ".join(f"{key} {value}" for key, value in sizes.items())
    name = ", ".join([f"{T} x {E} x {F}, pairs", *([told] if told else [])])
    return Case("quantized_tile", name, make, run_it, E * F, "TB/s", dict(code=CODE))


def sums(numbers: Array, scale: Array) -> Array:
    """Returns what pairs, [2, T, E], stand for, in bfloat16, which holds it."""
    high, low = numbers.astype(jnp.float32)
    return ((high + low) * scale[:, None]).astype(jnp.bfloat16)


PAIRS = (
    pairs(8, 3072), pairs(3, 14336), pairs(16, 2, 1536),
    paired_norms(8, 4096), paired_norms(5, 1024, 3), paired_norms(8, 4096, 0),
    paired_tiles(64, 1024, 512, 128, 128, groups=4),
    paired_tiles(64, 1024, 256, groups=1, turns=2, parts=2),
    paired_tiles(64, 2048, 768, 128, 128, groups=3, parts=4),
    paired_tiles(64, 1024, 448, groups=4, shared=True),
    paired_tiles(128, 1536, 512, 128, 256, groups=2, num_ctas=2),
    paired_tiles(128, 1024, 512, 1, 128, groups=2, cluster=1, tokens=64),
    paired_tiles(64, 2048, 6144, 128, 128),
)  # fmt: skip
BENCH_PAIRS = (
    *(pairs(T, *shape) for T in (64, 128) for shape in ((4096,), (2, 14336))),
    paired_norms(64, 4096, 4),
    *(paired_tiles(T, E, F, 128, 128, in_parts=F == 4096) for T in (64, 128)
      for E, F in ((4096, 6144), (4096, 28672), (14336, 4096))),
)  # fmt: skip
