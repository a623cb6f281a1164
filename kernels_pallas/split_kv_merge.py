"""Rows that are computed in parts: each part is left in memory, and who comes last merges them."""

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

from jaxrunner.kernels_pallas import grid_barrier, mosaic
from jaxrunner.kernels_pallas.mosaic import Layout, Ref
from jaxrunner.kernels_pallas.online_softmax import NOTHING
from jaxrunner.kernels_pallas.stores import put_rows
from jaxrunner.types import Array

HEADS = 8  # parts have a multiple of so many heads
NUMBERS = 1024  # of a head that are read at a time, in parts of one or more
WIDE = 16  # heads of which so many are; fewer of more, whose parts must fit in registers, too
FLAG = plgpu.SMEM((1,), jnp.int32)


def comes_last(counter: Ref, flag: Ref, num: Array) -> Array:
    """Counts to `num` in `counter`, a number in device memory; True for the block that gets there.

    What a block has written before is seen by the one that comes last. `flag` is a `FLAG`.
    """
    scalar = plgpu.Layout.WG_SPLAT(())
    out = plgpu.ShapeDtypeStruct((), jnp.int32, layout=scalar)
    refs = plgpu.RefType(), plgpu.RefType()

    @mosaic.inline_mgpu(arg_types=(*refs, scalar), return_type=out)
    def count(
        _: Any, counter: ir.Value, flag: ir.Value, num: mgpu.FragmentedArray
    ) -> mgpu.FragmentedArray:
        index, i32 = ir.IndexType.get(), ir.IntegerType.get_signless(32)
        mgpu.warpgroup_barrier()
        with mgpu.when(grid_barrier.is_first_thread()):
            limit = arith.subi(num.registers.item(), mgpu.c(1, i32))
            last = arith.cmpi(arith.CmpIPredicate.eq, grid_barrier.count(counter, limit), limit)
            memref.store(arith.extui(i32, last), flag, [mgpu.c(0, index)])
        mgpu.warpgroup_barrier()
        last = memref.load(flag, [mgpu.c(0, index)])
        return mgpu.FragmentedArray.splat(last, (), scalar.to_mgpu(), is_signed=True)

    return count(counter, flag, num) > 0


def finish(
    part: Ref, weight: Ref, h: Array, first: Array, num: Array, out: Ref, counter: Ref, flag: Ref,
    *, at_once: int = 8,
) -> None:  # fmt: skip
    """Merges `num` parts of KV head h, from item `first` on, into `out`, if all are there.

    part: [I, K, rows, D], normed; weight: [I, K, rows, 8], the base 2 logarithm of its total; rows
    are a multiple of `HEADS`. out: [G, D], or [Q, G, D] of Q query tokens, of which `at_once` parts
    are read at a time, fewer where they are large.
    """

    @pl.when(comes_last(counter, flag, num))
    def _() -> None:
        _merge(part, weight, h, first, num, out, at_once)


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


def _merge(
    part: Ref, weight: Ref, h: Array, first: Array, num: Array, out: Ref, at_once: int
) -> None:
    shape = rows, D = part.shape[2:]
    layout = _layout(D)
    by_row = layout.reduce(1)

    def wide(x: Array) -> Array:
        return plgpu.layout_cast(lax.broadcast_in_dim(x, shape, [0]), layout)

    def add(count: int, chunk: Array, carry: tuple[Array, ...]) -> tuple[Array, ...]:
        acc, best, total = carry
        at = [chunk * count + j for j in range(count)]
        items = [first + jnp.minimum(i, num - 1) for i in at]
        parts = [mosaic.load(part.at[i, h], layout=layout, optimized=False) for i in items]
        columns = (weight.at[i, h, :, 0] for i in items)
        weights = [mosaic.load(column, layout=by_row, optimized=False) for column in columns]
        weights = [jnp.where(i < num, w, NOTHING) for i, w in zip(at, weights, strict=True)]
        new_best = best
        for w in weights:
            new_best = jnp.maximum(new_best, w)
        kept = jnp.exp2(best - new_best)
        acc, total = acc * wide(kept), total * kept
        for x, w in zip(parts, weights, strict=True):
            w = jnp.exp2(w - new_best)
            acc, total = acc + x * wide(w), total + w
        return acc, new_best, total

    carry = (
        plgpu.layout_cast(jnp.zeros(shape, jnp.float32), layout),
        plgpu.layout_cast(jnp.full(shape[:1], NOTHING, jnp.float32), by_row),
        plgpu.layout_cast(jnp.zeros(shape[:1], jnp.float32), by_row),
    )
    most = min(8, NUMBERS // D)
    if len(out.shape) == 2:
        rounds = lax.div(num + most - 1, most)
        carry = lax.fori_loop(0, rounds, functools.partial(add, most), carry)
    else:
        # Parts are larger, so what is read twice costs: first as many as can be, then the rest.
        half = max(1, min(at_once, most) * WIDE // max(rows, WIDE) // 2)
        rounds = lax.div(num, 2 * half)
        carry = lax.fori_loop(0, rounds, functools.partial(add, 2 * half), carry)
        rest = lax.div(num + half - 1, half)
        carry = lax.fori_loop(2 * rounds, rest, functools.partial(add, half), carry)
    acc, _, total = carry
    put_rows((acc / wide(total)).astype(out.dtype), out, layout)


def _layout(D: int) -> Layout:
    """Lays out heads of D: four threads of each warp have parts of one head."""
    v = math.gcd(D // 16, 4)
    tiling = plgpu.Tiling(((HEADS, 16 * v), (HEADS, 4 * v), (v,)))
    return plgpu.Layout.TILED(tiling, (-4,), (-3, -2), -1)
