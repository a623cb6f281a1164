"""The keys that each block of decode attention's grid reads.

Found on the device, once a step: XLA shares what it finds between layers.
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp

from jaxrunner.types import Array

MAX_PARTS = 64  # that a request is split into
MAX_HEAD_DIM = 128  # of what clusters read: of 256 a multiprocessor has room for one CTA
MAX_BOX = 4096  # numbers of a part that CTAs of a cluster receive, so that two CTAs fit
CLUSTER = 8  # CTAs: the most that a cluster may have
LONG = 4  # parts of the longest row where there are as many rows as the chip has room for


@dataclass(frozen=True)
class TuningConfig:
    """How keys are cut: what changes speed, and the order of sums."""

    block_kv: int = 64  # keys of a tile
    stages: int = 2  # tiles in flight
    num_ctas: int = 264  # that run at a time: two a multiprocessor of an H200
    least: int = 2  # tiles of a part: as many as are in flight from its start
    cluster: int = 24  # tiles of a row, at most, that a cluster of 8 CTAs reads; 0 for no clusters
    # Whether a row is cut by its own length and the number of rows, not by the lengths of others,
    # so that its sums are in one order.
    batch_invariant: bool = False
    most: int = 32  # tiles of a part then, more where rows may be over `LONG` times as long


DEFAULT, BATCH_INVARIANT = TuningConfig(), TuningConfig(batch_invariant=True)


class Items(NamedTuple):
    """The keys that each CTA reads, in `I` items at most; those behind the last are row B.

    The CTAs of a cluster are side by side, and of one row. It merges a row that it has whole; of a
    row of several clusters each CTA leaves a part in memory, as without clusters.
    """

    row: Array  # [I]
    first: Array  # [I] first tile
    last: Array  # [I] one past the last tile
    num: Array  # [I] query tokens of the row
    length: Array  # [I] of the row
    block: Array  # [I] of the first tile: read with the rest, its keys come a memory latency sooner
    head: Array  # [I] the row's first item
    parts: Array  # [I] items of the row


def plan(
    seq_lens: Array, blocks: Array, cache_shape: tuple[int, ...], window: int | None,
    config: TuningConfig, *, skip_empty: bool = False, query_len: int = 1,
    num_tokens: Array | None = None, cluster: int = 1,
) -> Items:  # fmt: skip
    """Shares the keys of rows with `seq_lens`, [B], out among clusters of the chip's CTAs.

    num_tokens: [B], of the `query_len` places of a row, all if None. cluster: what `cluster_of`
    returns; `I`, and the parts of each row, are multiples of it.
    """
    _, num_kv_heads, S, _ = cache_shape
    B, slots = seq_lens.shape[0], max(1, config.num_ctas // (num_kv_heads * cluster))
    last = (seq_lens + config.block_kv - 1) // config.block_kv
    first = jnp.zeros_like(last)
    if window is not None:
        first = jnp.maximum(seq_lens - (window + query_len - 1), 0) // config.block_kv
    if num_tokens is None:
        num_tokens = jnp.full_like(seq_lens, query_len)
    tiles, rows = last - first, jnp.arange(B, dtype=jnp.int32)
    num_items = B if cluster == CLUSTER else B + slots - 1
    share = (tiles.sum() + slots * cluster - 1) // (slots * cluster)
    most = None
    if config.batch_invariant and cluster == 1:  # of a cluster of 8 each row is one in any case
        least, longest = min(max(1, slots // B), MAX_PARTS), blocks.shape[1] * S
        if window is not None:
            longest = min(longest, window + query_len - 1 + config.block_kv)
        longest = -(-longest // config.block_kv)
        num_parts = max(least, min(LONG, -(-longest // config.most)))  # of a row, at most
        num_items, most = B * num_parts, max(config.most, -(-longest // num_parts))
        share = (tiles + least - 1) // least
    # A merge takes longer the more parts there are, and a part the more tiles it has.
    share = jnp.maximum(share, jnp.ceil(jnp.sqrt(tiles) / 2).astype(jnp.int32))
    share = jnp.maximum(share, config.least) * cluster
    if most is not None:
        share = jnp.minimum(share, most)
    if cluster > 1:
        # Rows are whole where parts would need two turns, and always in clusters of 8.
        longest = jnp.maximum(tiles.max(), 1)
        turns = ((tiles + share - 1) // share).sum() > slots
        whole = (longest <= 2 * share) & turns if cluster < CLUSTER else True
        share = jnp.where(whole, longest, share)
    # An empty row has an item too, which writes its zeros, unless nobody reads them.
    parts = jnp.clip((tiles + share - 1) // share, 0 if skip_empty else 1, MAX_PARTS // cluster)
    item = jnp.arange(num_items, dtype=jnp.int32)
    # Comparisons of all with all, where a sort, a search or a scatter would be many launches.
    behind = rows[:, None] >= rows[None]
    if cluster == 1 and slots < B:  # rows that start later are short, so that all end together
        other, own = tiles[None], tiles[:, None]
        behind = (other > own) | ((other == own) & behind)
    end = jnp.where(behind, parts[None], 0).sum(1)
    begin = end - parts
    mine = (begin[None] <= item[:, None]) & (item[:, None] < end[None])
    row = B + jnp.where(mine, rows[None] - B, 0).sum(1, dtype=jnp.int32)
    of = jnp.minimum(row, B - 1)
    head, num, tiles, first = begin[of], parts[of], tiles[of], first[of]
    part = item - head
    start = first + part * tiles // num
    width = first + (part + 1) * tiles // num - start
    edge = start[:, None] + width[:, None] * jnp.arange(cluster + 1)[None] // cluster
    at = jnp.minimum(edge[:, :-1] * config.block_kv // S, blocks.shape[1] - 1)
    return Items(
        row=_repeat(row, cluster),
        first=edge[:, :-1].reshape(-1),
        last=edge[:, 1:].reshape(-1),
        num=_repeat(num_tokens[of], cluster),
        length=_repeat(seq_lens[of], cluster),
        block=blocks[of[:, None], at].reshape(-1),
        head=_repeat(head * cluster, cluster),
        parts=_repeat(num * cluster, cluster),
    )


def _repeat(x: Array, num: int) -> Array:
    return jnp.broadcast_to(x[:, None], (x.shape[0], num)).reshape(-1)


def cluster_of(
    q_shape: tuple[int, ...], cache_shape: tuple[int, ...], table: tuple[int, ...],
    window: int | None, query_len: int, config: TuningConfig,
) -> int:  # fmt: skip
    """Returns how many CTAs are a cluster, which merges a row that it has whole; 1 for none.

    Eight where no row has many tiles, by its window or the width of `table`, [B, M], and there are
    few rows; two of rows of several tokens where the chip has room for two a row. Others lose: of
    four CTAs, or of eight all over the chip, not all clusters find room at a time.
    """
    (_, H, D), (_, K, S, _), (B, M) = q_shape, cache_shape, table
    most, room = M * S, config.num_ctas // (B * K)
    if window is not None:  # its first key may be a tile's last
        most = min(most, window + query_len - 1 + config.block_kv - 1)
    if D > MAX_HEAD_DIM or H // K * query_len * D > MAX_BOX:
        return 1
    if most <= config.cluster * config.block_kv and room >= 2 * CLUSTER and D % (8 * CLUSTER) == 0:
        return CLUSTER
    two = query_len > 1 and config.cluster and not config.batch_invariant
    return 2 if room == 2 and two else 1
