"""Latent attention of a row's tiles of keys by two warpgroups, whose work interlocks (Mosaic GPU).

Each warpgroup has half of the result's columns, and the scores of every other tile, whose weights
it leaves for the other one in the place of the tile's rotated numbers, which nobody needs by then.
Tiles go in pairs (after FlashMLA, https://github.com/deepseek-ai/FlashMLA): while warpgroup 1
multiplies the second tile's keys, warpgroup 0 finds the weights of the first one, and while both
multiply the first one's values, warpgroup 1 finds the weights of the second one.

Weights are relative to the largest score that was found, but only where that has risen by `RISE`:
until then results are not rescaled (after FlashAttention-4,
https://github.com/Dao-AILab/flash-attention).
"""

import functools
from typing import Any, NamedTuple

from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from jaxrunner.kernels_pallas import mosaic
from jaxrunner.kernels_pallas.attention.latent_merge import Parts
from jaxrunner.kernels_pallas.attention.online_softmax import (
    LAYOUT,
    LOG2_E,
    NOTHING,
    PER_ROW,
    full,
    rescale,
    wide,
)
from jaxrunner.kernels_pallas.mosaic import Index, Ref
from jaxrunner.kernels_pallas.stores import put, put_heads
from jaxrunner.types import Array

ROWS = 64  # heads of a tile: the height of a Hopper matrix product
KEYS = 64  # of a tile: as many as a latent has rotated numbers, whose place weights take
RISE = 8.0  # of a largest score, in base 2: weights are at most 2 ** RISE


class Static(NamedTuple):
    """The compile-time parameters of the kernel."""

    heads: int  # of a tile that are there
    rows: int  # of queries that are copied: `heads`, and up to a multiple of 8
    tiles: int  # of heads
    half: int  # columns of a warpgroup's result
    scale: float
    registers: tuple[int, int]


class Ring(NamedTuple):
    """The shared memory of a block of the grid. Two tiles, [2, ...], take turns."""

    q: Ref  # [2, 64, half], then the result
    q_rotated: Ref  # [1, 64, 64]
    values: Ref  # [2, 2, 64, half], halves of a tile's columns
    rotated: Ref  # [2, 64, 64], rotated numbers of a tile's keys, then the weights of all keys
    best: Ref  # [2, 64], what the weights of each head's keys are relative to, up to a tile
    total: Ref  # [2, 64], each warpgroup's part of a row's sum of weights
    q_full: Any
    q_free: Any
    # Of a tile, first the columns of the warpgroup that weighs it, then those of the other one.
    full: Any  # columns are there, [2, 2], see `place`
    full_rotated: Any
    free: Any  # they are read; those of the warpgroup that does not weigh the tile: weights, too
    weighed: Any  # a tile's weights are there
    summed: Any  # a warpgroup's part of the sum is there


def scratch(s: Static, dtype: Any, S: int) -> dict[str, Any]:
    """Returns what a `Ring` is of, for blocks of S tokens."""
    tiled = mosaic.tiled(64, 2)
    copies = max(1, KEYS // S)
    return dict(
        q=plgpu.SMEM((2, ROWS, s.half), dtype, transforms=tiled),
        q_rotated=plgpu.SMEM((1, ROWS, KEYS), dtype, transforms=tiled),
        values=plgpu.SMEM((2, 2, KEYS, s.half), dtype, transforms=tiled),
        rotated=plgpu.SMEM((2, KEYS, KEYS), dtype, transforms=tiled),
        best=plgpu.SMEM((2, ROWS), jnp.float32),
        total=plgpu.SMEM((2, ROWS), jnp.float32),
        q_full=plgpu.Barrier(num_arrivals=3),
        q_free=plgpu.Barrier(num_arrivals=2),
        full=plgpu.Barrier(num_arrivals=copies, num_barriers=4),
        full_rotated=plgpu.Barrier(num_arrivals=copies, num_barriers=2),
        free=plgpu.Barrier(num_barriers=4),
        weighed=plgpu.Barrier(num_barriers=2),
        summed=plgpu.Barrier(num_barriers=2),
    )


def place(stage: Index, half: Index) -> Index:
    """Returns which barriers are those of half the columns of a tile."""
    return 2 * stage + half


class Item(NamedTuple):
    """A row's tiles that a block has, from `first` on."""

    row: Array
    first: Array
    num: Array
    length: Array
    whole: Array  # whether these are all
    part: Array  # where a part's result goes


# Sum of weighed values, [64, half]; what weights are relative to, [64]; their sums, [64, 8].
Carry = tuple[Array, Array, Array]


def attend(s: Static, item: Item, wg: int, ring: Ring, out: Ref, parts: Parts) -> None:
    """Computes a warpgroup's columns of an item; it finds the weights of tiles wg, wg + 2, ..."""
    other, dtype, unit = 1 - wg, out.dtype, s.scale * LOG2_E
    mosaic.barrier_wait(ring.q_full)

    def multiply(acc: Ref, weights: Array | Ref, stage: int) -> None:
        mosaic.wgmma(acc, weights, ring.values.at[_hidden(jnp.int32(stage)), wg])

    def release(acc: Ref, stage: int) -> None:
        """Lets a tile's columns be replaced once they are read."""
        mosaic.wgmma_accumulator_load(acc, wait_n=0)
        mosaic.barrier_arrive(ring.free.at[place(stage, wg)])

    def add(acc: Array, weights: Array | Ref, stage: int) -> Array:
        def products(ref: Ref) -> None:
            multiply(ref, weights, stage)
            release(ref, stage)

        return pl.run_state(products)(mosaic.ACC.init(acc))

    def score(j: Array) -> tuple[Array, Array]:
        """Returns the scores of tile j, [64, keys], and the largest of each head."""
        mine, limit = _hidden(jnp.int32(wg)), item.length - (item.first + j) * KEYS

        def products(ref: Ref) -> None:
            for half in (wg, other):
                mosaic.barrier_wait(ring.full.at[place(wg, half)])
                mosaic.wgmma(ref, ring.q.at[mine - wg + half], ring.values.at[mine, half].T)
            mosaic.barrier_wait(ring.full_rotated.at[wg])
            mosaic.wgmma(ref, ring.q_rotated.at[mine - wg], ring.rotated.at[mine].T)

        def hide(_: Array, scores: Array) -> Array:
            _silence(ring.values.at[wg], limit)
            return _mask(scores, limit)

        scores = pl.run_state(products)(mosaic.ACC.init(full((ROWS, KEYS), 0.0)))
        # A loop of at most one turn stands for a condition, here and below.
        scores = lax.fori_loop(0, jnp.where(limit < KEYS, 1, 0), hide, scores)
        return lax.optimization_barrier((scores, scores.max(axis=1) * unit))

    def weigh(scores: Array, highest: Array, best: Array) -> tuple[Array, Array, Array]:
        """Finds the weights of a tile, and leaves them for the other warpgroup.

        Returns them, what they are relative to, and what is kept of older ones.
        """
        new_best = jnp.where(highest > best + RISE, highest, best)
        weights = jnp.exp2(scores * unit - wide(new_best, scores))
        weights, new_best = lax.optimization_barrier((weights, new_best))
        put(ring.rotated.at[wg], weights.astype(dtype))
        put(ring.best.at[wg], new_best)
        plgpu.commit_smem()
        mosaic.barrier_arrive(ring.weighed.at[wg])
        return weights, new_best, jnp.exp2(best - new_best)

    def wait_other(carry: Carry) -> Carry:
        """Waits for the weights of the other warpgroup's tile, and rescales to what they are of."""
        acc, best, total = carry
        mosaic.barrier_wait(ring.full.at[place(other, wg)])
        mosaic.barrier_wait(ring.weighed.at[other])
        new_best = mosaic.load(ring.best.at[other], layout=PER_ROW, optimized=False)
        kept = jnp.exp2(best - new_best)
        return rescale(acc, kept), new_best, total * wide(kept, total)

    def add_other(carry: Carry) -> Carry:
        acc, best, total = wait_other(carry)
        return add(acc, ring.rotated.at[other], other), best, total

    def first(i: Array, carry: Carry) -> Carry:
        """Takes a pair of tiles in, or a last one: warpgroup 0."""
        acc, best, total = carry
        weights, best, kept = weigh(*score(2 * i), best)
        acc = add(rescale(acc, kept), weights.astype(dtype), wg)
        total = total * wide(kept, total) + _sums(weights)
        behind = jnp.where(2 * i + 1 < item.num, 1, 0)
        return lax.fori_loop(0, behind, lambda _, c: add_other(c), (acc, best, total))

    def second(i: Array, carry: Carry) -> Carry:
        """Takes a pair of tiles in: warpgroup 1, which weighs the second one beside a product."""
        scores, highest = score(2 * i + 1)
        acc, best, total = wait_other(carry)

        def products(refs: tuple[Ref, ...]) -> None:
            acc_ref, *result_refs = refs
            multiply(acc_ref, ring.rotated.at[other], other)
            weights, new_best, kept = weigh(scores, highest, best)
            release(acc_ref, other)
            new_total = total * wide(kept, total) + _sums(weights)
            results = weights.astype(dtype), new_best, kept, new_total
            for ref, result in zip(result_refs, results, strict=True):
                ref[...] = result

        acc, weights, best, kept, total = pl.run_state(products)(
            (mosaic.ACC.init(acc), scores.astype(dtype), best, best, total)
        )
        weights = lax.optimization_barrier(weights)
        return add(rescale(acc, kept), weights, wg), best, total

    carry = full((ROWS, s.half), 0.0), full((ROWS,), NOTHING, PER_ROW), full((ROWS, 8), 0.0)
    if wg == 0:
        carry = lax.fori_loop(0, lax.div(item.num + 1, 2), first, carry)
    else:
        carry = lax.fori_loop(0, lax.div(item.num, 2), second, carry)
        carry = lax.fori_loop(0, lax.rem(item.num, 2), lambda _, c: add_other(c), carry)
    _leave(s, item, carry, wg, ring, out, parts)


def _leave(
    s: Static, item: Item, carry: Carry, wg: int, ring: Ring, out: Ref, parts: Parts
) -> None:
    """Writes a warpgroup's columns of a row, or of a part of one."""
    acc, best, sums = carry
    total = sums.sum(axis=1)
    put(ring.total.at[wg], total)
    plgpu.commit_smem()
    mosaic.barrier_arrive(ring.summed.at[wg])
    mosaic.barrier_wait(ring.summed.at[1 - wg])
    total += mosaic.load(ring.total.at[1 - wg], layout=PER_ROW, optimized=False)
    total = jnp.maximum(total, 1e-30)
    acc = acc * wide(1 / total, acc)
    heads = pl.ds(lax.axis_index("tile") * s.heads, s.heads)
    columns = pl.ds(wg * s.half, s.half)

    @pl.when(item.whole)
    def _() -> None:
        target = out.at[item.row, heads, columns]
        if s.heads % 8:  # a copy out of tiles of 8 rows must not straddle them
            put_heads(acc.astype(out.dtype), target)
            return
        put(ring.q.at[wg], acc.astype(out.dtype))  # all scores are found by now
        plgpu.commit_smem()
        mosaic.copy_smem_to_gmem(ring.q.at[wg, pl.ds(0, s.heads)], target)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    @pl.when(jnp.logical_not(item.whole))
    def _() -> None:
        put_heads(acc, parts.value.at[item.part, heads, columns])
        if wg == 0:
            weight = lax.broadcast_in_dim(best + jnp.log2(total), (ROWS, 8), [0])
            put_heads(weight, parts.weight.at[item.part, heads])

    mosaic.barrier_arrive(ring.q_free)  # not before: now the other's part may be replaced


def _hidden(number: Array) -> Array:
    """Hides from the compiler that a number is the same in all turns of a loop.

    It would compute the descriptors of all products ahead of them, and run out of registers.
    """
    return lax.optimization_barrier(number)


def _sums(weights: Array) -> Array:
    """Returns sums of the weights of every eighth key, [64, 8], which no thread has to exchange."""
    parts = [lax.slice(weights, (0, i), (ROWS, i + 8)) for i in range(0, KEYS, 8)]
    return functools.reduce(jnp.add, parts)


def _mask(scores: Array, limit: Array) -> Array:
    """Hides keys from `limit` on."""
    column = plgpu.broadcasted_iota(jnp.int32, (ROWS, 8), 1, layout=LAYOUT)
    # Eight columns at a time, and behind a barrier: else the compiler computes all indices ahead of
    # the loops and runs out of registers.
    column = lax.optimization_barrier(column)
    parts = []
    for start in range(0, KEYS, 8):
        part = lax.slice(scores, (0, start), (ROWS, start + 8))
        parts.append(jnp.where(column < limit - start, part, -jnp.inf))
    return lax.concatenate(parts, 1)


def _silence(values: Ref, limit: Array) -> None:
    """Zeroes values, [2, keys, half], from key `limit` on: a weight of 0 does not silence a NaN."""
    num = values.shape[2] // 64

    def each(i: Array, _: None) -> None:
        part = values.at[lax.div(i, num), :, pl.ds(lax.rem(i, num) * 64, 64)]
        x = plgpu.layout_cast(part[...], LAYOUT)
        key = plgpu.broadcasted_iota(jnp.int32, x.shape, 0, layout=LAYOUT)
        part[...] = jnp.where(key < limit, x, jnp.zeros((), x.dtype))
        return _

    lax.fori_loop(0, values.shape[0] * num, each, None)
    plgpu.commit_smem()
