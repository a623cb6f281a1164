"""Rows that are computed in parts: each part is left in memory, and who comes last merges them.

The heads of a row, several tokens' where drafts are verified, are shared out among the blocks that
come last: a block's reads take longer the more there are, though all of the chip has room for them.
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
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, memref

from jaxrunner.kernels_pallas import mosaic
from jaxrunner.kernels_pallas.attention.online_softmax import NOTHING
from jaxrunner.kernels_pallas.mosaic import Layout, Ref
from jaxrunner.kernels_pallas.products import grid_barrier
from jaxrunner.kernels_pallas.stores import put_rows
from jaxrunner.types import Array

# Heads that a block merges: one a warp where D is a multiple of 128.
HEADS, FEW = 8, 4
NUMBERS = 1024  # of a head that are read at a time, in parts of one or more
FLAG = plgpu.SMEM((1,), jnp.int32)


def unit(D: int) -> int:
    """Returns how many heads, of D numbers, a block merges at a time."""
    return FEW if D % 128 == 0 else HEADS


def finish(
    part: Ref, weight: Ref, h: Array, first: Array, num: Array, out: Ref, counter: Ref, flag: Ref
) -> None:
    """Merges `num` parts of KV head h, from item `first` on, some rows by each of the last blocks.

    part: [I, K, rows, D], normed; weight: [I, K, rows, 8], the base 2 logarithm of its total; rows
    are a multiple of `unit`. out: [G, D], or [Q, G, D] of Q query tokens. counter: 0 at first, in
    device memory; flag: a `FLAG`. What a block has written before is seen by those that merge.

    Blocks wait for each other here, so those that do must leave room for the row's others: blocks
    start in the order of their indices, so that of all waiting ones only those of one row, of K KV
    heads, can wait for a block that has not started. They are fewer than multiprocessors. A block
    of two items has one of a later row second, as no row has more items than there are clusters.
    """
    K, rows, D = part.shape[1:]
    cores = grid_barrier.multiprocessors() or mosaic.CORES
    heads = unit(D)
    layout = _row_a_warp() if heads == FEW else _layout(D)
    units, count = rows // heads, min(8, NUMBERS // D)
    most = jnp.minimum(num, min(units, 1 + (cores - 1) // K))
    mine = _rank(counter, flag, num, most) - (num - most)

    def merge(starts: list[Array]) -> None:
        """Merges some heads from each of `starts` on, all read before the first is merged."""

        def pick(ref: Ref, i: Array, start: Array) -> Ref:
            return ref.at[i, h, pl.ds(start, heads)]

        picks = [functools.partial(pick, start=start) for start in starts]
        merged = _merged(picks, part, weight, first, num, layout, count // len(starts))
        for start, x in zip(starts, merged, strict=True):
            put_rows(x.astype(out.dtype), out, layout, first=start)

    def each(num_units: int, i: Array, _: None) -> None:
        of = [mine + (num_units * i + j) * most for j in range(num_units)]
        # A unit too many is the last one once more.
        starts = [jnp.minimum(x, units - 1) * heads for x in of]
        pl.when(of[0] < units)(lambda: merge(starts))
        return _

    def merge_all(num_units: int) -> None:
        lax.fori_loop(0, -(-units // num_units), functools.partial(each, num_units), None)

    two = min(2, units, count)
    few = (num * two <= count) & (most * two <= units)  # parts: those of two units are read at once
    if two == 1:
        pl.when(mine >= 0)(lambda: merge_all(1))
        return
    pl.when((mine >= 0) & few)(lambda: merge_all(two))
    pl.when((mine >= 0) & jnp.logical_not(few))(lambda: merge_all(1))


def _rank(counter: Ref, flag: Ref, num: Array, most: Array) -> Array:
    """Counts to `num`, and returns how many had come before; the last `most` wait for all."""
    scalar = plgpu.Layout.WG_SPLAT(())
    out = plgpu.ShapeDtypeStruct((), jnp.int32, layout=scalar)
    refs = plgpu.RefType(), plgpu.RefType()

    @mosaic.inline_mgpu(arg_types=(*refs, scalar, scalar), return_type=out)
    def take(
        _: Any, counter: ir.Value, flag: ir.Value, num: mgpu.FragmentedArray,
        most: mgpu.FragmentedArray,
    ) -> mgpu.FragmentedArray:  # fmt: skip
        index, i32 = ir.IndexType.get(), ir.IntegerType.get_signless(32)
        mgpu.warpgroup_barrier()
        with mgpu.when(grid_barrier.is_first_thread()):
            total, late = num.registers.item(), most.registers.item()
            limit = arith.subi(total, mgpu.c(1, i32))
            rank = grid_barrier.count(counter, limit)
            memref.store(rank, flag, [mgpu.c(0, index)])
            merges = arith.cmpi(arith.CmpIPredicate.sge, rank, arith.subi(total, late))
            others = arith.cmpi(arith.CmpIPredicate.ne, rank, limit)
            with mgpu.when(arith.andi(merges, others)):
                grid_barrier.spin(counter)
        mgpu.warpgroup_barrier()
        rank = memref.load(flag, [mgpu.c(0, index)])
        return mgpu.FragmentedArray.splat(rank, (), scalar.to_mgpu(), is_signed=True)

    return take(counter, flag, num, most)


def join(part: Array, weight: Array, row: Array, num_rows: int) -> Array:
    """Merges the parts of each row in plain JAX, where what they weigh is wanted, too.

    part: [I, K, G, D], normed; weight: [I, K, G, 1], the base 2 logarithm of its total; row: [I],
    that each is of, `num_rows` for none. Returns [B, K, G, D + 1], the last column the natural
    logarithm of the row's total.
    """
    mine_BI = row[None] == jnp.arange(num_rows)[:, None]
    mine = mine_BI[:, :, None, None]
    weight = jnp.where(mine, weight[None, ..., 0], NOTHING)  # [B, I, K, G]
    best = weight.max(1, keepdims=True)
    share = jnp.where(mine, jnp.exp2(weight - best), 0.0)
    total = share.sum(1)
    # Items of no row have written nothing.
    part = jnp.where((row < num_rows)[:, None, None, None], part, 0.0)
    acc = jnp.einsum("bikg,ikgd->bkgd", share, part, precision=lax.Precision.HIGHEST)
    out = acc / jnp.where(total == 0, 1.0, total)[..., None]
    found = (best[:, 0] + jnp.log2(jnp.where(total == 0, 1.0, total))) * math.log(2)
    return jnp.concatenate([out, found[..., None]], -1)


def _merged(
    picks: list[Callable[[Ref, Array], Ref]], part: Ref, weight: Ref, first: Array, num: Array,
    layout: Layout, count: int,
) -> list[Array]:  # fmt: skip
    """Returns what each of `picks` takes of parts, [rows, D], and of weights, [rows, 8], merged.

    count: parts that are read at a time.
    """
    shape = picks[0](part, first).shape
    by_row = layout.reduce(1)

    def wide(x: Array) -> Array:
        return plgpu.layout_cast(lax.broadcast_in_dim(x, shape, [0]), layout)

    def read(pick: Callable[[Ref, Array], Ref], at: list[Array]) -> list[tuple[Array, Array]]:
        items = [first + jnp.minimum(i, num - 1) for i in at]
        parts = [mosaic.load(pick(part, i), layout=layout, optimized=False) for i in items]
        columns = (pick(weight, i).at[:, 0] for i in items)
        weights = [mosaic.load(column, layout=by_row, optimized=False) for column in columns]
        weights = [jnp.where(i < num, w, NOTHING) for i, w in zip(at, weights, strict=True)]
        return list(zip(parts, weights, strict=True))

    def joined(found: list[tuple[Array, Array]], carry: tuple[Array, ...]) -> tuple[Array, ...]:
        acc, best, total = carry
        new_best = best
        for _, w in found:
            new_best = jnp.maximum(new_best, w)
        kept = jnp.exp2(best - new_best)
        acc, total = acc * wide(kept), total * kept
        for x, w in found:
            w = jnp.exp2(w - new_best)
            acc, total = acc + x * wide(w), total + w
        return acc, new_best, total

    def add(chunk: Array, carry: list[tuple[Array, ...]]) -> list[tuple[Array, ...]]:
        at = [chunk * count + j for j in range(count)]
        found = [read(pick, at) for pick in picks]
        return [joined(*pair) for pair in zip(found, carry, strict=True)]

    nothing = (
        plgpu.layout_cast(jnp.zeros(shape, jnp.float32), layout),
        plgpu.layout_cast(jnp.full(shape[:1], NOTHING, jnp.float32), by_row),
        plgpu.layout_cast(jnp.zeros(shape[:1], jnp.float32), by_row),
    )
    chunks = lax.div(num + count - 1, count)
    carry = lax.fori_loop(0, chunks, add, [nothing] * len(picks))
    return [acc * wide(1 / total) for acc, _, total in carry]


def _layout(D: int) -> Layout:
    """Lays out heads of D: four threads of each warp have parts of one head."""
    v = math.gcd(D // 16, 4)
    tiling = plgpu.Tiling(((HEADS, 16 * v), (HEADS, 4 * v), (v,)))
    return plgpu.Layout.TILED(tiling, (-4,), (-3, -2), -1)


def _row_a_warp() -> Layout:
    """Lays out `FEW` heads of a multiple of 128: each is a warp's."""
    return plgpu.Layout.TILED(plgpu.Tiling(((FEW, 128), (4,))), (-3,), (-2,), -1)
