"""The keys that each block of latent decode's grid reads: equal runs of the tiles of all rows.

A run starts and ends where it may, so at most two of a block's rows are in parts: the one that an
earlier block began, and the one that a later block goes on with. Found on the device, once a step.
"""

from typing import NamedTuple

import jax.numpy as jnp

from jaxrunner.indexing import find_rows
from jaxrunner.types import Array


class Shares(NamedTuple):
    """Tiles of B rows, one behind the other, that C blocks share. All int32."""

    start: Array  # [B] the row's first tile
    end: Array  # [B] one past its last
    length: Array  # [B] its keys
    first: Array  # [C] the block's first tile
    last: Array  # [C] one past its last; no more than `first` where it has none
    row: Array  # [C] the row of its first tile
    num_rows: Array  # [C] that have some of its tiles
    head: Array  # [C] the block that has the first tile of `row`


def share_out(seq_lens: Array, block_kv: int, num_ctas: int) -> Shares:
    """Shares the keys of rows with `seq_lens`, [B], out among `num_ctas` blocks.

    An empty row has a tile, too, in which it sees nothing: its result is zeros.
    """
    length = seq_lens.astype(jnp.int32)
    tiles = jnp.maximum((length + block_kv - 1) // block_kv, 1)
    rows = jnp.arange(length.shape[0])
    # Comparisons of all with all, where a running sum would be a launch of its own.
    end = jnp.where(rows[:, None] >= rows[None], tiles[None], 0).sum(1, dtype=jnp.int32)
    start, total = end - tiles, tiles.sum(dtype=jnp.int32)
    share = (total + num_ctas - 1) // num_ctas
    first = jnp.arange(num_ctas, dtype=jnp.int32) * share
    last = jnp.minimum(first + share, total)
    row = jnp.minimum(find_rows(end, first), length.shape[0] - 1)
    num_rows = jnp.where(first < last, find_rows(end, last - 1) - row + 1, 0)
    return Shares(start, end, length, first, last, row, num_rows, start[row] // share)


def shares_of(
    seq_lens: Array, block_kv: int, num_ctas: int, longest: int, batch_invariant: bool
) -> tuple[Shares, bool]:
    """Returns what `share_out` or `share_out_alone` does, and whether no row can be in parts."""
    if not batch_invariant:
        return share_out(seq_lens, block_kv, num_ctas), False
    runs = max(1, min(2 * num_ctas // seq_lens.shape[0], longest))
    return share_out_alone(seq_lens, block_kv, runs, longest), runs == 1


def share_out_alone(seq_lens: Array, block_kv: int, runs: int, longest: int) -> Shares:
    """Shares keys out as `share_out` does, but gives each of B rows `runs` blocks of its own.

    A block has a `runs`th of the tiles of the longest row that there may be, or what a row has
    left, so where a row is cut does not depend on others.
    """
    length = seq_lens.astype(jnp.int32)
    B, share = length.shape[0], -(-longest // runs)
    tiles = jnp.maximum((length + block_kv - 1) // block_kv, 1)
    own, rows = (tiles + share - 1) // share, jnp.arange(B)
    behind = jnp.where(rows[:, None] >= rows[None], own[None], 0).sum(1, dtype=jnp.int32)
    start = (behind - own) * share
    first = jnp.arange(B * runs, dtype=jnp.int32) * share
    row = jnp.minimum(find_rows(behind * share, first), B - 1)
    last = jnp.minimum(first + share, (start + tiles)[row])
    num_rows = (first < last).astype(jnp.int32)
    return Shares(start, start + tiles, length, first, last, row, num_rows, start[row] // share)


def of_part(head: Array, part: Array) -> Array:
    """Returns where a row's part lies that the block `part` blocks behind `head` has found."""
    # A block has two places: for the row that it goes on with, and for the one that it begins.
    return 2 * (head + part) + jnp.where(part == 0, 1, 0)
