"""Decode attention over keys and values of 8 bits, each row of them with a scale of its own.

The products are turned round: keys, and then values, are their left side, whose rows a product of
Hopper takes 64 at a time, and the few query heads of a KV head are the right side. So a tile of
keys goes from shared memory through registers, where it becomes bfloat16, right into its product,
and the softmax is of [keys, heads], not of 64 rows that are mostly padding. `decode_attention`
plans the items.
"""

from collections.abc import Callable
import functools
import math
from typing import Any

from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, memref, vector
import numpy as np

from jaxrunner.kernels_pallas import mosaic, pdl
from jaxrunner.kernels_pallas.attention import decode_item, quantized_kv, query_rows, split_kv_merge
from jaxrunner.kernels_pallas.attention.online_softmax import (
    LAYOUT,
    LOG2_E,
    NOTHING,
    seen,
    with_sink,
)
from jaxrunner.kernels_pallas.mosaic import Barrier, Index, Ref
from jaxrunner.types import Array

# Numbers in e4m3 come times 2**-120. Queries and weights make up for most of it ahead of a
# product, so that its small terms stay normal numbers.
AHEAD, BEHIND = 2.0**96, 2.0**24
# Eight rows of queries: a warp has 16 of 64 columns, a thread four of those in a row, or two of the
# first eight and two of the others.
FOURS, PAIRS = (
    plgpu.Layout.TILED(plgpu.Tiling(((8, 64), (8, 16), *tiles)), (warp,), (-3, -2), -1)
    for tiles, warp in ((((4,),), -4), (((8, 8), (2,)), -6))
)


def _units(dtype: DTypeLike) -> tuple[float, float]:
    return (AHEAD, BEHIND) if dtype == jnp.float8_e4m3fn else (1.0, 1.0)


def scratch(k: Array, heads: int, stages: int, block_kv: int) -> list[Any]:
    """Returns what an item allocates, for k, [N, K, S, D], and padded heads."""
    (_, _, S, D), C = k.shape, block_kv
    copies, part = max(1, C // S), min(S, C)
    narrow = plgpu.SMEM((stages, C, D), k.dtype, transforms=quantized_kv.tile(D))
    wide = mosaic.tiled(64, 2)
    scale = plgpu.SMEM((stages, copies, quantized_kv.head_group(S), part), jnp.float32)
    ready = plgpu.Barrier(num_arrivals=2 * copies, num_barriers=stages)
    return [
        plgpu.SMEM((heads, D), jnp.bfloat16, transforms=wide),
        narrow,
        narrow,
        scale,
        scale,
        plgpu.SMEM((C, D), jnp.bfloat16, transforms=wide),
        plgpu.SMEM((heads, C), jnp.bfloat16, transforms=wide),
        ready,
        ready,
        split_kv_merge.FLAG,
    ]


def attend(
    block_kv: int, stages: int, padded: int, q_ref: Ref, k_ref: Ref, v_ref: Ref,
    k_scale_ref: Ref, v_scale_ref: Ref, blocks_ref: Ref, items_ref: Ref, sink_ref: Ref,
    out_ref: Ref, part_ref: Ref, weight_ref: Ref, q_smem: Ref, k_smem: Ref,
    v_smem: Ref, k_scale_smem: Ref, v_scale_smem: Ref, v_wide: Ref, p_smem: Ref, k_ready: Barrier,
    v_ready: Barrier, flag: Ref,
    *, scale: float, window: int | None, soft_cap: float | None, sinks: bool, query_len: int,
) -> None:  # fmt: skip
    """One item: an online softmax (arXiv:2205.14135) over its tiles of one KV head's keys."""
    pdl.begin()
    item, h = lax.axis_index("item"), lax.axis_index("head")
    (N, K, S, D), (B, M), C = k_ref.shape, blocks_ref.shape, block_kv
    heads, part, group = q_smem.shape[0], min(S, C), quantized_kv.head_group(S)
    own = decode_item.read(items_ref, item)
    row, first, last, num, length, first_block, head, parts = own
    ahead, behind = _units(k_ref.dtype)
    by_head, widen = LAYOUT.reduce(0), functools.partial(quantized_kv.widen, ordered=False)
    k_all = k_ref, k_scale_ref, k_smem, k_scale_smem, k_ready
    v_all = v_ref, v_scale_ref, v_smem, v_scale_smem, v_ready
    limit = length
    if query_len > 1:
        limit = query_rows.sight(heads, out_ref.shape[2], by_head, length, num)

    def of_key(x: Array) -> Array:
        return lax.broadcast_in_dim(x, (C, heads), [0])

    def of_head(x: Array, rows: int = C) -> Array:
        return lax.broadcast_in_dim(x, (rows, heads), [1])

    def block_of(tile: Array, i: int = 0) -> Array:
        return blocks_ref[row, jnp.minimum((tile * C + i * S) // S, M - 1)]

    def fetch(tile: Array, stage: Index, block: Array) -> None:
        for i in range(max(1, C // S)):
            block = block_of(tile, i) if i else block
            place = jnp.clip(block, 0, N - 1), h, pl.ds(lax.rem(tile * C, S), part)
            for rows, scales, smem, scale_smem, ready in (k_all, v_all):
                to = smem.at[stage, pl.ds(i * part, part)], scale_smem.at[stage, i]
                quantized_kv.fetch(rows, scales, place, to, ready.at[stage])

    def tile_step(tile: Array, carry: tuple[Array, ...]) -> tuple[Array, ...]:
        acc, best, total, block = carry
        stage = lax.rem(tile - first, stages)
        next_block = block_of(tile + stages + 1)

        def multiply(scores: Ref) -> tuple[Array, Array]:
            mosaic.barrier_wait(k_ready.at[stage])
            mosaic.wgmma(scores, widen(k_smem.at[stage]), q_smem.T)
            mosaic.barrier_wait(v_ready.at[stage])
            values = widen(v_smem.at[stage])
            return scores[...], values

        scores, values = pl.run_scoped(multiply, mosaic.ACC((C, heads), jnp.float32))
        here = stage, slice(None), lax.rem(h, group)
        by_k, by_v = (quantized_kv.scales(x.at[here], 0, C) for x in (k_scale_smem, v_scale_smem))
        scores = scores * of_key(by_k * (scale * behind))
        if soft_cap is not None:
            scores = soft_cap * jnp.tanh(scores / soft_cap)
        # Keys that are not seen may hold anything, scales that are NaN too.
        keys = of_head(limit) if query_len > 1 else limit
        visible = seen(tile * C, (C, heads), 0, keys, window)
        scores = jnp.where(visible, scores * LOG2_E, NOTHING)
        # The maximum is a barrier too: behind it, all are done with the product before, whose
        # values and weights are overwritten below.
        new_best = jnp.maximum(best, scores.max(axis=0))
        v_wide[...] = values
        p = jnp.exp2(scores - of_head(new_best))
        kept = jnp.exp2(best - new_best)
        total = total * of_head(kept) + p
        p = jnp.where(visible, p * of_key(by_v * ahead), 0.0)
        p_smem.T[...] = plgpu.layout_cast(p.astype(jnp.bfloat16), plgpu.Layout.WGMMA_TRANSPOSED)
        plgpu.commit_smem()

        # Behind the barrier of the commit all have read the stage.
        pl.when(tile + stages < last)(lambda: fetch(tile + stages, stage, block))

        def accumulate(acc: Ref) -> None:
            mosaic.wgmma(acc, v_wide.T, p_smem.T)

        acc = pl.run_state(accumulate)(mosaic.ACC.init(acc * of_head(kept, D)))
        return acc, new_best, total, next_block

    @pl.when(row < B)
    def _() -> None:
        for i in range(stages):
            pl.when(first + i < last)(
                functools.partial(fetch, first + i, i, block_of(first + i) if i else first_block)
            )
        # Heads behind the group are read along; nothing comes of them.
        start = (row * K + h) * padded if query_len == 1 else row * (query_len * K) + h
        unit = jnp.asarray(ahead, jnp.bfloat16)
        q_smem[...] = _permuted(q_ref, start, heads, query_len, K) * unit
        plgpu.commit_smem()
        start = (
            plgpu.layout_cast(jnp.zeros((D, heads), jnp.float32), LAYOUT),
            plgpu.layout_cast(jnp.full((heads,), NOTHING, jnp.float32), by_head),
            plgpu.layout_cast(jnp.zeros((C, heads), jnp.float32), LAYOUT),
            block_of(first + stages),
        )
        acc, best, total, _ = lax.fori_loop(first, last, tile_step, start)
        total = total.sum(axis=0)
        if sinks:
            sink = mosaic.load(sink_ref.at[h, pl.ds(0, heads)], layout=by_head, optimized=False)
            best, total, kept = with_sink(sink, item == head, best, total)
            acc = acc * of_head(kept, D)
        safe = jnp.maximum(total, 1e-30)
        acc = acc * of_head(behind / safe, D)
        mine = query_rows.of_row(out_ref, row, h, query_len)
        counter = decode_item.counter(items_ref, row, h)
        part = (part_ref.at[item, h], weight_ref.at[item, h])

        def merge() -> None:
            split_kv_merge.finish(part_ref, weight_ref, h, head, parts, mine, counter, flag)

        _leave((acc, best, safe), C, mine, part, parts, merge)


def _leave(
    result: tuple[Array, Array, Array], C: int, out: Ref, part: tuple[Ref, Ref],
    parts: Array, merge: Callable[[], None],
) -> None:  # fmt: skip
    """Writes what a row's only item found; or a part of it and its weight, and merges."""
    acc, best, total = result
    D, heads = acc.shape

    @pl.when(parts == 1)
    def _() -> None:
        _put(acc.astype(out.dtype), out, D)

    @pl.when(parts > 1)
    def _() -> None:
        part_ref, weight_ref = part
        _put(acc, part_ref, D)
        weight = lax.broadcast_in_dim(best + jnp.log2(total), (C, heads), [1])
        _put(weight, weight_ref, weight_ref.shape[1])
        merge()


def _permuted(ref: Ref, start: Array, heads: int, query_len: int, apart: int) -> Array:
    """Loads queries, [heads, D] from row `start` on, with columns in the order of `widen`.

    Rows behind the last are like the last. Of several tokens, ref is [..., G, D]
    (`query_rows.place`).
    """
    shape = heads, ref.shape[-1]
    out = plgpu.ShapeDtypeStruct(shape, ref.dtype, layout=PAIRS)

    @mosaic.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.Layout.WG_SPLAT(())), return_type=out)
    def load(_: Any, ref: ir.Value, start: mgpu.FragmentedArray) -> mgpu.FragmentedArray:
        index, layout, pairs = ir.IndexType.get(), PAIRS.to_mgpu(), []
        begin = arith.index_cast(index, start.registers.item())
        last = mgpu.c(ir.MemRefType(ref.type).shape[0] - 1, index)
        four = ir.VectorType.get((4,), ir.MemRefType(ref.type).element_type)
        for row, column in FOURS.to_mgpu().thread_idxs(shape):
            if query_len == 1:
                place = [arith.minui(arith.addi(begin, row), last)]
            else:
                group = ir.MemRefType(ref.type).shape[1]
                place = query_rows.place(row, begin, group, query_len, apart)
            pairs += quantized_kv.halves(vector.load(four, ref, [*place, column], alignment=8))
        registers = np.empty(layout.registers_shape(shape), dtype=object)
        registers.reshape(-1)[:] = pairs  # the two of a thread are neighbours
        return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)

    return load(ref, start)


def _put(x: Array, ref: Ref, rows: int) -> None:
    """Writes the first `rows` of x, [rows, heads], into `ref`, [G, rows], from registers.

    Or into [Q, G, rows], of Q query tokens. Whole heads are put in their order along D again.
    """

    @mosaic.inline_mgpu(arg_types=(LAYOUT, plgpu.RefType()))
    def put(_: Any, x: mgpu.FragmentedArray, ref: ir.Value) -> None:
        index = ir.IndexType.get()
        *shape, width = ir.MemRefType(ref.type).shape
        limits = [mgpu.c(size, index) for size in (math.prod(shape), width)]
        places = x.layout.thread_idxs(x.shape)
        for (row, column), pair in zip(places, x.registers.flat, strict=True):
            if rows >= 16:
                row = _ordered(row)
            for i in range(2):
                head = arith.addi(column, mgpu.c(i, index))
                ok = arith.cmpi(arith.CmpIPredicate.ult, head, limits[0])
                if rows < x.shape[0]:
                    inside = arith.cmpi(arith.CmpIPredicate.ult, row, limits[1])
                    ok = arith.andi(ok, inside)
                value = vector.extract(pair, dynamic_position=[], static_position=[i])
                with mgpu.when(ok):
                    place = [head] if len(shape) == 1 else query_rows.split(head, shape[1])
                    memref.store(value, ref, [*place, row])

    put(x, ref)


def _ordered(row: ir.Value) -> ir.Value:
    """Returns the column of D that a row of the result is, the inverse of `_permuted`."""
    low, middle, top = (mgpu.c(x, ir.IndexType.get()) for x in (1, 6, 8))
    two, four, rest = (mgpu.c(x, ir.IndexType.get()) for x in (2, 4, -16))
    out = arith.ori(arith.andi(row, rest), arith.andi(row, low))
    out = arith.ori(out, arith.muli(arith.andi(row, middle), two))
    return arith.ori(out, arith.divui(arith.andi(row, top), four))
