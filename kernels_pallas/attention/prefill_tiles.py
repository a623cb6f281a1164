"""How prefill attention cuts the tokens of a step into tiles, on the device."""

import jax.numpy as jnp

from jaxrunner.indexing import find_rows
from jaxrunner.types import Array


def max_tiles(T: int, B: int, tile: int) -> int:
    """Returns how many tiles B rows of T tokens make at most."""
    parts = min(B + 1, T)  # the tokens behind the last row are one, too
    # A second tile takes tile - 7 more tokens, if it starts 7 behind a multiple of 8, and each
    # further one takes `tile`.
    return parts + min((T - parts) // (tile - 7), (T + 6 * parts) // tile)


def tiles(
    query_start: Array, seq_lens: Array, T: int, tile: int, keys: int, window: int | None
) -> Array:
    """Cuts the rows of T tokens into tiles of `tile`, those with most steps of `keys` first.

    Returns [I + 1, 8], int32. Of each tile: the row, its first token (a multiple of 8, so perhaps
    an earlier row's), the first and last + 1 token to write, the position of token 0, the first
    step, the row's keys, the steps. The last line is the number of tiles. Tokens behind the last
    row, and those of rows of length 0, make tiles that have no steps. Such rows share tiles where
    no other is between them.
    """
    B = seq_lens.shape[0]
    starts = jnp.append(query_start.astype(jnp.int32), jnp.int32(T))
    lens = jnp.append(seq_lens.astype(jnp.int32), jnp.int32(0))
    begin, end, b = starts[:-1], starts[1:], jnp.arange(B + 1)
    live = (end > begin) & (lens > 0)
    # Of rows that attend to nothing, the first has the tokens of all up to the next row that does.
    last = jnp.where(live[None] & (b[None] > b[:, None]), begin[None], T).min(1)
    end = jnp.where(live, end, last)
    own = live | jnp.append(True, live[:-1])
    aligned = begin // 8 * 8
    num = jnp.where(own & (end > begin), (end - aligned + tile - 1) // tile, 0)
    most = max_tiles(T, B, tile)
    after, i = jnp.cumsum(num), jnp.arange(most, dtype=jnp.int32)
    row = find_rows(after, i)
    used, row = row <= B, jnp.minimum(row, B)
    first = aligned[row] + tile * (i - (after - num)[row])
    low, high = jnp.maximum(first, begin[row]), jnp.minimum(first + tile, end[row])
    zero = lens[row] - end[row]
    start = 0 * i if window is None else jnp.maximum(low + zero - window + 1, 0) // keys
    steps = jnp.where(live[row], jnp.maximum(-(-(high + zero) // keys) - start, 0), 0)
    cost = jnp.where(used, steps, -1)
    ahead = (cost[:, None] < cost[None]) | ((cost[:, None] == cost[None]) & (i[:, None] > i[None]))
    columns = jnp.minimum(row, B - 1), first, low, high, zero, start, lens[row], steps
    table = jnp.zeros((most, 8), jnp.int32)
    table = table.at[ahead.sum(1)].set(jnp.stack(columns, axis=1), unique_indices=True)
    return jnp.concatenate([table, jnp.full((1, 8), after[-1], jnp.int32)])
