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
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, scf, vector
import numpy as np

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
    width: int = 64  # columns that are copied, and waited for, together
    cluster: int = 2  # blocks that copy tiles for one another
    rise: float = 8
    early: bool = True
    branch: bool = True
    # Whether a row is cut by the number of rows and by the longest that there may be, not by the
    # lengths of others, so that its sums are in one order.
    batch_invariant: bool = False


class _Static(NamedTuple):
    """The compile-time parameters of the kernel."""

    heads: int  # of a tile that are there
    rows: int  # of queries that are copied: `heads`, and up to a multiple of 8
    tiles: int  # of heads
    half: int  # columns of a warpgroup's result
    width: int  # of them that are copied, and waited for, together
    cluster: int  # blocks that copy tiles for one another
    rise: float
    early: bool
    branch: bool
    scale: float
    registers: tuple[int, int]

    @property
    def parts(self) -> int:
        """Copies of a warpgroup's columns."""
        return self.half // self.width


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
    width = half if half % config.width else config.width
    cluster = config.cluster if tiles % config.cluster == 0 and latents.shape[1] >= 16 else 1
    s = _Static(heads, rows, tiles, half, width, cluster, config.rise, config.early, config.branch, scale, config.registers)
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
        grid=(C, tiles // cluster), grid_names=("cta", "team"), num_threads=3, thread_name="wg",
        cluster=(cluster,) if cluster > 1 else (), cluster_names=("peer",) if cluster > 1 else (),
        kernel_name="latent_decode", compiler_params=COMPILER,
    )(queries, latents, blocks.astype(jnp.int32), *shares, out, *parts)  # fmt: skip
    if not whole:
        merge(parts, shares, out)
    return jax.freeze(out)


class _Smem(NamedTuple):
    """The shared memory of a block of the grid. Two tiles, [2, ...], take turns."""

    q: Ref  # [2 parts, 64, width]
    q_rotated: Ref  # [1, 64, 64]
    values: Ref  # [2, 2 parts, 64, width], columns of a tile's keys
    rotated: Ref  # [2, 64, 64], rotated numbers of a tile's keys, then the weights of all keys
    best: Ref  # [2, 64], each head's largest score up to a tile
    total: Ref  # [2, 64], each warpgroup's part of a row's sum of weights
    q_full: Any
    q_free: Any
    full: Any  # columns of a tile are there, [2, 2 parts]
    full_rotated: Any
    free_own: Any  # those of the warpgroup that weighs it are read
    free_other: Any  # those of the other one, and weights in the place of rotated numbers
    weighed: Any  # a tile's weights are there
    summed: Any  # a warpgroup's part of the sum is there


def _scratch(s: _Static, dtype: Any, S: int) -> dict[str, Any]:
    tiled = mosaic.tiled(64, 2)
    copies = max(1, KEYS // S)
    free: Any = plgpu.Barrier
    if s.cluster > 1:
        free = functools.partial(plgpu.ClusterBarrier, collective_axes=("peer",))
    return dict(
        q=plgpu.SMEM((2 * s.parts, ROWS, s.width), dtype, transforms=tiled),
        q_rotated=plgpu.SMEM((1, ROWS, KEYS), dtype, transforms=tiled),
        values=plgpu.SMEM((2, 2 * s.parts, KEYS, s.width), dtype, transforms=tiled),
        rotated=plgpu.SMEM((2, KEYS, KEYS), dtype, transforms=tiled),
        best=plgpu.SMEM((2, ROWS), jnp.float32),
        total=plgpu.SMEM((2, ROWS), jnp.float32),
        q_full=plgpu.Barrier(num_arrivals=2 * s.parts + 1),
        q_free=plgpu.Barrier(num_arrivals=2),
        full=plgpu.Barrier(num_arrivals=copies, num_barriers=4 * s.parts),
        full_rotated=plgpu.Barrier(num_arrivals=copies, num_barriers=2),
        free_other=free(num_barriers=2),
        free_own=free(num_barriers=2),
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

    for number in range(2):

        @pl.when(wg == number)
        def _(number: int = number) -> None:
            plgpu.set_max_registers(s.registers[0], action="increase")
            mosaic.barrier_arrive(ring.q_free)
            mosaic.barrier_arrive(ring.free_other.at[1 - number])
            mosaic.barrier_arrive(ring.free_own.at[number])

            def attend(i: Array, _: None) -> None:
                _attend(s, item(i), number, ring, out, Parts(value, weight))
                return _

            lax.fori_loop(0, num_rows[cta], attend, None)

    @pl.when(wg == 2)
    def _() -> None:
        plgpu.set_max_registers(s.registers[1], action="decrease")

        def fetch(i: Array, _: None) -> None:
            _fetch(s, item(i), q, latents, blocks, ring)
            return _

        lax.fori_loop(0, num_rows[cta], fetch, None)
        if s.cluster > 1:  # a block may not end while its peer still tells it what is free
            for stage in range(2):
                mosaic.barrier_wait(ring.free_other.at[stage])
                mosaic.barrier_wait(ring.free_own.at[stage])


def _fetch(s: _Static, item: _Item, q: Ref, latents: Ref, blocks: Ref, ring: _Smem) -> None:
    """Copies an item's queries and its tiles, some of their columns at a time."""
    N, S, _ = latents.shape
    M, size = blocks.shape[1], min(S, KEYS)
    peers: dict[str, Any] = dict(collective_axes="peer") if s.cluster > 1 else {}
    rotated = pl.ds(2 * s.half, KEYS)

    def ids_of(j: Array) -> tuple[Array, ...]:
        token = (item.first + j) * KEYS
        # Entries behind the row's end may be anything, so both indices are clamped.
        at = [jnp.minimum(lax.div(token, S) + c, M - 1) for c in range(KEYS // size)]
        return tuple(jnp.clip(blocks[item.row, c], 0, N - 1) for c in at)

    first_ids = ids_of(jnp.int32(0))
    mosaic.barrier_wait(ring.q_free)
    head = (item.row * s.tiles + _tile(s)) * s.rows
    rows, to = pl.ds(head, s.rows), pl.ds(0, s.rows)
    for i in range(2 * s.parts):
        columns = pl.ds(i * s.width, s.width)
        mosaic.copy_gmem_to_smem(q.at[rows, columns], ring.q.at[i, to], ring.q_full)
    mosaic.copy_gmem_to_smem(q.at[rows, rotated], ring.q_rotated.at[0, to], ring.q_full)

    def body(j: Array, ids: tuple[Array, ...]) -> tuple[Array, ...]:
        stage, next_ids = lax.rem(j, 2), ids_of(j + 1)
        start = lax.rem((item.first + j) * KEYS, S) if S > KEYS else 0
        tokens = pl.ds(start, size)

        def copy(source: Any, target: Ref, full: Any) -> None:
            for c, block in enumerate(ids):
                to = target.at[pl.ds(c * size, size)]
                mosaic.copy_gmem_to_smem(latents.at[block, tokens, source], to, full, **peers)

        def copy_half(half: Array) -> None:
            def one(i: Array, _: None) -> None:
                part = half * s.parts + i
                full = ring.full.at[stage * 2 * s.parts + part]
                copy(pl.ds(part * s.width, s.width), ring.values.at[stage, part], full)
                return _

            lax.fori_loop(0, s.parts, one, None)

        mosaic.barrier_wait(ring.free_own.at[stage])
        copy_half(stage)
        mosaic.barrier_wait(ring.free_other.at[stage])
        copy_half(1 - stage)
        copy(rotated, ring.rotated.at[stage], ring.full_rotated.at[stage])
        return next_ids

    lax.fori_loop(0, item.num, body, first_ids)


def _tile(s: _Static) -> Array:
    """Returns which of the tiles of heads this block computes."""
    peer = lax.axis_index("peer") if s.cluster > 1 else 0
    return lax.axis_index("team") * s.cluster + peer


Carry = tuple[Array, Array, Array]  # sum of weighed values [64, half], best [64], totals [64, 8]


def _attend(s: _Static, item: _Item, wg: int, ring: _Smem, out: Ref, parts: Parts) -> None:
    """Computes a warpgroup's columns of an item; it finds the weights of tiles wg, wg + 2, ..."""
    other, dtype, unit = 1 - wg, out.dtype, s.scale * LOG2_E
    mosaic.barrier_wait(ring.q_full)

    def values(stage: int) -> list[Ref]:
        hidden = _hidden(jnp.int32(stage))
        return [ring.values.at[hidden, wg * s.parts + i] for i in range(s.parts)]

    def scores() -> Array:
        mine = _hidden(jnp.int32(wg))

        def products(ref: Ref) -> None:
            for half in (wg, other):
                for part in range(half * s.parts, (half + 1) * s.parts):
                    mosaic.barrier_wait(ring.full.at[2 * s.parts * wg + part])
                    mosaic.wgmma(ref, ring.q.at[mine - wg + part], ring.values.at[mine, part].T)
            mosaic.barrier_wait(ring.full_rotated.at[wg])
            mosaic.wgmma(ref, ring.q_rotated.at[mine - wg], ring.rotated.at[mine].T)

        return pl.run_state(products)(mosaic.ACC.init(full((ROWS, KEYS), 0.0)))

    def limit_of(j: Array) -> Array:
        return item.length - (item.first + j) * KEYS

    def scores_and_best(j: Array) -> tuple[Array, Array]:
        found, limit = scores(), limit_of(j)

        def hide(_: Array, scores: Array) -> Array:
            _silence(ring.values.at[wg], limit)
            return _mask(scores, limit)

        found = lax.fori_loop(0, jnp.where(limit < KEYS, 1, 0), hide, found)
        return lax.optimization_barrier((found, found.max(axis=1) * unit))

    def weigh(scores: Array, highest: Array, best: Array) -> tuple[Array, Array, Array]:
        """Finds the weights of a tile, and leaves them for the other warpgroup."""
        new_best = jnp.where(highest > best + s.rise, highest, best)
        weights = jnp.exp2(scores * unit - _wide(new_best, scores))
        weights, new_best = lax.optimization_barrier((weights, new_best))
        put(ring.rotated.at[wg], weights.astype(dtype))
        put(ring.best.at[wg], new_best)
        plgpu.commit_smem()
        mosaic.barrier_arrive(ring.weighed.at[wg])
        return weights, new_best, jnp.exp2(best - new_best)

    def add_own(acc: Array, weights: Array) -> Array:
        acc = _add(acc, weights, values(wg))
        mosaic.barrier_arrive(ring.free_own.at[wg])
        return acc

    def wait_other(carry: Carry) -> Carry:
        """Waits for the other warpgroup's tile, and takes its best scores in."""
        acc, best, total = carry
        for i in range(s.parts):
            mosaic.barrier_wait(ring.full.at[(2 * other + wg) * s.parts + i])
        mosaic.barrier_wait(ring.weighed.at[other])
        new_best = mosaic.load(ring.best.at[other], layout=PER_ROW, optimized=False)
        kept = jnp.exp2(best - new_best)
        return _rescale(s, acc, kept), new_best, total * _wide(kept, total)

    def add_other(carry: Carry) -> Carry:
        acc, best, total = wait_other(carry)
        acc = _add(acc, ring.rotated.at[other], values(other))
        mosaic.barrier_arrive(ring.free_other.at[other])
        return acc, best, total

    def first_own(j: Array, carry: Carry) -> Carry:
        acc, best, total = carry
        weights, best, kept = weigh(*scores_and_best(j), best)
        acc = add_own(_rescale(s, acc, kept), weights.astype(dtype))
        return acc, best, total * _wide(kept, total) + _sums(weights)

    def first(i: Array, carry: Carry) -> Carry:
        behind = jnp.where(2 * i + 1 < item.num, 1, 0)
        return lax.fori_loop(0, behind, lambda _, c: add_other(c), first_own(2 * i, carry))

    def second(i: Array, carry: Carry) -> Carry:
        found, highest = scores_and_best(2 * i + 1)
        acc, best, total = wait_other(carry)

        def products(refs: tuple[Ref, ...]) -> None:
            acc_ref, *result_refs = refs
            for i, value in enumerate(values(other)):
                mosaic.wgmma(_columns(s.parts, acc_ref, i), ring.rotated.at[other], value)
            weights, new_best, kept = weigh(found, highest, best)
            if s.early:
                mosaic.wgmma_accumulator_load(acc_ref, wait_n=0)
                mosaic.barrier_arrive(ring.free_other.at[other])
            results = weights.astype(dtype), new_best, kept, total * _wide(kept, total) + _sums(weights)
            for ref, x in zip(result_refs, results, strict=True):
                ref[...] = x

        acc, weights, best, kept, total = pl.run_state(products)(
            (mosaic.ACC.init(acc), found.astype(dtype), best, best, total)
        )
        if not s.early:
            mosaic.barrier_arrive(ring.free_other.at[other])
        weights = lax.optimization_barrier(weights)
        return add_own(_rescale(s, acc, kept), weights), best, total

    carry = full((ROWS, s.half), 0.0), full((ROWS,), NOTHING, PER_ROW), full((ROWS, 8), 0.0)
    if wg == 0:
        carry = lax.fori_loop(0, lax.div(item.num + 1, 2), first, carry)
    else:
        carry = lax.fori_loop(0, lax.div(item.num, 2), second, carry)
        carry = lax.fori_loop(0, lax.rem(item.num, 2), lambda _, c: add_other(c), carry)
    _leave(s, item, carry, wg, ring, out, parts)


def _leave(
    s: _Static, item: _Item, carry: Carry, wg: int, ring: _Smem, out: Ref, parts: Parts
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
    acc = acc * _wide(1 / total, acc)
    heads = pl.ds(_tile(s) * s.heads, s.heads)
    columns = pl.ds(wg * s.half, s.half)

    @pl.when(item.whole)
    def _() -> None:
        if s.heads % 8:
            put_heads(acc.astype(out.dtype), out.at[item.row, heads, columns])
        else:
            _copy_out(s, acc.astype(out.dtype), wg, ring.q, out.at[item.row, heads])

    @pl.when(jnp.logical_not(item.whole))
    def _() -> None:
        put_heads(acc, parts.value.at[item.place, heads, columns])
        if wg == 0:
            weight = lax.broadcast_in_dim(best + jnp.log2(total), (ROWS, 8), [0])
            put_heads(weight, parts.weight.at[item.place, heads])

    mosaic.barrier_arrive(ring.q_free)  # not before: now the other's part may be replaced


def _copy_out(s: _Static, acc: Array, wg: int, q: Ref, out: Ref) -> None:
    """Copies a warpgroup's columns of a result, [64, half], by way of its columns of the queries."""
    own = range(wg * s.parts, (wg + 1) * s.parts)
    for i, part in enumerate(own):
        start, end = i * s.width, (i + 1) * s.width
        put(q.at[part], lax.slice(acc, (0, start), (ROWS, end)) if s.parts > 1 else acc)
    plgpu.commit_smem()
    for part in own:
        source = q.at[part, pl.ds(0, s.heads)]
        mosaic.copy_smem_to_gmem(source, out.at[:, pl.ds(part * s.width, s.width)])
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


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


def _add(acc: Array, weights: Array | Ref, values: list[Ref]) -> Array:
    """Adds weights, [64, keys], times values, [keys, width] of each part."""

    def products(ref: Ref) -> None:
        for i, value in enumerate(values):
            mosaic.wgmma(_columns(len(values), ref, i), weights, value)

    return pl.run_state(products)(mosaic.ACC.init(acc))


def _rescale(s: _Static, acc: Array, kept: Array) -> Array:
    """Returns acc, [64, half], times what is kept of each row. A warp that keeps all leaves it."""
    if not s.branch:
        return acc * _wide(kept, acc)
    out = plgpu.ShapeDtypeStruct(acc.shape, acc.dtype, layout=LAYOUT)

    @mosaic.inline_mgpu(arg_types=(LAYOUT, PER_ROW), return_type=out)
    def scale(_: Any, acc: mgpu.FragmentedArray, kept: mgpu.FragmentedArray) -> Any:
        i32 = ir.IntegerType.get_signless(32)
        one = mgpu.c(1.0, ir.F32Type.get())
        changed = []
        for register in kept.registers.flat:
            number = vector.extract(register, dynamic_position=[], static_position=[0])
            changed.append(arith.cmpf(arith.CmpFPredicate.UNE, number, one))
        some = arith.extui(i32, functools.reduce(arith.ori, changed))
        text = (
            "{ .reg .pred p; setp.ne.b32 p, $1, 0; vote.sync.any.pred p, p, 0xffffffff; "
            "selp.b32 $0, 1, 0, p; }"
        )
        found = mosaic.inline_asm(i32, [some], text, "=r,r", has_side_effects=True)
        condition = arith.cmpi(arith.CmpIPredicate.ne, found, mgpu.c(0, i32))
        wide = kept.broadcast_in_dim(acc.shape, (0,), acc.layout)
        registers = list(acc.registers.flat)
        branch = scf.IfOp(condition, [r.type for r in registers], has_else=True)
        with ir.InsertionPoint(branch.then_block):
            scf.yield_([arith.mulf(a, b) for a, b in zip(registers, wide.registers.flat)])
        with ir.InsertionPoint(branch.else_block):
            scf.yield_(registers)
        shaped = np.array(list(branch.results), object).reshape(acc.registers.shape)
        return mgpu.FragmentedArray(_registers=shaped, _layout=acc.layout, _is_signed=None)

    return scale(acc, kept)


def _columns(parts: int, acc: Ref, i: int) -> Ref:
    """Returns one of equal parts of a sum's columns."""
    width = acc.shape[1] // parts
    return acc if parts == 1 else acc.at[:, pl.ds(i * width, width)]


def _silence(values: Ref, limit: Array) -> None:
    """Zeroes values, [parts, keys, width], from key `limit` on: a weight of 0 leaves a NaN."""

    num = values.shape[2] // 64

    def each(i: Array, _: None) -> None:
        place = values.at[lax.div(i, num), :, pl.ds(lax.rem(i, num) * 64, 64)]
        x = plgpu.layout_cast(place[...], LAYOUT)
        key = plgpu.broadcasted_iota(jnp.int32, x.shape, 0, layout=LAYOUT)
        place[...] = jnp.where(key < limit, x, jnp.zeros((), x.dtype))
        return _

    lax.fori_loop(0, values.shape[0] * num, each, None)
    plgpu.commit_smem()


def _wide(x: Array, like: Array) -> Array:
    return lax.broadcast_in_dim(x, like.shape, [0])
