"""Sorts tokens by expert into tiles of rows that products take together. Knows no weights.

A route is one of a token's k choices, route `t * k + j`. Sorted by expert, the routes are rows;
runs of rows of one expert are cut into tiles, of which a product takes one at a time.
"""

from typing import NamedTuple

import jax.numpy as jnp

from jaxrunner.indexing import find_rows, places
from jaxrunner.types import Array

# Comparing all pairs of so many routes is one launch on a GPU, where a sort is several.
MOST_COMPARED = 1024


class Groups(NamedTuple):
    """Routes sorted by expert; those of one expert in the order of tokens."""

    order: Array  # [T * k], int32: the route of each row
    place: Array  # [T * k], int32: the row of each route
    sizes: Array  # [X], int32: rows of each expert


class Tiles(NamedTuple):
    """Runs of rows that one expert multiplies, ascending; those behind `num` have no rows."""

    expert: Array  # [I], int32
    first: Array  # [I], int32: its first row
    rows: Array  # [I], int32: how many it has, `block` at most
    num: Array  # [], int32: tiles with rows


def group(experts: Array, num_experts: int) -> Groups:
    """Sorts routes by expert. experts: [T, k], int32; `num_experts` for padding, which is last."""
    flat = experts.reshape(-1)
    index = jnp.arange(flat.size, dtype=jnp.int32)
    if flat.size > MOST_COMPARED:
        order = jnp.argsort(flat, stable=True).astype(jnp.int32)
        place = jnp.zeros_like(order).at[order].set(index, unique_indices=True)
    else:
        place = places(flat)
        order = jnp.zeros_like(place).at[place].set(index, unique_indices=True)
    each = jnp.arange(num_experts, dtype=jnp.int32)
    return Groups(order, place, (flat[None] == each[:, None]).sum(1, dtype=jnp.int32))


def most_tiles(num_routes: int, num_experts: int, block: int) -> int:
    """Returns how many tiles `num_routes` make at most: one of a few rows for each expert."""
    return min(-(-num_routes // block) + num_experts, num_routes)


def cut_tiles(sizes: Array, num_routes: int, block: int) -> Tiles:
    """Cuts the rows of each expert into tiles of at most `block`. sizes: [X], of `group`."""
    X = sizes.shape[0]
    count = -(-sizes // block)
    ends = jnp.cumsum(count, dtype=jnp.int32)
    index = jnp.arange(most_tiles(num_routes, X, block), dtype=jnp.int32)
    found = find_rows(ends, index)
    expert = jnp.minimum(found, X - 1)
    done = block * (index - (ends - count)[expert])  # rows of the expert before this tile
    start = jnp.cumsum(sizes, dtype=jnp.int32) - sizes
    rows = jnp.where(found < X, jnp.clip(sizes[expert] - done, 0, block), 0)
    return Tiles(expert, start[expert] + done, rows.astype(jnp.int32), ends[-1])
