"""Products of float32 numbers by matrix units that take bfloat16: each number in two of them.

A number is a high half, its nearest bfloat16, and a low half, what that misses. Of the four
products the low times the low one is left out, so that 16 bits of each number count: errors are
2**-16 of a product. arXiv:1904.06376.
"""

from typing import Any, NamedTuple

from jax.experimental import pallas as pl
import jax.numpy as jnp

from jaxrunner.kernels_pallas import mosaic
from jaxrunner.kernels_pallas.mosaic import Ref
from jaxrunner.types import Array


class Halves(NamedTuple):
    """A matrix in two: arrays in registers, [64, k], or references to shared memory."""

    high: Any
    low: Any

    @property
    def T(self) -> "Halves":
        """The transposed matrix, in the same place in shared memory."""
        return Halves(self.high.T, self.low.T)


def halves(x: Array) -> Halves:
    """Returns x, float32 in registers, in two."""
    high = x.astype(jnp.bfloat16)
    return Halves(high, (x - high.astype(jnp.float32)).astype(jnp.bfloat16))


def pair(ref: Ref) -> Halves:
    """Returns both halves in shared memory, [2, rows, columns]."""
    return Halves(*(ref.at[k] for k in range(2)))


def put_halves(x: Array, to: Halves, part: Any = ...) -> None:
    """Writes x, float32 in registers, to a part of both halves in shared memory."""
    for half, ref in zip(halves(x), to, strict=True):
        ref[part] = half


def product(a: Halves, b: Halves) -> Array:
    """Returns a b, [64, n], in registers: a, [64, k], there or in shared memory; b, [k, n], in
    shared memory."""

    def products(acc: Ref) -> Array:
        mosaic.wgmma(acc, a.low, b.high)
        mosaic.wgmma(acc, a.high, b.low)
        mosaic.wgmma(acc, a.high, b.high)
        return acc[...]

    shape = a.high.shape[0], b.high.shape[1]
    return pl.run_scoped(products, mosaic.ACC(shape, jnp.float32))
