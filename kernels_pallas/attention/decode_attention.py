"""Paged attention of one query token a request, or of the few that verify drafts.

Both are bandwidth-bound, so all is about reading KV once: a request's tokens and the query heads of
a KV head share a tile (`query_rows`).
Each work item is a run of key tiles of one request and KV head. A request whose run is longer than
the chip's share is split (Flash-Decoding, https://crfm.stanford.edu/2023/10/12/flashdecoding.html);
the part that ends last merges them (`split_kv_merge`), or a cluster of blocks does, each of which
has one (`cluster_merge`). `decode_plan` finds the items.
"""

from collections.abc import Callable
import functools
from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxrunner.kernels_pallas import mosaic, pdl
from jaxrunner.kernels_pallas.attention import (
    cluster_merge,
    decode_item,
    decode_quantized_kv,
    quantized_kv,
    query_rows,
    split_kv_merge,
)
from jaxrunner.kernels_pallas.attention.decode_plan import DEFAULT, TuningConfig, cluster_of, plan
from jaxrunner.kernels_pallas.attention.online_softmax import (
    LAYOUT,
    LOG2_E,
    NOTHING,
    PER_ROW,
    full,
    seen,
    weigh,
    wide,
    with_sink,
)
from jaxrunner.kernels_pallas.mosaic import Barrier, Index, Ref, Shaped
from jaxrunner.kernels_pallas.stores import put, put_heads
from jaxrunner.types import Array

ROWS = 64  # of a wgmma: query tokens times the query heads of a KV head, padded


def refuses(
    q: Shaped, k: Shaped, config: TuningConfig = DEFAULT, *, query_len: int = 1
) -> str | None:
    """Says why q, [T, H, D], and k, [N, K, S, D], are not served; None if they are.

    query_len: tokens of q that a row of the batch has places for.
    """
    (T, H, D), (_, K, S, _) = q.shape, k.shape
    if k.dtype in quantized_kv.DTYPES:
        if reason := quantized_kv.refuses(q, k):
            return reason
    elif q.dtype not in (jnp.bfloat16, jnp.float16) or k.dtype != q.dtype:
        return f"wants q and KV of one dtype, bfloat16 or float16, got {q.dtype} and {k.dtype}"
    if D % 16 or D > 256:
        return f"wants a head_dim that is a multiple of 16 up to 256, got {D}"
    if H % K or H // K > ROWS:
        return f"wants at most {ROWS} query heads for a KV head, got {H} for {K}"
    if query_len < 1 or T % query_len:
        return f"wants tokens for each of query_len={query_len} places of a row, got {T}"
    if (rows := H // K * query_len) > ROWS:
        few = f"{query_len} x {H // K}"
        return f"wants at most {ROWS} query tokens times heads for a KV head, got {few} = {rows}"
    if S % 8 or (S % config.block_kv and config.block_kv % S):
        return f"wants a block_size that divides or is a multiple of {config.block_kv}, got {S}"
    return None


def decode_attention(
    q: Array, k: Array, v: Array, blocks: Array, seq_lens: Array, *,
    scale: float, window: int | None = None, soft_cap: float | None = None,
    sinks: Array | None = None, k_scale: Array | None = None, v_scale: Array | None = None,
    query_len: int = 1, num_tokens: Array | None = None, skip_empty: bool = False,
    weighed: bool = False, into: Any = None, config: TuningConfig = DEFAULT,
) -> Any:  # fmt: skip
    """Attends the last tokens of each row to those of `seq_lens`, [B], tokens that they see.

    q: [B * query_len, H, D], the tokens of a row ascending; k and v: [N, K, S, D]; blocks: [B, M];
    sinks: [H], logits that only take weight; k_scale and v_scale: [N, K, S], float32, what k and v
    of 8 bits are multiples of; num_tokens: [B], how many of a row's places in q have tokens, the
    first ones, all if None; wanted where query_len is more than 1 alone.
    weighed: whether float32 [B, H, D + 1] is to be returned, as `reference.online_softmax` does of
    a part of the keys; of one token a row alone, and of keys without scales.
    into: what `prefill_attention.into` returns: its first tokens are written in place of an array,
    and those of rows of no tokens left as they are; None is returned. With `skip_empty` alone.
    Returns [B * query_len, H, D]; places without a token, and rows of no tokens, are zeros, or
    with `skip_empty` rows of no tokens anything.

    Raises:
      ValueError: the shapes are refused.
    """
    reason = refuses(q, k, config, query_len=query_len)
    if reason := reason or quantized_kv.unscaled(k, k_scale, v_scale):
        raise ValueError(f"decode_attention {reason}")
    (T, H, D), K, B = q.shape, k.shape[1], seq_lens.shape[0]
    if T != B * query_len:
        want = f"{B} rows of query_len={query_len} tokens"
        raise ValueError(f"decode_attention wants q of {want}, got {T}: pass both as they are")
    if into is not None and (weighed or not skip_empty):
        given = f"skip_empty={skip_empty} and weighed={weighed}"
        raise ValueError(f"decode_attention with into wants skip_empty alone, got {given}")
    G = H // K
    cluster = 1
    if not weighed and k_scale is None:
        cluster = cluster_of(q.shape, k.shape, blocks.shape, window, query_len, config)
    items = plan(
        seq_lens, blocks, k.shape, window, config, skip_empty=skip_empty, query_len=query_len,
        num_tokens=num_tokens, cluster=cluster,
    )  # fmt: skip
    num_items, rows = items.row.shape[0], G * query_len
    unit = split_kv_merge.unit(D)
    part_rows = -(-rows // unit) * unit
    made = jax.ShapeDtypeStruct((T, K, G, D), q.dtype)
    out = jax.empty_ref(made) if into is None else into
    part, weight = (
        jax.empty_ref(jax.ShapeDtypeStruct((num_items, K, part_rows, width), jnp.float32))
        for width in (D, 8)
    )
    tile = query_rows.tile_of(query_len, G)
    if k_scale is not None and query_len > 1:
        tile = tile._replace(pitch=G)
    sink = jax.empty_ref(jax.ShapeDtypeStruct((K, ROWS), jnp.float32))
    if sinks is not None:
        sinks = sinks.reshape(K, G).astype(jnp.float32) * LOG2_E
        sink = query_rows.of_heads(sinks, tile, NOTHING)
    heads, padded = query_rows.queries(q, K, tile)
    static = dict(scale=scale, window=window, soft_cap=soft_cap, sinks=sinks is not None)
    static |= dict(query_len=query_len)
    rest = blocks, decode_item.table(items, K), sink, out, part, weight
    assert not weighed or (query_len == 1 and k_scale is None)
    if k_scale is None:
        # Of two CTAs, so many as run at a time, each with a second item where there are more.
        clusters = num_items // cluster - (B - 1 if cluster == 2 else 0)
        static |= dict(weighed=weighed, cluster=cluster, clusters=clusters, tile=tile)
        body = functools.partial(_attend, config, padded, **static)
        copies = max(1, config.block_kv // k.shape[2])  # of a tile: one a block
        scratch = _scratch(q.dtype, D, copies, query_len if tile.apart else 1, config)
        if cluster > 1:
            scratch += cluster_merge.scratch(cluster, part_rows, D)
        launch = _launch(body, (clusters, K), scratch, cluster)
        launch(heads, k, v, *rest)
    else:
        body = functools.partial(
            decode_quantized_kv.attend, config.block_kv, config.stages, padded, **static
        )
        scratch = decode_quantized_kv.scratch(k, max(padded, 8), config.stages, config.block_kv)
        params = dict(reduction_scratch_bytes=1024, unsafe_no_auto_barriers=True)
        launch = _launch(body, (num_items, K), scratch, 1, **params)
        launch(heads, k, v, k_scale, v_scale, *rest)
    if weighed:
        both = jax.freeze(part)[:, :, :G], jax.freeze(weight)[:, :, :G, :1]
        return split_kv_merge.join(*both, items.row, B).reshape(B, H, D + 1)
    return jax.freeze(out).reshape(T, H, D) if into is None else None


def _launch(
    body: functools.partial[None], grid: tuple[int, int], scratch: list[Any], cluster: int,
    **params: Any,
) -> Callable[..., None]:  # fmt: skip
    several: Any = (
        dict(cluster=(cluster,), cluster_names=(cluster_merge.PEER,)) if cluster > 1 else {}
    )
    return plgpu.kernel(
        body, out_type=(), grid=grid, grid_names=("item", "head"), scratch_types=scratch, **several,
        kernel_name=f"decode_{body.func.__name__.strip('_')}",
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane, **params
        ),
    )  # fmt: skip


def _scratch(dtype: DTypeLike, D: int, copies: int, tokens: int, config: TuningConfig) -> list[Any]:
    tiled = mosaic.tiled(plgpu.find_swizzle(D * 16) // 2, 2)
    kv = (config.stages, config.block_kv, D)
    return [
        plgpu.SMEM((ROWS, D), dtype, transforms=tiled),
        plgpu.SMEM(kv, dtype, transforms=tiled),
        plgpu.SMEM(kv, dtype, transforms=tiled),
        plgpu.Barrier(num_arrivals=tokens),
        plgpu.Barrier(num_arrivals=copies, num_barriers=config.stages),
        plgpu.Barrier(num_arrivals=copies, num_barriers=config.stages),
        split_kv_merge.FLAG,
    ]


def _attend(
    config: TuningConfig, padded: int, *refs: Any, cluster: int, clusters: int, **static: Any
) -> None:
    """Attends an item; of clusters, a second one where there are more items than clusters."""
    k_ref, _, blocks_ref, items_ref, *_, q_smem = refs[1:10]
    if blocks_ref.shape[0] * k_ref.shape[1] >= config.num_ctas:
        query_rows.clear(q_smem)  # so many rows bring the chip to its limit of power
    pdl.begin()
    item = lax.axis_index("item")
    attend = functools.partial(_attend_item, config, padded, *refs, cluster=cluster, **static)
    total = items_ref.shape[0] // cluster
    if clusters == total:
        attend(item=item)
        return
    later = jnp.minimum(item + clusters, total - 1) * cluster
    more = (item + clusters < total) & (items_ref[later, 0] < blocks_ref.shape[0])
    turns = jnp.where(more, 2, 1)

    def turn(i: Array, _: None) -> None:
        attend(item=item + i * clusters)
        pl.when(i + 1 < turns)(cluster_merge.meet)  # all have read what the next item overwrites
        return _

    lax.fori_loop(0, turns, turn, None)


def _attend_item(
    config: TuningConfig, padded: int, q_ref: Ref, k_ref: Ref, v_ref: Ref,
    blocks_ref: Ref, items_ref: Ref, sink_ref: Ref, out_ref: Ref, part_ref: Ref, weight_ref: Ref,
    q_smem: Ref, k_smem: Ref, v_smem: Ref, q_ready: Barrier, k_ready: Barrier, v_ready: Barrier,
    flag: Ref, *boxes: Ref,
    item: Array, cluster: int, scale: float, window: int | None, soft_cap: float | None,
    sinks: bool, query_len: int, weighed: bool, tile: query_rows.Tile,
) -> None:  # fmt: skip
    """One item: an online softmax (arXiv:2205.14135) over its tiles of one KV head's keys."""
    (N, K, S, D), (B, M), C = k_ref.shape, blocks_ref.shape, config.block_kv
    h = lax.axis_index("head")
    peer = lax.axis_index(cluster_merge.PEER) if boxes else 0
    item = item * cluster + peer
    own = decode_item.read(items_ref, item)
    row, first, last, num, length, first_block, head, parts = own
    reach = None if window is None else window + num - 1  # of all the row's tokens

    def block_of(tile: Array, part: int = 0) -> Array:
        at = jnp.minimum((tile * C + part * S) // S, M - 1)
        return blocks_ref[row, at]

    @pl.when(row < B)
    def _() -> None:
        start = row * (query_len * K) + h
        if tile.apart:
            _copy(q_ref, start * padded, K * padded, tile, q_smem, q_ready)
            queries = None
        else:  # asked for before keys
            queries = query_rows.load(q_ref, start, padded, query_len, K)

        def fetch(tile: Array, stage: Index, block: Array) -> None:
            for part in range(max(1, C // S)):
                block = block_of(tile, part) if part else block
                block = jnp.clip(block, 0, N - 1)
                at = pl.ds(lax.rem(tile * C, S), C) if S > C else slice(None)
                to = pl.ds(part * S, S) if S < C else slice(None)
                for ref, smem, ready in ((k_ref, k_smem, k_ready), (v_ref, v_smem, v_ready)):
                    mosaic.copy_gmem_to_smem(
                        ref.at[block, h, at], smem.at[stage, to], ready.at[stage]
                    )

        for i in range(config.stages):

            @pl.when(first + i < last)
            def _(i: int = i) -> None:
                fetch(first + i, i, block_of(first + i) if i else first_block)

        if queries is None:
            mosaic.barrier_wait(q_ready)
        else:
            put(q_smem.at[pl.ds(0, queries.shape[0])], queries)
            plgpu.commit_smem()
        limit = length
        if query_len > 1:
            limit = query_rows.sight(ROWS, tile.pitch, PER_ROW, length, num)

        def tile_step(at: Array, carry: tuple[Array, ...]) -> tuple[Array, ...]:
            acc, best, total, block = carry
            stage = lax.rem(at - first, config.stages)
            next_block = block_of(at + config.stages + 1)
            mosaic.barrier_wait(k_ready.at[stage])

            def multiply(scores: Ref) -> Array:
                mosaic.wgmma(scores, q_smem, k_smem.at[stage].T)
                return scores[...]

            scores = pl.run_scoped(multiply, mosaic.ACC((ROWS, C), jnp.float32))

            def softmax() -> tuple[Array, ...]:
                x = scores * scale
                if soft_cap is not None:
                    x = soft_cap * jnp.tanh(x / soft_cap)
                keys = wide(limit, x) if query_len > 1 else limit
                x = jnp.where(seen(at * C, (ROWS, C), 1, keys, window), x * LOG2_E, NOTHING)
                return weigh(x, acc, best, total, v_smem.dtype)

            others = full((ROWS, C), 0.0, dtype=v_smem.dtype), acc, best, total
            p, acc, best, total = query_rows.of_heads_alone(tile, softmax, others)
            mosaic.barrier_wait(v_ready.at[stage])
            _silence(v_smem.at[stage], at, length, reach)

            def accumulate(acc: Ref) -> None:
                mosaic.wgmma(acc, p, v_smem.at[stage])

            acc = pl.run_state(accumulate)(mosaic.ACC.init(acc))

            @pl.when(at + config.stages < last)
            def _() -> None:
                fetch(at + config.stages, stage, block)

            return acc, best, total, next_block

        none = full((ROWS, D), 0.0), full((ROWS,), NOTHING, PER_ROW), full((ROWS,), 0.0, PER_ROW)
        start = *none, block_of(first + config.stages)
        acc, best, total, _ = lax.fori_loop(first, last, tile_step, start)
        if sinks:
            sink = mosaic.load(sink_ref.at[h], layout=PER_ROW, optimized=False)
            best, total, kept = with_sink(sink, item == head, best, total)
            acc = acc * wide(kept, acc)
        safe = jnp.maximum(total, 1e-30)
        behind = 1 / safe
        if query_len > 1:
            behind = jnp.where(limit > 0, behind, jnp.zeros_like(behind))
        acc = acc * wide(behind, acc)
        mine = query_rows.of_row(out_ref, row, h, query_len)
        counter = decode_item.counter(items_ref, row, h)
        part = (part_ref.at[item, h], weight_ref.at[item, h])

        def merge() -> None:
            split_kv_merge.finish(part_ref, weight_ref, h, head, parts, mine, counter, flag)

        whole = None if weighed else parts == cluster
        _leave((acc, best, safe), tile, mine, part, whole, boxes, merge)


def _leave(
    result: tuple[Array, Array, Array], tile: query_rows.Tile, out: Ref, part: tuple[Ref, Ref],
    is_whole: Array | None, boxes: tuple[Ref, ...], merge: Callable[[], None],
) -> None:  # fmt: skip
    """Writes what was found of a row that one cluster, or one CTA, has; of another a part of it and
    its weight, and merges.

    Where `is_whole` is None parts are all that is wanted. Few rows are written, so that registers
    do.
    """
    acc, best, total = result

    def weight() -> Array:
        return best + jnp.log2(total)

    def whole() -> None:
        if boxes:
            cluster_merge.exchange(acc, weight(), tile, boxes)
            cluster_merge.merge(boxes, out)
        else:
            put_heads(acc.astype(out.dtype), out, tile)

    def one_of() -> None:
        put_heads(acc, part[0], tile)
        wide = lax.broadcast_in_dim(weight(), (ROWS, 8), [0])
        put_heads(plgpu.layout_cast(wide, plgpu.Layout.WGMMA), part[1], tile)

    if is_whole is None:
        one_of()
        return
    pl.when(is_whole)(whole)

    @pl.when(jnp.logical_not(is_whole))
    def _() -> None:
        one_of()
        merge()


def _copy(
    queries: Ref, start: Array, stride: int, tile: query_rows.Tile, rows: Ref, ready: Barrier
) -> None:
    """Starts copies of a row's tokens into rows, [64, D]; of queries, [..., D], from `start` on.

    stride: rows from a token to the next. Rows behind the head group are read along; nothing comes
    of them.
    """
    num = -(-tile.group // 8) * 8
    for i in range(tile.query_len):
        source = queries.at[pl.ds(start + i * stride, num)]
        mosaic.copy_gmem_to_smem(source, rows.at[pl.ds(i * tile.pitch, num)], ready)


def _silence(values_ref: Ref, tile: Array, length: Array, window: Index | None) -> None:
    """Zeroes what nobody sees of a tile, [C, D]: a weight of 0 silences no NaN."""
    C = values_ref.shape[0]
    partly = (tile + 1) * C > length
    if window is not None:
        partly |= tile * C < length - window

    @pl.when(partly)
    def _() -> None:
        visible = seen(tile * C, values_ref.shape, 0, length, window)
        values = mosaic.load(values_ref, layout=LAYOUT)
        values_ref[...] = jnp.where(visible, values, jnp.zeros_like(values))
        plgpu.commit_smem()
