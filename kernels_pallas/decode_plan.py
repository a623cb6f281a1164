"""Which keys each block of decode attention's grid reads.

Found on the device, once a step: XLA shares what it finds between layers.
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp

from jaxrunner.indexing import find_rows
from jaxrunner.types import Array

MAX_PARTS = 64  # that a request is split into
MAX_HEAD_DIM = 128  # of a cluster's items: two of 256 have no room on a multiprocessor
MAX_BOX = 4096  # numbers of a part that blocks of a cluster receive, so that two blocks fit


@dataclass(frozen=True)
class TuningConfig:
    """Sizes that change speed alone."""

    block_kv: int = 64  # keys of a tile
    stages: int = 2  # tiles in flight
    num_ctas: int = 264  # that run at a time: two a multiprocessor of an H200
    least: int = 2  # tiles of a part: as many as are in flight from its start
    cluster: int = 8  # blocks at most that merge a row's parts as a cluster


DEFAULT = TuningConfig()


class Items(NamedTuple):
    """Which keys each CTA reads. `I` items at most, those behind the last are row B."""

    row: Array  # [I]
    first: Array  # [I] first tile
    last: Array  # [I] one past the last tile
    part: Array  # [I] 0 where the item is its row's only one, else 1; 2 for a row's first part
    length: Array  # [I] of the row
    block: Array  # [I] of the first tile: read with the rest, its keys come a memory latency sooner
    head: Array  # [I] the row's first item
    parts: Array  # [I] items of the row


def plan(
    seq_lens: Array, blocks: Array, cache_shape: tuple[int, ...], window: int | None,
    config: TuningConfig, *, skip_empty: bool = False, query_len: int = 1, cluster: int = 1,
) -> Items:  # fmt: skip
    """Shares the keys of rows with `seq_lens`, [B], out among clusters of the chip's CTAs.

    The CTAs of a cluster share each of its items: `I` is a multiple of `cluster`.
    """
    _, num_kv_heads, S, _ = cache_shape
    B, slots = seq_lens.shape[0], max(1, config.num_ctas // (num_kv_heads * cluster))
    last = (seq_lens + config.block_kv - 1) // config.block_kv
    first = jnp.zeros_like(last)
    if window is not None:
        first = jnp.maximum(seq_lens - (window + query_len - 1), 0) // config.block_kv
    tiles = last - first
    share = (tiles.sum() + slots - 1) // slots
    # A merge takes longer the more parts there are, and a part the more tiles it has.
    share = jnp.maximum(share, jnp.ceil(jnp.sqrt(tiles) / 2).astype(jnp.int32))
    share = jnp.maximum(share, config.least * cluster)
    # An empty row has an item too, which writes its zeros, unless nobody reads them.
    least = 0 if skip_empty else 1
    parts = jnp.clip((tiles + share - 1) // share, least, MAX_PARTS)
    rows, item = (jnp.arange(n, dtype=jnp.int32) for n in (B, B + slots - 1))
    # Comparisons of all with all, where a search or a scatter would be many launches.
    end = jnp.where(rows[:, None] >= rows[None], parts[None], 0).sum(1)
    row = find_rows(end, item)
    of = jnp.minimum(row, B - 1)
    head, num, tiles, first = (end - parts)[of], parts[of], tiles[of], first[of]
    part = item - head
    start = first + part * tiles // num
    width = first + (part + 1) * tiles // num - start
    edge = start[:, None] + width[:, None] * jnp.arange(cluster + 1)[None] // cluster
    at = jnp.minimum(edge[:, :-1] * config.block_kv // S, blocks.shape[1] - 1)
    return Items(
        row=_repeat(row, cluster),
        first=edge[:, :-1].reshape(-1),
        last=edge[:, 1:].reshape(-1),
        part=_repeat(jnp.where(num == 1, 0, jnp.where(part == 0, 2, 1)), cluster),
        length=_repeat(seq_lens[of], cluster),
        block=blocks[of[:, None], at].reshape(-1),
        head=_repeat(head, cluster),
        parts=_repeat(num, cluster),
    )


def _repeat(x: Array, num: int) -> Array:
    return jnp.broadcast_to(x[:, None], (x.shape[0], num)).reshape(-1)


def cluster_of(B: int, num_kv_heads: int, rows: int, D: int, config: TuningConfig) -> int:
    """Returns how many blocks share an item of one of B rows; 1 where rows are in few parts.

    rows: query heads of a KV head, of all tokens, each of D numbers.
    """
    room, size = config.num_ctas // (B * num_kv_heads), 1
    if rows * D > MAX_BOX or D > MAX_HEAD_DIM:
        return size
    while 2 * size <= min(room, config.cluster) and D % (16 * size) == 0:
        size *= 2
    return size
