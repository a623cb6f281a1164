"""Paged attention of one query token a request, or of the few that verify drafts.

Both are bandwidth-bound, so all is about reading KV once: a request's tokens and the query heads of
a KV head share a tile (`query_rows`).
Each work item is a run of key tiles of one request and KV head. A request whose run is longer than
the chip's share is split (Flash-Decoding, https://crfm.stanford.edu/2023/10/12/flashdecoding.html);
the part that ends last merges them (`split_kv_merge`). `decode_plan` finds the items.
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

from jaxrunner.kernels_pallas import (
    decode_item,
    decode_quantized_kv,
    mosaic,
    pdl,
    quantized_kv,
    query_rows,
    split_kv_merge,
)
from jaxrunner.kernels_pallas.decode_plan import DEFAULT, TuningConfig, plan
from jaxrunner.kernels_pallas.mosaic import Barrier, Index, Ref, Shaped
from jaxrunner.kernels_pallas.online_softmax import LAYOUT, LOG2_E, NOTHING, seen, with_sink
from jaxrunner.kernels_pallas.stores import put, put_rows
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
    weighed: bool = False, config: TuningConfig = DEFAULT,
) -> Array:  # fmt: skip
    """Attends the last tokens of each row to those of `seq_lens`, [B], tokens that they see.

    q: [B * query_len, H, D], the tokens of a row ascending; k and v: [N, K, S, D]; blocks: [B, M];
    sinks: [H], logits that only take weight; k_scale and v_scale: [N, K, S], float32, what k and v
    of 8 bits are multiples of; num_tokens: [B], how many of a row's places in q have tokens, the
    first ones, all if None; wanted where query_len is more than 1 alone.
    weighed: whether float32 [B, H, D + 1] is to be returned, as `reference.online_softmax` does of
    a part of the keys; of one token a row alone, and of keys without scales.
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
    G = H // K
    items = plan(
        seq_lens, blocks, k.shape, window, config, skip_empty=skip_empty, query_len=query_len
    )
    num_items, rows = items.row.shape[0], G * query_len
    unit = split_kv_merge.unit(D)
    part_rows = -(-rows // unit) * unit
    out = jax.empty_ref(jax.ShapeDtypeStruct((T, K, G, D), q.dtype))
    part, weight = (
        jax.empty_ref(jax.ShapeDtypeStruct((num_items, K, part_rows, width), jnp.float32))
        for width in (D, 8)
    )
    counters = jnp.zeros((B, K), jnp.int32)
    sink = jnp.full((K, ROWS), NOTHING, jnp.float32)
    if sinks is not None:
        of_heads = sinks.reshape(K, G).astype(jnp.float32) * LOG2_E
        sink = sink.at[:, :rows].set(jnp.tile(of_heads, query_len) if query_len > 1 else of_heads)
    heads, padded = _queries(q, K, query_len)
    static = dict(scale=scale, window=window, soft_cap=soft_cap, sinks=sinks is not None)
    static |= dict(query_len=query_len)
    rest = blocks, jnp.stack(items, 1), sink, counters, out, part, weight
    # Where all rows have one query, the kernel has no argument that says so.
    fixed, counts = (padded, None), ()
    if query_len > 1:
        if num_tokens is None:
            num_tokens = jnp.full_like(seq_lens, query_len)
        fixed, counts = (padded,), (num_tokens,)
    assert not weighed or (query_len == 1 and k_scale is None)
    if k_scale is None:
        static |= dict(weighed=weighed)
        body = functools.partial(_attend, config, *fixed, **static)
        copies = max(1, config.block_kv // k.shape[2])  # of a tile: one a block
        launch = _launch(body, (num_items, K), _scratch(q.dtype, D, copies, config))
        launch(*counts, heads, k, v, *rest)
    else:
        body = functools.partial(
            decode_quantized_kv.attend, config.block_kv, config.stages, *fixed, **static
        )
        scratch = decode_quantized_kv.scratch(k, max(padded, 8), config.stages, config.block_kv)
        params = dict(reduction_scratch_bytes=1024, unsafe_no_auto_barriers=True)
        launch = _launch(body, (num_items, K), scratch, **params)
        launch(*counts, heads, k, v, k_scale, v_scale, *rest)
    if weighed:
        both = jax.freeze(part)[:, :, :G], jax.freeze(weight)[:, :, :G, :1]
        return split_kv_merge.join(*both, items.row, B).reshape(B, H, D + 1)
    return jax.freeze(out).reshape(T, H, D)


def _queries(q: Array, K: int, query_len: int) -> tuple[Array, int]:
    """Returns q, [T, H, D], as the kernels read it, and the rows of a tile that they read.

    Of one token a row, [rows, D], where each KV head's rows are padded to those; of several,
    [T * K, G, D].
    """
    T, H, D = q.shape
    G = H // K
    if query_len > 1:
        return q.reshape(T * K, G, D), -(-G * query_len // 8) * 8
    # A copy into tiles of 8 rows must not straddle them.
    padded = G if 8 % G == 0 else -(-G // 8) * 8
    heads = jnp.pad(q.reshape(T * K, G, D), ((0, 0), (0, padded - G), (0, 0))).reshape(-1, D)
    return jnp.pad(heads, ((0, -heads.shape[0] % 8), (0, 0))), padded


def _launch(
    body: functools.partial[None], grid: tuple[int, int], scratch: list[Any], **params: Any
) -> Callable[..., None]:
    return plgpu.kernel(
        body, out_type=(), grid=grid, grid_names=("item", "head"), scratch_types=scratch,
        kernel_name=f"decode_{body.func.__name__.strip('_')}",
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane, **params
        ),
    )  # fmt: skip


def _scratch(dtype: DTypeLike, D: int, copies: int, config: TuningConfig) -> list[Any]:
    tiled = mosaic.tiled(plgpu.find_swizzle(D * 16) // 2, 2)
    kv = (config.stages, config.block_kv, D)
    return [
        plgpu.SMEM((ROWS, D), dtype, transforms=tiled),
        plgpu.SMEM(kv, dtype, transforms=tiled),
        plgpu.SMEM(kv, dtype, transforms=tiled),
        plgpu.Barrier(),
        plgpu.Barrier(num_arrivals=copies, num_barriers=config.stages),
        plgpu.Barrier(num_arrivals=copies, num_barriers=config.stages),
        split_kv_merge.FLAG,
    ]


def _attend(
    config: TuningConfig, padded: int, num_ref: Ref | None, q_ref: Ref, k_ref: Ref, v_ref: Ref,
    blocks_ref: Ref, items_ref: Ref, sink_ref: Ref, counter_ref: Ref, out_ref: Ref, part_ref: Ref,
    weight_ref: Ref, q_smem: Ref, k_smem: Ref, v_smem: Ref, q_ready: Barrier, k_ready: Barrier,
    v_ready: Barrier, flag: Ref,
    *, scale: float, window: int | None, soft_cap: float | None, sinks: bool, query_len: int,
    weighed: bool,
) -> None:  # fmt: skip
    """One item: an online softmax (arXiv:2205.14135) over its tiles of one KV head's keys."""
    pdl.begin()
    item, h = lax.axis_index("item"), lax.axis_index("head")
    (N, K, S, D), (B, M), C = k_ref.shape, blocks_ref.shape, config.block_kv
    own = decode_item.read(items_ref, item)
    row, first, last, part_of, length, first_block, head, num = own
    new = query_rows.num_queries(num_ref, row)
    reach = None if window is None else window + new - 1  # of all the row's tokens
    layout = plgpu.Layout.WGMMA
    per_row = layout.reduce(1)

    def wide(x: Array, like: Array) -> Array:
        return lax.broadcast_in_dim(x, like.shape, [0])

    def block_of(tile: Array, part: int = 0) -> Array:
        at = jnp.minimum((tile * C + part * S) // S, M - 1)
        return blocks_ref[row, at]

    @pl.when(row < B)
    def _() -> None:
        queries = None
        if query_len == 1:
            _copy(q_ref, (row * K + h) * padded, q_smem.at[pl.ds(0, max(padded, 8))], q_ready)
        else:  # asked for before keys
            start = row * (query_len * K) + h
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
        token, seen_by = query_rows.sight(ROWS, out_ref.shape[2], per_row, length, new)

        def tile_step(tile: Array, carry: tuple[Array, ...]) -> tuple[Array, ...]:
            acc, best, total, block = carry
            stage = lax.rem(tile - first, config.stages)
            next_block = block_of(tile + config.stages + 1)
            mosaic.barrier_wait(k_ready.at[stage])

            def multiply(scores: Ref) -> Array:
                mosaic.wgmma(scores, q_smem, k_smem.at[stage].T)
                return scores[...]

            scores = pl.run_scoped(multiply, mosaic.ACC((ROWS, C), jnp.float32)) * scale
            if soft_cap is not None:
                scores = soft_cap * jnp.tanh(scores / soft_cap)
            limit = length if token is None else wide(seen_by, scores)
            visible = seen(tile * C, (ROWS, C), 1, limit, window)
            scores = jnp.where(visible, scores * LOG2_E, NOTHING)
            new_best = jnp.maximum(best, scores.max(axis=1))
            p = jnp.exp2(scores - wide(new_best, scores))
            kept = jnp.exp2(best - new_best)
            total = total * kept + p.sum(axis=1)
            acc = acc * wide(kept, acc)
            mosaic.barrier_wait(v_ready.at[stage])
            _silence(v_smem.at[stage], tile, length, reach)

            def accumulate(acc: Ref) -> None:
                mosaic.wgmma(acc, p.astype(v_smem.dtype), v_smem.at[stage])

            acc = pl.run_state(accumulate)(mosaic.ACC.init(acc))

            @pl.when(tile + config.stages < last)
            def _() -> None:
                fetch(tile + config.stages, stage, block)

            return acc, new_best, total, next_block

        start = (
            plgpu.layout_cast(jnp.zeros((ROWS, D), jnp.float32), layout),
            plgpu.layout_cast(jnp.full((ROWS,), NOTHING, jnp.float32), per_row),
            plgpu.layout_cast(jnp.zeros((ROWS,), jnp.float32), per_row),
            block_of(first + config.stages),
        )
        acc, best, total, _ = lax.fori_loop(first, last, tile_step, start)
        if sinks:
            sink = mosaic.load(sink_ref.at[h], layout=per_row, optimized=False)
            best, total, kept = with_sink(sink, part_of, best, total)
            acc = acc * wide(kept, acc)
        safe = jnp.maximum(total, 1e-30)
        acc = acc / wide(safe, acc)
        if token is not None:
            acc = jnp.where(wide(token, acc) < new, acc, jnp.zeros_like(acc))
        mine = query_rows.of_row(out_ref, row, h, query_len)
        counter, parts = counter_ref.at[row, h], (part_ref.at[item, h], weight_ref.at[item, h])

        def merge() -> None:
            split_kv_merge.finish(part_ref, weight_ref, h, head, num, mine, counter, flag)

        _leave((acc, best, safe), mine, parts, part_of, None if weighed else merge)


def _leave(
    result: tuple[Array, Array, Array], out: Ref, parts: tuple[Ref, Ref], part_of: Array,
    merge: Callable[[], None] | None,
) -> None:  # fmt: skip
    """Writes what a row's only item found; or a part of it and its weight, and merges.

    Without `merge` what any item found is a part. Few rows are written, so that registers do.
    """
    if merge is None:
        _leave_part(result, parts)
        return

    @pl.when(part_of == 0)
    def _() -> None:
        put_rows(result[0].astype(out.dtype), out)

    @pl.when(part_of != 0)
    def _() -> None:
        _leave_part(result, parts)
        merge()


def _leave_part(result: tuple[Array, Array, Array], parts: tuple[Ref, Ref]) -> None:
    """Writes a part of what a row found, and its weight."""
    acc, best, total = result
    put_rows(acc, parts[0])
    weight = lax.broadcast_in_dim(best + jnp.log2(total), (ROWS, 8), [0])
    put_rows(plgpu.layout_cast(weight, plgpu.Layout.WGMMA), parts[1])


def _copy(queries: Ref, start: Array, heads: Ref, ready: Barrier) -> None:
    """Starts a copy of queries, [rows, D], from `start` on.

    Rows behind the head group are read along; nothing comes of them.
    """
    mosaic.copy_gmem_to_smem(queries.at[pl.ds(start, heads.shape[0])], heads, ready)


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
