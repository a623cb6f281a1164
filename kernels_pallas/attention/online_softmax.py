"""Functions of an online softmax that kernels share (arXiv:2205.14135). Scores are in base 2."""

import math

from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from jaxrunner.kernels_pallas.mosaic import Index, Layout
from jaxrunner.types import Array

LOG2_E = math.log2(math.e)
NOTHING = -1e30  # less than any score, yet finite: a row that sees no key must not become NaN
LAYOUT = plgpu.Layout.WGMMA


def full(shape: tuple[int, ...], value: float, layout: Layout = LAYOUT) -> Array:
    """Returns an array of equal numbers, float32, for loops to carry."""
    return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)


def seen(
    first: Index, shape: tuple[int, ...], axis: int, length: Array, window: Index | None
) -> Array:
    """Says which keys the last of `length` tokens sees; keys lie along `axis`, from `first` on.

    length: a number, or one of each element.
    """
    at = first + plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=LAYOUT)
    return at < length if window is None else (at < length) & (at >= length - window)


def with_sink(sink: Array, once: Array, best: Array, total: Array) -> tuple[Array, Array, Array]:
    """Lets a logit join the softmax that has no value, `once` a row: in one of its parts.

    Returns the largest score, the total, and what is kept of older weights.
    """
    sink = jnp.where(once, sink, NOTHING)
    new_best = jnp.maximum(best, sink)
    kept = jnp.exp2(best - new_best)
    return new_best, total * kept + jnp.exp2(sink - new_best), kept
