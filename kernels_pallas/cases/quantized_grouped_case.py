"""Problems for the kernels of a mixture whose experts have weights of 8 or 4 bits."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrunner.kernels_pallas.cases.case import Case
from jaxrunner.kernels_pallas.mixtures.group_tokens import group_tokens
from jaxrunner.kernels_pallas.mixtures.router import route
from jaxrunner.kernels_pallas.quantized import quantized_grouped, widen
from jaxrunner.kernels_pallas.quantized.quantized_grouped import Few, TuningConfig
from jaxrunner.types import Array


def few_bits(
    sizes: tuple[int, int, int, int, int], code: str, *, tile: int, run: int = 1, group: int = 0,
    zero: bool = False, clamped: bool = False, turns: int = 1,
) -> Case:  # fmt: skip
    """T tokens through k of X gated MLPs; every fifth is padding. The parts are added up.

    sizes: T, X, k, E, F. `run` x `group` numbers of a weight, or all of a row, share a scale, which
    is an exponent where there are 32 of them. clamped: with gpt-oss' activation and biases.
    """
    T, X, k, E, F = sizes
    names = ("weight", "scale", *("zero",) * zero, *("bias",) * clamped)
    activation = "clamped_swiglu" if clamped else "swiglu"

    def make(seed: int) -> tuple[Array, ...]:
        keys = jax.random.split(jax.random.key(seed), 4)
        x = jax.random.normal(keys[0], (T, E), jnp.bfloat16)
        logits = jax.random.normal(keys[1], (T, X), jnp.float32)
        both = (
            _make(key, *shape, code, run, group, names)
            for key, shape in zip(keys[2:], ((X * 2 * F, E), (X * E, F)), strict=True)
        )
        return x, logits, jnp.arange(T) % 5 != 4, *(array for w in both for array in w)

    def product(x: Array, logits: Array, real: Array, *arrays: Array) -> Array:
        experts, weights = route(logits, real, top_k=k, renormalise=True)
        groups = group_tokens(x, experts, weights, X, tile=tile)
        first, second = (
            Few(**dict(zip(names, part, strict=True)))
            for part in (arrays[: len(names)], arrays[len(names) :])
        )
        sizes: dict[str, Any] = dict(code=code, config=TuningConfig(turns=turns))
        made = quantized_grouped.units(groups, first, X, activation=activation, **sizes)
        groups = groups._replace(x=made)
        parts = quantized_grouped.outputs(groups, second, X, (T, k), **sizes)
        return jnp.where(real[:, None], parts.sum(0), 0).astype(x.dtype)

    distinct = X * (1 - np.float64(1 - k / X) ** (T - T // 5))  # of experts, on average
    told = f"{run} x {group or 'all'}" + ", zeros" * zero + ", clamped" * clamped
    told += f", {turns} turns" * (turns > 1)
    name = f"{T} x {E} x {F}, {k} of {X}, {code}, {told}"
    amount = float(3.0 * E * F * distinct / widen.PACKED[code])
    options = dict(k=k, code=code, names=names, activation=activation)
    return Case("quantized_grouped", name, make, product, amount, "TB/s", options)


def _make(
    key: Array, rows: int, terms: int, code: str, run: int, group: int, names: tuple[str, ...]
) -> tuple[Array, ...]:
    keys = jax.random.split(key, 4)
    stored, shape = (rows, terms // widen.PACKED[code]), (rows // run, terms // (group or terms))
    made: Any = jax.random.randint(keys[0], stored, -128, 128, jnp.int8)
    if code == "float8_e4m3fn":
        made = jax.random.normal(keys[0], stored, jnp.bfloat16).astype(code)
    elif widen.PACKED[code] > 1:
        made = made.astype(jnp.uint8)
    # Scales make outputs about 1: numbers of 8 bits are about 64, of 4 bits 4.
    size = {"float8_e4m3fn": 1.0, "int8": 64.0}.get(code, 4.0) * terms**0.5
    scale: Any = jax.random.uniform(keys[1], shape, jnp.float32, 0.5, 1.5) / size
    if group == quantized_grouped.LEAST:
        scale = (jnp.floor(jnp.log2(scale)) + 127).astype(jnp.uint8)
    zero = jax.random.randint(keys[2], shape, -8, 8, jnp.int8)
    bias = jax.random.normal(keys[3], (rows, 1), jnp.bfloat16)
    every = dict(weight=made, scale=scale, zero=zero, bias=bias)
    return tuple(every[name] for name in names)


FP8, INT4, MXFP4 = "float8_e4m3fn", "int4", "float4_e2m1fn"
QWEN3, GPT_OSS = (128, 8, 2048, 768), (32, 4, 2880, 2880)  # 30B-A3B, 20b
QUANTIZED_MIXTURES: tuple[Case, ...] = (
    few_bits((9, 8, 2, 512, 256), FP8, tile=8, run=128, group=128),
    few_bits((1, 24, 8, 512, 256), INT4, tile=8, group=128, zero=True),
    few_bits((24, 8, 2, 512, 256), INT4, tile=16, group=64),
    few_bits((40, 8, 2, 320, 192), MXFP4, tile=32, group=32, clamped=True),
    few_bits((70, 4, 1, 512, 128), "int8", tile=64),
    few_bits((300, 16, 4, 512, 256), FP8, tile=128, run=128, group=128),
    few_bits((300, 8, 4, 320, 192), MXFP4, tile=128, group=32, clamped=True),
    few_bits((5, 8, 2, 320, 192), INT4, tile=8, zero=True, turns=2),
    few_bits((9, 8, 2, 512, 256), FP8, tile=8, run=128, group=128, turns=2),
    few_bits((40, 8, 2, 576, 320), MXFP4, tile=32, group=32, clamped=True, turns=2),
)
BENCH_QUANTIZED_MIXTURES: tuple[Case, ...] = tuple(
    few_bits((T, *sizes), code, tile=max(8, T * 2 * sizes[1] // sizes[0]), turns=turns, **scales)
    for sizes, code, scales in (
        (QWEN3, FP8, dict[str, Any](run=128, group=128)),
        (QWEN3, INT4, dict[str, Any](group=128)),
        (GPT_OSS, MXFP4, dict[str, Any](group=32, clamped=True)),
    )
    for T in (1, 8, 64, 256)
    for turns in ((1, 2) if T < 256 else (1,))
)
