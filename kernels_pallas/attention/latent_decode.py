"""Latent attention of one query token a request over the paged cache, on Hopper (Mosaic GPU).

A tile of latents is read into shared memory once, and is keys and values. Two warpgroups compute:
each has half of the result's columns, and the scores of every other tile, whose weights it leaves
for the other one in the place of the tile's rotated numbers, which nobody needs by then. So the
softmax of one tile runs beside the products of the next and of the last one (after FlashMLA,
https://github.com/deepseek-ai/FlashMLA). A third warpgroup copies.

All blocks of the grid have the same number of tiles (`latent_shares`), unless rows are cut one by
one (`batch_invariant`); rows that are cut are merged by a second kernel (`latent_merge`).
"""

from dataclasses import dataclass
import functools
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from jaxrunner.kernels_pallas import mosaic, pdl
from jaxrunner.kernels_pallas.attention.latent_merge import Parts, merge
from jaxrunner.kernels_pallas.attention.latent_shares import share_out
from jaxrunner.kernels_pallas.attention.online_softmax import LAYOUT, LOG2_E, NOTHING, full
from jaxrunner.kernels_pallas.mosaic import TOO_OLD, Ref, Shaped
from jaxrunner.kernels_pallas.stores import put, put_heads
from jaxrunner.types import Array

ROWS = 64  # heads of a tile: the height of a Hopper matrix product
KEYS = 64  # of a tile: as many as a latent has rotated numbers, whose place weights take
PER_ROW = LAYOUT.reduce(1)
COMPILER = plgpu.CompilerParams(approx_math=True, lowering_semantics=mgpu.LoweringSemantics.Lane)


@dataclass(frozen=True)
class TuningConfig:
    """Sizes that change speed, and how keys are cut."""

    registers: tuple[int, int] = (232, 40)  # of a thread that computes, and of one that copies
    num_ctas: int = 132  # one for each multiprocessor of an H200
    # Whether a row is cut by the number of rows and by the longest that there may be, not by the
    # lengths of others, so that its sums are in one order.
    batch_invariant: bool = False


class _Static(NamedTuple):
    """The compile-time parameters of the kernel."""

    heads: int  # of a tile that are there
    rows: int  # of queries that are copied: `heads`, and up to a multiple of 8
    tiles: int  # of heads
    half: int  # columns of a warpgroup's result
    late: bool  # whether a tile's own warpgroup lets the other one's next scores go first
    scale: float
    registers: tuple[int, int]


def refuses(q: Shaped, latents: Shaped, rank: int) -> str | None:
    """Says why q, [B, H, D], and latents, [N, S, D], are not served; None if they are."""
    (_, H, D), (_, S, _) = q.shape, latents.shape
    if TOO_OLD is not None:
        return TOO_OLD
    if q.dtype not in (jnp.bfloat16, jnp.float16) or latents.dtype != q.dtype:
        return f"wants one dtype, bfloat16 or float16, got {q.dtype} and {latents.dtype}"
    if rank % 128 or not 128 <= rank <= 512 or D - rank != KEYS:
        want = f"values of 128, 256, 384 or 512 numbers, and {KEYS} more of a key"
        return f"wants {want}, got {rank} and {D - rank}"
    if H > ROWS and H % ROWS:
        return f"wants at most {ROWS} heads or a multiple of that, got {H}"
    if S % 8 or (S % KEYS and KEYS % S):
        return f"wants a block_size that divides or is a multiple of {KEYS}, got {S}"
    return None


def latent_decode(
    q: Array, latents: Array, blocks: Array, seq_lens: Array, *, scale: float, rank: int,
    config: TuningConfig = TuningConfig(),
) -> Array:  # fmt: skip
    """Attends the last token of each row to all `seq_lens`, [B], tokens of that row.

    q: [B, H, D]; latents: [N, S, D], keys, whose first `rank` numbers are the values; blocks:
    [B, M] int32, unused entries may be anything; `scale` is positive. Returns [B, H, rank]; rows of
    no tokens are zeros.

    Raises:
      ValueError: `refuses` says why.
    """
    if reason := refuses(q, latents, rank):
        raise ValueError(f"latent_decode {reason}")
    (B, H, _), dtype = q.shape, q.dtype
    heads, tiles, half = min(H, ROWS), -(-H // ROWS), rank // 2
    rows = -(-heads // 8) * 8
    s = _Static(heads, rows, tiles, half, tiles > 1, scale, config.registers)
    longest = -(-blocks.shape[1] * latents.shape[1] // KEYS) if config.batch_invariant else None
    shares = share_out(seq_lens, KEYS, max(1, config.num_ctas // tiles), longest)
    C = shares.first.shape[0]
    whole = config.batch_invariant and C == B  # no row can be in parts
    out = jax.empty_ref(jax.ShapeDtypeStruct((B, H, rank), dtype))
    parts = Parts(
        *(
            jax.empty_ref(jax.ShapeDtypeStruct((1 if whole else 2 * C, H, width), jnp.float32))
            for width in (rank, 8)
        )
    )
    # A copy into tiles of 8 rows must not straddle them.
    queries = jnp.pad(q, ((0, 0), (0, rows - heads), (0, 0))).reshape(B * tiles * rows, -1)
    plgpu.kernel(
        functools.partial(_kernel, s),
        out_type=(), scratch_types=_scratch(s, dtype, latents.shape[1]),
        grid=(C, tiles), grid_names=("cta", "tile"), num_threads=3, thread_name="wg",
        kernel_name="latent_decode", compiler_params=COMPILER,
    )(queries, latents, blocks.astype(jnp.int32), *shares, out, *parts)  # fmt: skip
    if not whole:
        merge(parts, shares, out)
    return jax.freeze(out)


class _Smem(NamedTuple):
    """The shared memory of a block of the grid. Two tiles, [2, ...], take turns."""

    q: Ref  # [2, 64, half]
    q_rotated: Ref  # [1, 64, 64]
    values: Ref  # [2, 2, 64, half], halves of a tile's columns
    rotated: Ref  # [2, 64, 64], rotated numbers of a tile's keys, then the weights of all keys
    best: Ref  # [2, 64], each head's largest score up to a tile
    total: Ref  # [2, 64], each warpgroup's part of a row's sum of weights
    q_full: Any
    q_free: Any
    # Of a tile, first the columns of the warpgroup that does not weigh it and the rotated numbers,
    # which that one reads, too; then the columns of the other one.
    full_first: Any  # these are there
    full_last: Any
    free_first: Any  # these are read
    free_last: Any
    scored: Any  # a tile's scores are found
    weighed: Any  # a tile's weights are there
    summed: Any  # a warpgroup's part of the sum is there


def _scratch(s: _Static, dtype: Any, S: int) -> dict[str, Any]:
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
        full_first=plgpu.Barrier(num_arrivals=2 * copies, num_barriers=2),
        full_last=plgpu.Barrier(num_arrivals=copies, num_barriers=2),
        free_first=plgpu.Barrier(num_barriers=2),
        free_last=plgpu.Barrier(num_barriers=2),
        scored=plgpu.Barrier(num_barriers=2),
        weighed=plgpu.Barrier(num_barriers=2),
        summed=plgpu.Barrier(num_barriers=2),
    )


class _Item(NamedTuple):
    """A row's tiles that a block has, from `first` on, and where their result goes."""

    row: Array
    first: Array
    num: Array
    length: Array
    whole: Array  # whether these are all
    place: Array  # of a part


def _kernel(
    s: _Static, q: Ref, latents: Ref, blocks: Ref, start: Ref, end: Ref, length: Ref, first: Ref,
    last: Ref, row: Ref, num_rows: Ref, head: Ref, out: Ref, value: Ref, weight: Ref, /,
    **smem: Any,
) -> None:  # fmt: skip
    pdl.begin()
    cta, wg, ring = lax.axis_index("cta"), lax.axis_index("wg"), _Smem(**smem)
    low, high, first_row = first[cta], last[cta], row[cta]

    def item(i: Array) -> _Item:
        r = first_row + i
        begin, stop = start[r], end[r]
        here, until = jnp.maximum(begin, low), jnp.minimum(stop, high)
        whole = (begin >= low) & (stop <= high)
        place = 2 * cta + jnp.where(begin < low, 0, 1)
        return _Item(r, here - begin, until - here, length[r], whole, place)

    @pl.when(wg < 2)
    def _() -> None:
        plgpu.set_max_registers(s.registers[0], action="increase")
        mosaic.barrier_arrive(ring.q_free)
        mosaic.barrier_arrive(ring.free_first.at[1 - wg])
        mosaic.barrier_arrive(ring.free_last.at[wg])

        def attend(i: Array, _: None) -> None:
            _attend(s, item(i), wg, ring, out, Parts(value, weight))
            return _

        lax.fori_loop(0, num_rows[cta], attend, None)

    @pl.when(wg == 2)
    def _() -> None:
        plgpu.set_max_registers(s.registers[1], action="decrease")

        def fetch(i: Array, _: None) -> None:
            _fetch(s, item(i), q, latents, blocks, ring)
            return _

        lax.fori_loop(0, num_rows[cta], fetch, None)


def _fetch(s: _Static, item: _Item, q: Ref, latents: Ref, blocks: Ref, ring: _Smem) -> None:
    """Copies an item's queries and its tiles, each half of their columns by itself."""
    N, S, _ = latents.shape
    M, size = blocks.shape[1], min(S, KEYS)
    columns = [pl.ds(i * s.half, s.half) for i in range(2)]
    rotated = pl.ds(2 * s.half, KEYS)
    mosaic.barrier_wait(ring.q_free)
    head = (item.row * s.tiles + lax.axis_index("tile")) * s.rows
    rows, to = pl.ds(head, s.rows), pl.ds(0, s.rows)
    for i in range(2):
        mosaic.copy_gmem_to_smem(q.at[rows, columns[i]], ring.q.at[i, to], ring.q_full)
    mosaic.copy_gmem_to_smem(q.at[rows, rotated], ring.q_rotated.at[0, to], ring.q_full)

    def body(j: Array, _: None) -> None:
        stage, token = lax.rem(j, 2), (item.first + j) * KEYS
        # Entries behind the row's end may be anything, so both indices are clamped.
        at = [jnp.minimum(lax.div(token, S) + c, M - 1) for c in range(KEYS // size)]
        ids = [jnp.clip(blocks[item.row, c], 0, N - 1) for c in at]
        tokens = pl.ds(lax.rem(token, S) if S > KEYS else 0, size)
        half = 1 - stage

        def copy(source: Any, target: Ref, full: Any) -> None:
            for c, block in enumerate(ids):
                to = target.at[pl.ds(c * size, size)]
                mosaic.copy_gmem_to_smem(latents.at[block, tokens, source], to, full)

        mosaic.barrier_wait(ring.free_first.at[stage])
        first, last = ring.full_first.at[stage], ring.full_last.at[stage]
        copy(pl.ds(half * s.half, s.half), ring.values.at[stage, half], first)
        copy(rotated, ring.rotated.at[stage], first)
        mosaic.barrier_wait(ring.free_last.at[stage])
        copy(pl.ds(stage * s.half, s.half), ring.values.at[stage, stage], last)
        return _

    lax.fori_loop(0, item.num, body, None)


Carry = tuple[Array, Array, Array]  # sum of weighed values [64, half], largest [64], total [64]


def _attend(s: _Static, item: _Item, wg: Array, ring: _Smem, out: Ref, parts: Parts) -> None:
    """Computes a warpgroup's columns of an item; it finds the weights of tiles wg, wg + 2, ..."""
    other = 1 - wg
    mosaic.barrier_wait(ring.q_full)

    def own(j: Array, carry: Carry) -> Carry:
        """Finds the weights of tile j, leaves them for the other warpgroup, and adds values."""
        (acc, best, total), mine = carry, _hidden(wg)
        limit = item.length - (item.first + j) * KEYS

        def products(ref: Ref) -> None:
            mosaic.barrier_wait(ring.full_first.at[wg])
            mosaic.wgmma(ref, ring.q.at[1 - mine], ring.values.at[mine, 1 - mine].T)
            mosaic.wgmma(ref, ring.q_rotated.at[mine - wg], ring.rotated.at[mine].T)
            mosaic.barrier_wait(ring.full_last.at[wg])
            mosaic.wgmma(ref, ring.q.at[mine], ring.values.at[mine, mine].T)

        scores = pl.run_state(products)(mosaic.ACC.init(full((ROWS, KEYS), 0.0)))
        if s.late:
            pl.when(j > 0)(lambda: mosaic.barrier_arrive(ring.scored.at[wg]))
        _silence(ring.values.at[mine], limit)
        weights, best, total, kept = _softmax(s, scores, best, total, limit)
        weights = weights.astype(out.dtype)
        put(ring.rotated.at[wg], weights)
        put(ring.best.at[wg], best)
        plgpu.commit_smem()
        mosaic.barrier_arrive(ring.weighed.at[wg])
        acc = acc * _wide(kept, acc)
        if s.late:
            pl.when(j + 1 < item.num)(lambda: mosaic.barrier_wait(ring.scored.at[other]))
        acc = _add(acc, weights, ring.values.at[mine, wg])
        mosaic.barrier_arrive(ring.free_last.at[wg])
        return acc, best, total

    def others(carry: Carry) -> Carry:
        """Adds values of the other warpgroup's tile by the weights that it has found."""
        (acc, best, total), last = carry, 1 - _hidden(wg)
        mosaic.barrier_wait(ring.full_first.at[other])
        mosaic.barrier_wait(ring.weighed.at[other])
        new_best = mosaic.load(ring.best.at[other], layout=PER_ROW, optimized=False)
        kept = jnp.exp2(best - new_best)
        acc = _add(acc * _wide(kept, acc), ring.rotated.at[last], ring.values.at[last, wg])
        mosaic.barrier_arrive(ring.free_first.at[other])
        return acc, new_best, total * kept

    # Loops of at most one turn stand for conditions: the first tile has none before it, and the
    # last one may be the other warpgroup's. Values come before the next scores: the sooner a tile
    # is read, the sooner another one is on its way.
    carry = full((ROWS, s.half), 0.0), *(full((ROWS,), x, PER_ROW) for x in (NOTHING, 0.0))
    carry = lax.fori_loop(0, 1 - wg, own, carry)
    turns = lax.div(item.num + 1 - wg, 2)
    carry = lax.fori_loop(1 - wg, turns, lambda i, c: own(wg + 2 * i, others(c)), carry)
    carry = lax.fori_loop(0, lax.rem(item.num + 1 - wg, 2), lambda _, c: others(c), carry)
    _leave(s, item, carry, wg, ring, out, parts)


def _leave(
    s: _Static, item: _Item, carry: Carry, wg: Array, ring: _Smem, out: Ref, parts: Parts
) -> None:
    """Writes a warpgroup's columns of a row, or of a part of one."""
    acc, best, total = carry
    put(ring.total.at[wg], total)
    plgpu.commit_smem()
    mosaic.barrier_arrive(ring.summed.at[wg])
    mosaic.barrier_wait(ring.summed.at[1 - wg])
    total += mosaic.load(ring.total.at[1 - wg], layout=PER_ROW, optimized=False)
    mosaic.barrier_arrive(ring.q_free)  # not before: now the other's part may be replaced
    total = jnp.maximum(total, 1e-30)
    acc = acc * _wide(1 / total, acc)
    heads = pl.ds(lax.axis_index("tile") * s.heads, s.heads)
    columns = pl.ds(wg * s.half, s.half)

    @pl.when(item.whole)
    def _() -> None:
        put_heads(acc.astype(out.dtype), out.at[item.row, heads, columns])

    @pl.when(jnp.logical_not(item.whole))
    def _() -> None:
        put_heads(acc, parts.value.at[item.place, heads, columns])

        @pl.when(wg == 0)
        def _() -> None:
            weight = lax.broadcast_in_dim(best + jnp.log2(total), (ROWS, 8), [0])
            put_heads(weight, parts.weight.at[item.place, heads])


def _hidden(number: Array) -> Array:
    """Hides from the compiler that a number is the same in all turns of a loop.

    It would compute the descriptors of all products ahead of them, and run out of registers.
    """
    return lax.optimization_barrier(number)


def _softmax(
    s: _Static, scores: Array, best: Array, total: Array, limit: Array
) -> tuple[Array, Array, Array, Array]:
    """Takes scores, [64, keys], into the largest and the sum of the weights, [64], in base 2.

    Returns the weights, the largest, the sum, and what is kept of older weights.
    """
    unit = s.scale * LOG2_E
    scores = _mask(scores, limit)
    new_best = jnp.maximum(best, scores.max(axis=1) * unit)
    kept = jnp.exp2(best - new_best)
    weights = jnp.exp2(scores * unit - _wide(new_best, scores))
    total = total * kept + weights.sum(axis=1)
    return lax.optimization_barrier((weights, new_best, total, kept))


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


def _add(acc: Array, weights: Array | Ref, values: Ref) -> Array:
    """Adds weights, [64, keys], times values, [keys, half]."""
    return pl.run_state(lambda ref: mosaic.wgmma(ref, weights, values))(mosaic.ACC.init(acc))


def _silence(values: Ref, limit: Array) -> None:
    """Zeroes values, [2, keys, half], from key `limit` on: a weight of 0 does not silence a NaN."""

    @pl.when(limit < KEYS)
    def _() -> None:
        for half in range(2):
            for start in range(0, values.shape[2], 64):
                part = values.at[half, :, pl.ds(start, 64)]
                x = plgpu.layout_cast(part[...], LAYOUT)
                key = plgpu.broadcasted_iota(jnp.int32, x.shape, 0, layout=LAYOUT)
                part[...] = jnp.where(key < limit, x, jnp.zeros((), x.dtype))
        plgpu.commit_smem()


def _wide(x: Array, like: Array) -> Array:
    return lax.broadcast_in_dim(x, like.shape, [0])
