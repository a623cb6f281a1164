"""Problems for the kernels of adapters: every third token or so has none."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrunner.kernels_pallas.cases.case import Case
from jaxrunner.kernels_pallas.lora.lora_expand import lora_expand, lora_units
from jaxrunner.kernels_pallas.lora.lora_shrink import lora_shrink
from jaxrunner.kernels_pallas.lora.prefill_units import prefill_units
from jaxrunner.kernels_pallas.products.add_norm import LowRank, add_rms_norm
from jaxrunner.types import Array

PARTS = 3  # of a x, where it is given


def shrinks(T: int, width: int, blocks: int, places: int, rank: int) -> Case:
    """The first product of T tokens' adapters, its parts summed; zeros where there is none."""

    def make(seed: int) -> tuple[Array, ...]:
        keys = jax.random.split(jax.random.key(seed))
        shapes = (T, width), (blocks, places, rank, width)
        x, a = map(jax.random.normal, keys, shapes)
        a = a * width**-0.5
        return x.astype(jnp.bfloat16), a.astype(jnp.bfloat16), _places(seed, T, places)

    def run(x: Array, a: Array, place: Array) -> Array:
        return jnp.where(place[:, None] > 0, lora_shrink(x, a, place).sum(0), 0)

    name = f"{T} x {width}, {blocks} x {places} x {rank}"
    read = blocks * (places if T > 1 else 1) * rank * width
    return Case("lora_shrink", name, make, run, 2.0 * read, "TB/s", {})


def expands(
    T: int, width: int, blocks: int, places: int, rank: int, parts: int = 0, *, whole: bool = False
) -> Case:
    """The second product, added to a base product; to `parts` of it where there are any.

    whole: whether these are summed.
    """

    def make(seed: int) -> tuple[Array, ...]:
        keys = jax.random.split(jax.random.key(seed))
        shape = (parts, T, width * blocks) if parts else (T, width * blocks)
        y = jax.random.normal(keys[0], shape).astype(jnp.float32 if parts else jnp.bfloat16)
        return y, *_second(keys[1], T, (blocks, places, rank, width), seed)

    run, options = functools.partial(lora_expand, whole=whole), dict(whole=whole)
    name = f"{T} x {width}, {blocks} x {places} x {rank}" + f" to {parts} parts" * (parts > 0)
    moved = _moved(T, blocks, places, rank, width)
    return Case("lora_expand", name + ", whole" * whole, make, run, moved, "TB/s", options)


def units(T: int, width: int, places: int, rank: int) -> Case:
    """The second product of a gate and an up projection, added to both, and their units."""

    def make(seed: int) -> tuple[Array, ...]:
        keys = jax.random.split(jax.random.key(seed))
        y = jax.random.normal(keys[0], (T, 2, width)).astype(jnp.bfloat16)
        return y, *_second(keys[1], T, (2, places, rank, width), seed)

    name, moved = f"{T} x {width}, {places} x {rank}", _moved(T, 2, places, rank, width)
    return Case("lora_units", name, make, lora_units, moved, "TB/s", {})


def prompts(T: int, width: int, places: int, rank: int, *, mixed: bool = False) -> Case:
    """The units of a gate and an up projection of prompts, which have an adapter each.

    mixed: whether each token has an adapter of its own instead.
    """

    def make(seed: int) -> tuple[Array, ...]:
        y, low, b, place = units(T, width, places, rank).make(seed)
        place = place if mixed else jnp.sort(place)
        low = jnp.where(place[:, None] > 0, jnp.nan_to_num(low[0]), 0)
        return y, low.astype(jnp.bfloat16), b, place

    name = f"{T} x {width}, {places} x {rank}" + ", mixed" * mixed
    return Case("prefill_units", name, make, prefill_units, 6.0 * T * width, "TB/s", {})


def norms(T: int, E: int, places: int, rank: int, parts: int) -> Case:
    """A residual addition and a norm of [T, E], of `parts` and what adapters add."""

    def make(seed: int) -> tuple[Array, ...]:
        keys = jax.random.split(jax.random.key(seed), 4)
        x, weight = (jax.random.normal(k, s) for k, s in zip(keys, ((T, E), (E,)), strict=False))
        residual = jax.random.normal(keys[2], (parts, T, E))
        low, b, place = _second(keys[3], T, (1, places, rank, E), seed)
        return x.astype(jnp.bfloat16), residual, weight.astype(jnp.bfloat16), low, b[0], place

    def run(x: Array, residual: Array, weight: Array, *more: Array) -> tuple[Array, Array]:
        return add_rms_norm(x, residual, weight, LowRank(*more), eps=1e-5)

    name, moved = f"{T} x {E} in {parts} parts, {places} x {rank}", T * E * (6 + 4 * parts)
    moved += 2 * min(T, places) * rank * E
    return Case("add_norm_adapted", name, make, run, float(moved), "TB/s", dict(eps=1e-5))


def _second(key: Any, T: int, shape: tuple[int, int, int, int], seed: int) -> tuple[Array, ...]:
    """Returns parts of a x, b and the places; a x of a token without adapter is junk."""
    blocks, places, rank, _ = shape
    keys, place = jax.random.split(key), _places(seed, T, places)
    low = jax.random.normal(keys[0], (PARTS, T, blocks * rank))
    low = jnp.where(place[None, :, None] > 0, low, jnp.nan)
    b = jax.random.normal(keys[1], shape) * rank**-0.5
    return low, b.astype(jnp.bfloat16), place


def _places(seed: int, T: int, places: int) -> Array:
    rng = np.random.default_rng(seed)
    place = np.where(rng.random(T) < 0.3, 0, rng.integers(1, places + 1, T))
    return jnp.asarray(place if T > 1 else np.full(1, places), jnp.int32)


def _moved(T: int, blocks: int, places: int, rank: int, width: int) -> float:
    return 2.0 * blocks * width * ((places if T > 1 else 1) * rank + 2 * T)


LORA: tuple[Case, ...] = (
    shrinks(1, 1024, 1, 3, 48), shrinks(8, 4096, 2, 8, 16), shrinks(24, 448, 1, 2, 8),
    shrinks(64, 4096, 1, 8, 48), shrinks(128, 14336, 1, 8, 16),
    expands(1, 6144, 1, 3, 48), expands(8, 4096, 1, 8, 16, parts=4), expands(24, 128, 2, 2, 8),
    expands(64, 6144, 1, 8, 48), expands(128, 256, 1, 1, 64),
    expands(8, 6144, 1, 8, 48, parts=4, whole=True), expands(16, 128, 2, 2, 16, whole=True),
    units(1, 14336, 8, 16), units(16, 256, 2, 8), units(64, 14336, 8, 16),
    prompts(512, 1024, 8, 32), prompts(640, 192, 1, 16), prompts(128, 256, 5, 32, mixed=True),
    prompts(4096, 128, 8, 64), prompts(64, 64, 3, 64, mixed=True),
    norms(1, 4096, 8, 16, parts=8), norms(70, 1024, 3, 8, parts=2),
)  # fmt: skip
