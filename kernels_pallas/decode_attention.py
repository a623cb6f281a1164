"""Paged attention of one query token a request: bandwidth-bound, so all is about reading KV once.

Each work item is a run of key tiles of one request and KV head. A request whose run is longer than
the chip's share is split (Flash-Decoding, https://crfm.stanford.edu/2023/10/12/flashdecoding.html);
the part that ends last merges them (`split_kv_merge`). Items are found on the device, once a
step: XLA shares them between layers.
"""

from collections.abc import Callable
from dataclasses import dataclass
import functools
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxrunner.indexing import find_rows
from jaxrunner.kernels_pallas import (
    decode_quantized_kv,
    mosaic,
    pdl,
    quantized_kv,
    split_kv_merge,
)
from jaxrunner.kernels_pallas.mosaic import Barrier, Index, Ref, Shaped
from jaxrunner.kernels_pallas.online_softmax import LAYOUT, LOG2_E, NOTHING, seen, with_sink
from jaxrunner.kernels_pallas.stores import put
from jaxrunner.types import Array

ROWS = 64  # of a wgmma: the query heads of a KV head, padded
MAX_PARTS = 64  # that a request is split into


@dataclass(frozen=True)
class TuningConfig:
    """Sizes that change speed alone."""

    block_kv: int = 64  # keys of a tile
    stages: int = 2  # tiles in flight
    num_ctas: int = 264  # that run at a time: two a multiprocessor of an H200


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


def refuses(q: Shaped, k: Shaped, config: TuningConfig = TuningConfig()) -> str | None:
    """Says why q, [B, H, D], and k, [N, K, S, D], are not served; None if they are."""
    (_, H, D), (_, K, S, _) = q.shape, k.shape
    if k.dtype in quantized_kv.DTYPES:
        if reason := quantized_kv.refuses(q, k):
            return reason
    elif q.dtype not in (jnp.bfloat16, jnp.float16) or k.dtype != q.dtype:
        return f"wants q and KV of one dtype, bfloat16 or float16, got {q.dtype} and {k.dtype}"
    if D % 16 or D > 256:
        return f"wants a head_dim that is a multiple of 16 up to 256, got {D}"
    if H % K or H // K > ROWS:
        return f"wants at most {ROWS} query heads for a KV head, got {H} for {K}"
    if S % 8 or (S % config.block_kv and config.block_kv % S):
        return f"wants a block_size that divides or is a multiple of {config.block_kv}, got {S}"
    return None


def plan(
    seq_lens: Array, blocks: Array, cache_shape: tuple[int, ...], window: int | None,
    config: TuningConfig, *, skip_empty: bool = False,
) -> Items:  # fmt: skip
    """Shares the keys of rows with `seq_lens`, [B], out among the chip's CTAs."""
    _, num_kv_heads, S, _ = cache_shape
    B, extra = seq_lens.shape[0], -(-config.num_ctas // num_kv_heads)
    last = (seq_lens + config.block_kv - 1) // config.block_kv
    first = jnp.zeros_like(last)
    if window is not None:
        first = jnp.maximum(seq_lens - window, 0) // config.block_kv
    tiles = last - first
    share = (tiles.sum() * num_kv_heads + config.num_ctas - 1) // config.num_ctas
    # An empty row has an item too, which writes its zeros, unless nobody reads them.
    least = 0 if skip_empty else 1
    parts = jnp.clip((tiles + share - 1) // jnp.maximum(share, 1), least, MAX_PARTS)
    rows, item = (jnp.arange(n, dtype=jnp.int32) for n in (B, B + extra))
    # Comparisons of all with all, where a search or a scatter would be many launches.
    end = jnp.where(rows[:, None] >= rows[None], parts[None], 0).sum(1)
    row = find_rows(end, item)
    of = jnp.minimum(row, B - 1)
    head, num, tiles, first = (end - parts)[of], parts[of], tiles[of], first[of]
    part = item - head
    start = first + part * tiles // num
    return Items(
        row=row,
        first=start,
        last=first + (part + 1) * tiles // num,
        part=jnp.where(num == 1, 0, jnp.where(part == 0, 2, 1)),
        length=seq_lens[of],
        block=blocks[of, jnp.minimum(start * config.block_kv // S, blocks.shape[1] - 1)],
        head=head,
        parts=num,
    )


def decode_attention(
    q: Array, k: Array, v: Array, blocks: Array, seq_lens: Array, *,
    scale: float, window: int | None = None, soft_cap: float | None = None,
    sinks: Array | None = None, k_scale: Array | None = None, v_scale: Array | None = None,
    skip_empty: bool = False, config: TuningConfig = TuningConfig(),
) -> Array:  # fmt: skip
    """Attends the last token of each row to all `seq_lens`, [B], tokens of its blocks.

    q: [B, H, D]; k and v: [N, K, S, D]; blocks: [B, M]; sinks: [H], logits that only take weight;
    k_scale and v_scale: [N, K, S], float32, what k and v of 8 bits are multiples of.
    Returns [B, H, D]; where a row has no tokens zeros, or with `skip_empty` anything.

    Raises:
      ValueError: the shapes are refused.
    """
    if reason := refuses(q, k, config) or quantized_kv.unscaled(k, k_scale, v_scale):
        raise ValueError(f"decode_attention {reason}")
    (B, H, D), K = q.shape, k.shape[1]
    G = H // K
    items = plan(seq_lens, blocks, k.shape, window, config, skip_empty=skip_empty)
    num_items, part_heads = items.row.shape[0], -(-G // split_kv_merge.HEADS) * split_kv_merge.HEADS
    out = jax.empty_ref(jax.ShapeDtypeStruct((B, K, G, D), q.dtype))
    part, weight = (
        jax.empty_ref(jax.ShapeDtypeStruct((num_items, K, part_heads, width), jnp.float32))
        for width in (D, 8)
    )
    counters = jnp.zeros((B, K), jnp.int32)
    sink = jnp.full((K, ROWS), NOTHING, jnp.float32)
    if sinks is not None:
        sink = sink.at[:, :G].set(sinks.reshape(K, G).astype(jnp.float32) * LOG2_E)
    # A copy into tiles of 8 rows must not straddle them.
    padded = G if 8 % G == 0 else -(-G // 8) * 8
    heads = jnp.pad(q.reshape(B * K, G, D), ((0, 0), (0, padded - G), (0, 0))).reshape(-1, D)
    heads = jnp.pad(heads, ((0, -heads.shape[0] % 8), (0, 0)))
    static = dict(scale=scale, window=window, soft_cap=soft_cap, sinks=sinks is not None)
    rest = blocks, *items, sink, counters, out, part, weight
    if k_scale is None:
        body = functools.partial(_attend, config, padded, **static)
        copies = max(1, config.block_kv // k.shape[2])  # of a tile: one a block
        launch = _launch(body, (num_items, K), _scratch(q.dtype, D, copies, config))
        launch(heads, k, v, *rest)
    else:
        body = functools.partial(
            decode_quantized_kv.attend, config.block_kv, config.stages, padded, **static
        )
        scratch = decode_quantized_kv.scratch(k, max(padded, 8), config.stages, config.block_kv)
        params = dict(reduction_scratch_bytes=1024, unsafe_no_auto_barriers=True)
        launch = _launch(body, (num_items, K), scratch, **params)
        launch(heads, k, v, k_scale, v_scale, *rest)
    return jax.freeze(out).reshape(B, H, D)


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
    # What is computed takes the place of the keys, all of which have been read.
    keys = plgpu.RefUnion(
        plgpu.SMEM(kv, dtype, transforms=tiled),
        plgpu.SMEM((ROWS, D), dtype),
        [plgpu.SMEM((ROWS, D), jnp.float32), plgpu.SMEM((ROWS, 8), jnp.float32)],
    )
    return [
        plgpu.SMEM((ROWS, D), dtype, transforms=tiled),
        keys,
        plgpu.SMEM(kv, dtype, transforms=tiled),
        plgpu.Barrier(),
        plgpu.Barrier(num_arrivals=copies, num_barriers=config.stages),
        plgpu.Barrier(num_arrivals=copies, num_barriers=config.stages),
        split_kv_merge.FLAG,
    ]


def _attend(
    config: TuningConfig, padded: int, q_ref: Ref, k_ref: Ref, v_ref: Ref, blocks_ref: Ref,
    row_ref: Ref, first_ref: Ref, last_ref: Ref, part_of_ref: Ref, length_ref: Ref,
    block_ref: Ref, head_ref: Ref, parts_ref: Ref, sink_ref: Ref, counter_ref: Ref, out_ref: Ref,
    part_ref: Ref, weight_ref: Ref, q_smem: Ref, keys: tuple[Ref, Ref, tuple[Ref, Ref]],
    v_smem: Ref, q_ready: Barrier, k_ready: Barrier, v_ready: Barrier, flag: Ref,
    *, scale: float, window: int | None, soft_cap: float | None, sinks: bool,
) -> None:  # fmt: skip
    """One item: an online softmax (arXiv:2205.14135) over its tiles of one KV head's keys."""
    pdl.begin()
    item, h = lax.axis_index("item"), lax.axis_index("head")
    k_smem, out_smem, (part_smem, weight_smem) = keys
    (N, K, S, D), (B, M), C = k_ref.shape, blocks_ref.shape, config.block_kv
    row, first, last, part_of = (x[item] for x in (row_ref, first_ref, last_ref, part_of_ref))
    length, first_block = length_ref[item], block_ref[item]
    layout = plgpu.Layout.WGMMA
    per_row = layout.reduce(1)

    def wide(x: Array, like: Array) -> Array:
        return lax.broadcast_in_dim(x, like.shape, [0])

    def block_of(tile: Array, part: int = 0) -> Array:
        at = jnp.minimum((tile * C + part * S) // S, M - 1)
        return blocks_ref[row, at]

    @pl.when(row < B)
    def _() -> None:
        heads = q_smem.at[pl.ds(0, max(padded, 8))]
        # Rows behind the head group are read along; nothing comes of them.
        start = (row * K + h) * padded
        mosaic.copy_gmem_to_smem(q_ref.at[pl.ds(start, heads.shape[0])], heads, q_ready)

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

        mosaic.barrier_wait(q_ready)

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
            visible = seen(tile * C, (ROWS, C), 1, length, window)
            scores = jnp.where(visible, scores * LOG2_E, NOTHING)
            new_best = jnp.maximum(best, scores.max(axis=1))
            p = jnp.exp2(scores - wide(new_best, scores))
            kept = jnp.exp2(best - new_best)
            total = total * kept + p.sum(axis=1)
            acc = acc * wide(kept, acc)
            mosaic.barrier_wait(v_ready.at[stage])
            partly = (tile + 1) * C > length
            if window is not None:
                partly |= tile * C < length - window

            pl.when(partly)(lambda: _silence(v_smem.at[stage], tile * C, length, window))

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

        @pl.when(part_of == 0)
        def _() -> None:
            _put(acc.astype(out_smem.dtype), out_smem, out_ref.at[row, h])

        @pl.when(part_of != 0)
        def _() -> None:
            _put(acc, part_smem, part_ref.at[item, h])
            weight = lax.broadcast_in_dim(best + jnp.log2(safe), (ROWS, 8), [0])
            _put(weight, weight_smem, weight_ref.at[item, h])
            plgpu.wait_smem_to_gmem(0)
            split_kv_merge.finish(
                part_ref, weight_ref, h, head_ref[item], parts_ref[item],
                out_ref.at[row, h], counter_ref.at[row, h], flag,
            )  # fmt: skip

        plgpu.wait_smem_to_gmem(0)


def _silence(values_ref: Ref, first: Array, length: Array, window: int | None) -> None:
    """Zeroes what nobody sees, [C, D] from key `first` on: a weight of 0 silences no NaN."""
    visible = seen(first, values_ref.shape, 0, length, window)
    values = mosaic.load(values_ref, layout=LAYOUT)
    values_ref[...] = jnp.where(visible, values, jnp.zeros_like(values))
    plgpu.commit_smem()


def _put(x: Array, smem: Ref, ref: Ref) -> None:
    """Writes x, [64, ...], by way of `smem`, to as many rows as `ref` has."""
    put(smem, x)
    plgpu.commit_smem()
    mosaic.copy_smem_to_gmem(smem.at[pl.ds(0, ref.shape[0])], ref)
