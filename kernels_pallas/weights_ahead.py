"""Weights fetched ahead: what the next products read first is brought to the L2 cache meanwhile.

Between the products of a layer run small kernels that leave the memory idle. Their thread blocks
ask for the first bytes of the weights that come next: one instruction a box, and nothing waits.
"""

from typing import NamedTuple

from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxrunner.types import Array

BOX = 256  # rows and columns of the largest box that the copy engine takes
MAX_TOKENS = 256  # of a step: products of more are bound by arithmetic


class Ahead(NamedTuple):
    """What a kernel fetches."""

    views: tuple[Array, ...] = ()  # of weights, [rows, BOX] each
    rows: tuple[int, ...] = ()  # of each, from the first on


def choose(weights: tuple[Array, ...], budget: int, num_tokens: int) -> Ahead:
    """Returns what of `weights`, in their order, fits into `budget` bytes.

    Nothing of a step of more tokens than gain by it, or of weights without a view of such rows.
    """
    if num_tokens > MAX_TOKENS:
        return Ahead()
    chosen = []
    for weight in weights:
        rows = min(weight.nbytes, budget) // (BOX * weight.dtype.itemsize)
        budget -= weight.nbytes
        if rows > 0 and weight.size % BOX == 0:
            chosen.append((weight.reshape(-1, BOX), rows))
    return Ahead(*zip(*chosen, strict=True)) if chosen else Ahead()


def fetch(refs, rows: tuple[int, ...], block, num_blocks: int) -> None:
    """Asks for the share of a `block`, of `num_blocks`, in the first `rows` of each view."""
    for ref, num in zip(refs, rows, strict=True):
        share = -(-num // num_blocks)
        for first in range(0, share, BOX):
            at = pl.ds(block * share + first, min(BOX, share - first))
            plgpu.async_prefetch(ref.at[at])
