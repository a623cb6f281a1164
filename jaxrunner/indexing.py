"""Reads and writes by index, and rows of different lengths laid side by side."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from jaxrunner.types import Array, Writes


def find_rows(ends: Array, index: Array) -> Array:
    """Returns the row of each index, [T], where row b ends before `ends[b]`, [B].

    Empty rows are passed over; an index behind all rows gets B. All ends are compared with all
    indices, in one kernel; a binary search would be a loop whose predicate the host reads.
    """
    return (ends[None] <= index[:, None]).sum(1, dtype=jnp.int32)


def places(x: Array) -> Array:
    """Returns the place of each number of x, [n], in ascending order, equal ones as they come.

    All are compared with all, in one kernel; a sort would be several.
    """
    index = jnp.arange(x.shape[0], dtype=jnp.int32)
    lower = x[None] < x[:, None]
    lower |= (x[None] == x[:, None]) & (index[None] < index[:, None])
    return lower.sum(1, dtype=jnp.int32)


@functools.partial(jax.jit, inline=True)  # traced once for equal shapes
def take(table: Array, index: Any) -> Array:
    """Reads `table[index]`, 0 where an index is out of range."""
    if not isinstance(index, tuple):
        return table.at[index].get(mode="fill", fill_value=0)
    # Compared one by one: JAX would reduce over the indices of a place, in a kernel of its own.
    inside = [(i >= 0) & (i < n) for i, n in zip(index, table.shape, strict=False)]
    is_inside = functools.reduce(jnp.logical_and, inside)
    found = table.at[index].get(mode="clip")
    is_inside = is_inside.reshape(is_inside.shape + (1,) * (found.ndim - is_inside.ndim))
    return jnp.where(is_inside, found, jnp.zeros((), table.dtype))


def write(table: Array, writes: Writes) -> Array:
    """Sets `table[row, col] = value`; padding is dropped."""
    return table.at[writes.row, writes.col].set(writes.value, mode="drop")


def put_rows(table: Any, row: Array, new: Any) -> Any:
    """Writes rows into all arrays of a table; padding is dropped."""
    return jax.tree.map(lambda x, value: x.at[row].set(value, mode="drop"), table, new)


def put_blocks(tables: tuple[Array, ...], writes: tuple[Writes, ...]) -> tuple[Array, ...]:
    """Writes into the block tables of all cache groups."""
    return tuple(write(table, w) for table, w in zip(tables, writes, strict=True))


def cache_index(blocks: Array, row: Array, positions: Array, cache_shape: tuple[int, int]) -> Array:
    """Returns where each token's KV goes, block * S + offset; N * S for padding.

    blocks: [B, M]; row and positions: [T], row B for padding; cache_shape: (N, S).
    """
    (B, _), (N, S) = blocks.shape, cache_shape
    block = take(blocks, (row, positions // S))
    return jnp.where(row < B, block * S + positions % S, N * S)
