"""Decode attention over keys and values of 8 bits, each row of them with a scale of its own.

The products are turned round: keys, and then values, are their left side, whose rows a product of
Hopper takes 64 at a time, and the few query heads of a KV head are the right side. So a tile of
keys goes from shared memory through registers, where it becomes bfloat16, right into its product,
and the softmax is of [keys, heads], not of 64 rows that are mostly padding. `decode_attention`
plans the items and merges their parts.
"""

import functools
import math

from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, memref, vector
import numpy as np

from jaxrunner.kernels_pallas import overlap

LOG2_E = math.log2(math.e)
NOTHING = -1e30  # a score that no weight comes of
LAYOUT = plgpu.Layout.WGMMA
DTYPES = (jnp.float8_e4m3fn, jnp.int8)
# The bits of an e4m3 number, in the places of bfloat16, are that number times 2**-120. Queries and
# weights make up for most of it ahead of a product, so that its small terms stay normal numbers.
AHEAD, BEHIND = 2.0**96, 2.0**24
# Of four numbers x: what is below the sign and above the mantissa's place, put side by side.
E4M3_TO_BF16 = """{
.reg .b32 low, high;
shl.b32 low, $2, 4;
and.b32 low, low, 0xf0f0f0f0;
shr.b32 high, $2, 4;
and.b32 high, high, 0x07070707;
lop3.b32 high, $2, 0x80808080, high, 0xea;
prmt.b32 $0, low, high, 0x5140;
prmt.b32 $1, low, high, 0x7362;
}"""


def refuses(q, k) -> str | None:
    """Says why q, [B, H, D], and k of 8 bits, [N, K, S, D], are not served; None if they are."""
    (_, _, D), (_, K, S, _) = q.shape, k.shape
    if q.dtype != jnp.bfloat16:
        return f"wants queries in bfloat16 where the KV cache has 8 bits, got {q.dtype}"
    if D % 64 or D > 256:
        return f"wants a head_dim of 64, 128, 192 or 256 where the KV cache has 8 bits, got {D}"
    if K % (group := _head_group(S)):
        return f"wants KV heads that are a multiple of {group} in blocks of {S}, got {K}"
    return None


def prepare(q, dtype):
    """Returns q, [..., D], in the order in which a thread's four bytes enter a product, in units."""
    parts = q.reshape(*q.shape[:-1], -1, 4, 2, 2) * jnp.asarray(_units(dtype)[0], q.dtype)
    return parts.swapaxes(-3, -2).reshape(q.shape)


def _units(dtype) -> tuple[float, float]:
    return (AHEAD, BEHIND) if dtype == jnp.float8_e4m3fn else (1.0, 1.0)


def _head_group(S: int) -> int:
    """Returns how many heads' scales are copied together: a copy has at least 128 bytes."""
    return max(1, 32 // S)


def scratch(k, heads: int, stages: int, block_kv: int) -> list:
    """Returns what an item allocates, for k, [N, K, S, D], and padded heads."""
    (_, _, S, D), C = k.shape, block_kv
    copies, part = max(1, C // S), min(S, C)
    bytes_ = plgpu.find_swizzle(D * 8)
    narrow = plgpu.TilingTransform((8, bytes_)), plgpu.SwizzleTransform(bytes_)
    wide = plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128)
    scale = plgpu.SMEM((stages, copies, _head_group(S), part), jnp.float32)
    ready = plgpu.Barrier(num_arrivals=2 * copies, num_barriers=stages)
    return [
        plgpu.SMEM((heads, D), jnp.bfloat16, transforms=wide),
        plgpu.SMEM((stages, C, D), k.dtype, transforms=narrow),
        plgpu.SMEM((stages, C, D), k.dtype, transforms=narrow),
        scale,
        scale,
        plgpu.SMEM((C, D), jnp.bfloat16, transforms=wide),
        plgpu.SMEM((heads, C), jnp.bfloat16, transforms=wide),
        plgpu.Barrier(),
        ready,
        ready,
    ]


def attend(
    config, G, padded, q_ref, k_ref, v_ref, k_scale_ref, v_scale_ref, blocks_ref, row_ref,
    first_ref, last_ref, part_of_ref, length_ref, block_ref, sink_ref, out_ref, part_ref,
    weight_ref, q_smem, k_smem, v_smem, k_scale_smem, v_scale_smem, v_wide, p_smem,
    q_ready, k_ready, v_ready, *, scale, window, soft_cap, sinks,
):  # fmt: skip
    """One item: an online softmax (arXiv:2205.14135) over its tiles of one KV head's keys."""
    overlap.begin()
    item, h = lax.axis_index("item"), lax.axis_index("head")
    (N, K, S, D), (B, M), C = k_ref.shape, blocks_ref.shape, config.block_kv
    heads, part, group = q_smem.shape[0], min(S, C), _head_group(S)
    row, first, last, part_of = (x[item] for x in (row_ref, first_ref, last_ref, part_of_ref))
    length, first_block = length_ref[item], block_ref[item]
    ahead, behind = _units(k_ref.dtype)
    by_head = LAYOUT.reduce(0)
    keys = (
        (k_ref, k_smem, k_scale_ref, k_scale_smem, k_ready),
        (v_ref, v_smem, v_scale_ref, v_scale_smem, v_ready),
    )

    def of_key(x):
        return lax.broadcast_in_dim(x, (C, heads), [0])

    def of_head(x, rows=C):
        return lax.broadcast_in_dim(x, (rows, heads), [1])

    def block_of(tile, i=0):
        return blocks_ref[row, jnp.minimum((tile * C + i * S) // S, M - 1)]

    def fetch(tile, stage, block):
        for i in range(max(1, C // S)):
            block = block_of(tile, i) if i else block
            block = jnp.clip(block, 0, N - 1)
            at = pl.ds(lax.rem(tile * C, S), part)
            for ref, smem, scale_ref, scale_smem, ready in keys:
                to = smem.at[stage, pl.ds(i * part, part)]
                plgpu.copy_gmem_to_smem(ref.at[block, h, at], to, ready.at[stage])
                source = scale_ref.at[block, pl.ds(h - lax.rem(h, group), group), at]
                plgpu.copy_gmem_to_smem(source, scale_smem.at[stage, i], ready.at[stage])

    def seen(tile):
        at = tile * C + plgpu.broadcasted_iota(jnp.int32, (C, heads), 0, layout=LAYOUT)
        return at < length if window is None else (at < length) & (at >= length - window)

    def tile_step(tile, carry):
        acc, best, total, block = carry
        stage = lax.rem(tile - first, config.stages)
        next_block = block_of(tile + config.stages + 1)

        def multiply(scores):
            plgpu.barrier_wait(k_ready.at[stage])
            plgpu.wgmma(scores, _widen(k_smem.at[stage]), plgpu.transpose_ref(q_smem, (1, 0)))
            plgpu.barrier_wait(v_ready.at[stage])
            values = _widen(v_smem.at[stage])
            return scores[...], values

        scores, values = pl.run_scoped(multiply, plgpu.ACC((C, heads), jnp.float32))
        here = stage, slice(None), lax.rem(h, group)
        k_scale, v_scale = (_scales(x.at[here], C, part) for x in (k_scale_smem, v_scale_smem))
        scores = scores * of_key(k_scale * (scale * behind))
        if soft_cap is not None:
            scores = soft_cap * jnp.tanh(scores / soft_cap)
        # What is not seen may hold anything, scales that are NaN too.
        scores = jnp.where(seen(tile), scores * LOG2_E, NOTHING)
        # The maximum is a barrier too: behind it, all are done with the product before, whose
        # values and weights are overwritten below.
        new_best = jnp.maximum(best, scores.max(axis=0))
        v_wide[...] = values
        p = jnp.exp2(scores - of_head(new_best))
        kept = jnp.exp2(best - new_best)
        total = total * of_head(kept) + p
        p = jnp.where(seen(tile), p * of_key(v_scale * ahead), 0.0)
        p = plgpu.layout_cast(p.astype(jnp.bfloat16), plgpu.Layout.WGMMA_TRANSPOSED)
        p_smem.T[...] = p
        plgpu.commit_smem()

        @pl.when(tile + config.stages < last)
        def _():  # behind the barrier of the commit all have read the stage
            fetch(tile + config.stages, stage, block)

        def accumulate(acc):
            plgpu.wgmma(acc, plgpu.transpose_ref(v_wide, (1, 0)), plgpu.transpose_ref(p_smem, (1, 0)))

        acc = pl.run_state(accumulate)(plgpu.ACC.init(acc * of_head(kept, D)))
        return acc, new_best, total, next_block

    @pl.when(row < B)
    def _():
        # Heads behind the group are read along; nothing comes of them.
        own = pl.ds((row * K + h) * padded, heads)
        plgpu.copy_gmem_to_smem(q_ref.at[own], q_smem, q_ready)
        for i in range(config.stages):
            pl.when(first + i < last)(
                functools.partial(fetch, first + i, i, block_of(first + i) if i else first_block)
            )
        plgpu.barrier_wait(q_ready)
        start = (
            plgpu.layout_cast(jnp.zeros((D, heads), jnp.float32), LAYOUT),
            plgpu.layout_cast(jnp.full((heads,), NOTHING, jnp.float32), by_head),
            plgpu.layout_cast(jnp.zeros((C, heads), jnp.float32), LAYOUT),
            block_of(first + config.stages),
        )
        acc, best, total, _ = lax.fori_loop(first, last, tile_step, start)
        total = total.sum(axis=0)
        if sinks:
            at = sink_ref.at[h, pl.ds(0, heads)]
            sink = plgpu.load(at, layout=by_head, optimized=False)
            sink = jnp.where(part_of == 1, NOTHING, sink)  # once a row
            new_best = jnp.maximum(best, sink)
            kept = jnp.exp2(best - new_best)
            total = total * kept + jnp.exp2(sink - new_best)
            acc, best = acc * of_head(kept, D), new_best
        safe = jnp.maximum(total, 1e-30)
        acc = acc * of_head(behind / safe, D)

        @pl.when(part_of == 0)
        def _():
            _put(acc.astype(out_ref.dtype), out_ref.at[row, h], D)

        @pl.when(part_of != 0)
        def _():
            _put(acc, part_ref.at[item, h], D)
            _put(of_head(best + jnp.log2(safe)), weight_ref.at[item, h], weight_ref.shape[3])


def _widen(ref):
    """Loads a tile of 8 bits, [C, D], as bfloat16, permuted along D; e4m3 comes times 2**-120.

    A thread's four bytes in a row become two pairs, of the first and the second half of 16 columns.
    """
    layout = plgpu.Layout.WGMMA_8BIT
    x = plgpu.load(ref, layout=layout)
    if ref.dtype == jnp.int8:
        x = x.astype(jnp.bfloat16)

    def widened(value):
        if ref.dtype == jnp.int8:
            return [mgpu.utils.vector_slice(value, slice(i, i + 2)) for i in (0, 2)]
        word, pair = ir.IntegerType.get_signless(32), ir.VectorType.get((2,), ir.BF16Type.get())
        both = llvm.StructType.get_literal([word, word])
        halves = llvm.inline_asm(both, [mgpu.utils.bitcast(value, word)], E4M3_TO_BF16, "=r,=r,r")
        return [mgpu.utils.bitcast(llvm.extractvalue(word, halves, [i]), pair) for i in (0, 1)]

    out = plgpu.ShapeDtypeStruct(ref.shape, jnp.bfloat16, layout=LAYOUT)

    @plgpu.inline_mgpu(arg_types=(layout,), return_type=out)
    def widen(_, x):
        registers = np.empty(mgpu.WGMMA_LAYOUT.registers_shape(x.shape), dtype=object)
        for (row, column, *rest), value in np.ndenumerate(x.registers):
            for half, pair in enumerate(widened(value)):
                registers[row, 2 * column + half, *rest] = pair
        return mgpu.FragmentedArray(
            _registers=registers, _layout=mgpu.WGMMA_LAYOUT, _is_signed=None
        )

    return widen(x)


def _scales(ref, C: int, part: int):
    """Loads the scales of a tile's keys, [C], of which each row of `ref` has `part`."""
    out = plgpu.ShapeDtypeStruct((C,), jnp.float32, layout=LAYOUT.reduce(1))

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=out)
    def load(_, ref):
        layout = mgpu.WGMMA_ROW_LAYOUT
        registers = np.empty(layout.registers_shape((C,)), dtype=object)
        size, one = mgpu.c(part, ir.IndexType.get()), ir.VectorType.get((1,), ir.F32Type.get())
        for at, (key,) in zip(np.ndindex(registers.shape), layout.thread_idxs((C,)), strict=True):
            place = [arith.divui(key, size), arith.remui(key, size)]
            registers[at] = vector.load(one, ref, place)
        return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)

    return load(ref)


def _put(x, ref, rows: int):
    """Writes the first `rows` of x, [rows, heads], into `ref`, [G, rows], from registers.

    Whole heads are put in their order along D again.
    """

    @plgpu.inline_mgpu(arg_types=(LAYOUT, plgpu.RefType()))
    def put(_, x, ref):
        index = ir.IndexType.get()
        limits = [mgpu.c(size, index) for size in ir.MemRefType(ref.type).shape]
        for (row, column), pair in zip(x.layout.thread_idxs(x.shape), x.registers.flat, strict=True):
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
                    memref.store(value, ref, [head, row])

    put(x, ref)


def _ordered(row):
    """Returns the column of D that a row of the result is, the inverse of `prepare`."""
    low, middle, top = (mgpu.c(x, ir.IndexType.get()) for x in (1, 6, 8))
    two, four, rest = (mgpu.c(x, ir.IndexType.get()) for x in (2, 4, -16))
    out = arith.ori(arith.andi(row, rest), arith.andi(row, low))
    out = arith.ori(out, arith.muli(arith.andi(row, middle), two))
    return arith.ori(out, arith.divui(arith.andi(row, top), four))
