"""Problems for pairs of fp8 in bands of rows: products with them, and what makes them."""

from typing import Any

import jax.numpy as jnp

from jaxrunner.kernels_pallas.cases.case import Case
from jaxrunner.kernels_pallas.cases.fp8_case import rounded_norms
from jaxrunner.kernels_pallas.cases.pair_case import CODE
from jaxrunner.kernels_pallas.cases.quantized_case import few_bits
from jaxrunner.kernels_pallas.quantized.add_norm_fp8 import add_norm_fp8
from jaxrunner.kernels_pallas.quantized.fp8_bands import SIDE
from jaxrunner.kernels_pallas.quantized.fp8_blocks import fp8_blocks
from jaxrunner.kernels_pallas.quantized.fp8_gates import fp8_gates
from jaxrunner.kernels_pallas.quantized.fp8_tiles import TuningConfig
from jaxrunner.types import Array


def banded_norms(T: int, E: int, parts: int | None = None) -> Case:
    """Norms of tokens, [T, E], and of what is added to them first, as the sums of their pairs."""

    def run_it(*args: Array) -> tuple[Array, Array]:
        total, *both = add_norm_fp8(*args, eps=1e-5, pairs=True)
        return total, floats(*both)

    return rounded_norms(T, E, parts)._replace(kernel="add_norm_bands", run=run_it)


def banded_products(T: int, E: int, F: int, run: int = 128, **sizes: Any) -> Case:
    """T tokens as pairs times a weight in fp8, with scales of 128 terms, and of `run` outputs.

    sizes: of a TuningConfig. Where a sum is cut into parts, they are added up.
    """
    config = TuningConfig(**sizes)

    def run_it(rows: Array, x_scale: Array, weight: Array, scale: Array) -> Array:
        how: Any = dict(pairs=True, config=config, dtype=jnp.float32)
        y = fp8_blocks(rows, x_scale, weight, scale, **how)
        return (y.sum(0) if y.ndim == 3 else y).astype(jnp.bfloat16)

    return _of_bands("fp8_blocks_of_pairs", T, E, F, run, run_it, sizes)


def banded_units(T: int, E: int, F: int, run: int = 128, **sizes: Any) -> Case:
    """Units of T tokens, [T, F], of gates and units in fp8, as the sums of their pairs."""
    config = TuningConfig(**sizes)

    def run_it(*args: Array) -> Array:
        return floats(*fp8_gates(*args, pairs=True, config=config))

    return _of_bands("fp8_gates_of_pairs", T, E, 2 * F, run, run_it, sizes)


def _of_bands(
    kernel: str, T: int, E: int, F: int, run: int, run_it: Any, sizes: dict[str, Any]
) -> Case:
    def make(seed: int) -> tuple[Array, ...]:
        x, *weights = few_bits(T, E, F, CODE, run, 128, False, seed)
        return *banded(x), *weights

    name = ", ".join([f"{T} x {E} x {F}", *(f"{key} {value}" for key, value in sizes.items())])
    return Case(kernel, name, make, run_it, 1.0 * E * F, "TB/s", {})


def banded(x: Array) -> tuple[Array, Array]:
    """Returns tokens, [T, E], as pairs in bands, [2 * T, E], and their scales, [E / 128, 2 * T].

    In plain JAX: a number is rounded down to four bits, and what it leaves to as many.
    """
    T, E = x.shape
    terms = x.astype(jnp.float32).reshape(T, -1, 128)
    most = jnp.maximum(jnp.abs(terms).max(-1, keepdims=True), 2.0**-100)
    power = jnp.exp2(jnp.floor(jnp.log2(most)) - 7)
    wide = terms / power
    upper = wide.astype(CODE)
    lower = (wide - upper.astype(jnp.float32)).astype(CODE)
    rows = jnp.stack([a.reshape(-1, SIDE, E) for a in (upper, lower)], 1).reshape(2 * T, E)
    scale = jnp.repeat(power.reshape(-1, 1, SIDE, E // 128), 2, 1).reshape(2 * T, -1).T
    return rows, scale


def floats(rows: Array, scale: Array) -> Array:
    """Returns what pairs in bands, [2 * T, E], stand for, [T, E] in bfloat16, which holds it."""
    num, E = rows.shape
    wide = rows.astype(jnp.float32) * jnp.repeat(scale[:, :num].T, 128, 1)
    return wide.reshape(-1, 2, SIDE, E).sum(1).reshape(-1, E).astype(jnp.bfloat16)


BANDS = (
    banded_norms(8, 4096), banded_norms(16, 2048, 3), banded_norms(8, 4096, 0),
    banded_units(64, 512, 384), banded_units(72, 1024, 256, 256),
    banded_units(64, 512, 384, width=64),
    banded_products(64, 512, 384), banded_products(72, 1024, 512, 256),
    banded_products(64, 2048, 256, parts=4),
)  # fmt: skip
BENCH_BANDS = (
    banded_norms(64, 4096, 4), banded_units(64, 4096, 14336),
    banded_products(64, 14336, 4096, parts=4),
)  # fmt: skip
