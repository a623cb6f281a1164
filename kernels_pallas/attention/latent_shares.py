"""The keys that each block of latent decode's grid reads: equal runs of the tiles of all rows.

A run starts and ends where it may, so at most two of a block's rows are in parts: the one that an
earlier block began, and the one that a later block goes on with. Where rows are about as long,
blocks have as many rows instead, whole: nothing is to be merged. Found on the device, once a step.
"""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxrunner.indexing import find_rows
from jaxrunner.types import Array

SLACK = 16  # a block may have one more tile in so many, and one, so that no row is cut


class Shares(NamedTuple):
    """Tiles of B rows, one behind the other, that C blocks share. All int32."""

    start: Array  # [B] the row's first tile
    end: Array  # [B] one past its last
    length: Array  # [B] its keys
    first: Array  # [C] the block's first tile
    last: Array  # [C] one past its last; no more than `first` where it has none
    row: Array  # [C] the row of its first tile
    num_rows: Array  # [C] that have some of its tiles
    # What only merges read, of rows that are cut:
    head: Array  # [C] the block that has the first tile of `row`
    ends: Array  # [C] whether the block has the last tile of `row`, and not the first one


def share_out(seq_lens: Array, block_kv: int, num_ctas: int, longest: int | None = None) -> Shares:
    """Shares the keys of rows with `seq_lens`, [B], out among `num_ctas` blocks.

    longest: tiles of a row, at most, where rows are not to be cut by the lengths of others. Then
    each has as many blocks of its own as twice `num_ctas` has for B rows, one at least, and C is B
    times that. None for equal runs.

    An empty row has a tile, too, in which it sees nothing: its result is zeros.
    """
    length = seq_lens.astype(jnp.int32)
    B, tiles = length.shape[0], jnp.maximum((length + block_kv - 1) // block_kv, 1)
    if longest is None:
        C, places = num_ctas, tiles
        share = (tiles.sum(dtype=jnp.int32) + C - 1) // C
    else:
        runs = max(1, min(2 * num_ctas // B, longest))
        C, share = B * runs, -(-longest // runs)
        places = (tiles + share - 1) // share * share  # so that the next row starts a run
    rows = jnp.arange(B)
    # Comparisons of all with all, where a running sum would be a launch of its own.
    behind = jnp.where(rows[:, None] >= rows[None], places[None], 0).sum(1, dtype=jnp.int32)
    start = behind - places
    end = start + tiles
    first = jnp.arange(C, dtype=jnp.int32) * share
    last = first + share
    if longest is None:  # whole rows if no block has many more tiles then
        bounds = jnp.append(start, end[-1])[np.minimum(np.arange(C + 1) * -(-B // C), B)]
        is_whole = jnp.max(jnp.diff(bounds)) <= share + share // SLACK + 1
        first = jnp.where(is_whole, bounds[:-1], first)
        last = jnp.where(is_whole, bounds[1:], last)
    row = jnp.minimum(find_rows(behind, first), B - 1)
    last = jnp.minimum(last, end[-1] if longest is None else end[row])
    head = start[row] // share
    num_rows = jnp.where(first < last, find_rows(behind, last - 1) - row + 1, 0)
    ends = (first < last) & (start[row] < first) & (end[row] <= last)
    return Shares(start, end, length, first, last, row, num_rows, head, ends.astype(jnp.int32))


def of_part(head: Array, part: Array) -> Array:
    """Returns where a row's part lies that the block `part` blocks behind `head` has found."""
    # A block has two places: for the row that it goes on with, and for the one that it begins.
    return 2 * (head + part) + jnp.where(part == 0, 1, 0)
