"""Rows of unlike lengths, side by side."""

import jax.numpy as jnp

from jaxrunner.types import Array


def find_rows(ends: Array, index: Array) -> Array:
    """Returns the row, of those that end before `ends`, [B], in which each index, [T], lies.

    B for what lies behind them all; rows without a place are passed over. All ends are compared
    with all indices, which on a GPU is one launch; a search is a loop that asks the host.
    """
    return (ends[None] <= index[:, None]).sum(1, dtype=jnp.int32)
