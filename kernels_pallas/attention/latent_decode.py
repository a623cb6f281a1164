"""Latent attention of one query token a request over the paged cache, on Hopper (Mosaic GPU).

A tile of latents is read into shared memory once, and is keys and values. Two warpgroups compute
(`latent_pairs`), a third one copies.

Blocks of the grid have as many tiles each, or as many rows (`latent_shares`), unless rows are cut
one by one (`batch_invariant`). Rows that are cut are merged by a second kernel (`latent_merge`).
"""

from dataclasses import dataclass
import functools
from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from jaxrunner.kernels_pallas import mosaic, pdl
from jaxrunner.kernels_pallas.attention.latent_merge import Parts, merge
from jaxrunner.kernels_pallas.attention.latent_pairs import (
    KEYS,
    ROWS,
    Item,
    Ring,
    Static,
    attend,
    place,
    scratch,
)
from jaxrunner.kernels_pallas.attention.latent_shares import share_out
from jaxrunner.kernels_pallas.mosaic import TOO_OLD, Ref, Shaped
from jaxrunner.types import Array

COMPILER = plgpu.CompilerParams(approx_math=True, lowering_semantics=mgpu.LoweringSemantics.Lane)


@dataclass(frozen=True)
class TuningConfig:
    """Sizes that change speed, and how keys are cut."""

    registers: tuple[int, int] = (232, 40)  # of a thread that computes, and of one that copies
    num_ctas: int = 132  # one for each multiprocessor of an H200
    # Whether a row is cut by the number of rows and by the longest that there may be, not by the
    # lengths of others, so that its sums are in one order.
    batch_invariant: bool = False


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
    s = Static(heads, rows, tiles, half, scale, config.registers)
    longest = -(-blocks.shape[1] * latents.shape[1] // KEYS) if config.batch_invariant else None
    shares = share_out(seq_lens, KEYS, max(1, config.num_ctas // tiles), longest)
    C, tiles_of = shares.first.shape[0], shares[:-2]  # without what only merges read
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
        out_type=(), scratch_types=scratch(s, dtype, latents.shape[1]),
        grid=(C, tiles), grid_names=("cta", "tile"), num_threads=3, thread_name="wg",
        kernel_name="latent_decode", compiler_params=COMPILER,
    )(queries, latents, blocks.astype(jnp.int32), *tiles_of, out, *parts)  # fmt: skip
    if not whole:
        merge(parts, shares, out)
    return jax.freeze(out)


def _kernel(
    s: Static, q: Ref, latents: Ref, blocks: Ref, start: Ref, end: Ref, length: Ref, first: Ref,
    last: Ref, row: Ref, num_rows: Ref, out: Ref, value: Ref, weight: Ref, /, **smem: Any,
) -> None:  # fmt: skip
    pdl.begin()
    cta, wg, ring = lax.axis_index("cta"), lax.axis_index("wg"), Ring(**smem)
    low, high, first_row = first[cta], last[cta], row[cta]

    def item(i: Array) -> Item:
        r = first_row + i
        begin, stop = start[r], end[r]
        here, until = jnp.maximum(begin, low), jnp.minimum(stop, high)
        whole = (begin >= low) & (stop <= high)
        part = 2 * cta + jnp.where(begin < low, 0, 1)
        return Item(r, here - begin, until - here, length[r], whole, part)

    for number in range(2):

        @pl.when(wg == number)
        def _(number: int = number) -> None:
            plgpu.set_max_registers(s.registers[0], action="increase")
            mosaic.barrier_arrive(ring.q_free)
            for stage in range(2):
                mosaic.barrier_arrive(ring.free.at[place(stage, number)])

            def compute(i: Array, _: None) -> None:
                attend(s, item(i), number, ring, out, Parts(value, weight))
                return _

            lax.fori_loop(0, num_rows[cta], compute, None)

    @pl.when(wg == 2)
    def _() -> None:
        plgpu.set_max_registers(s.registers[1], action="decrease")

        def fetch(i: Array, _: None) -> None:
            _fetch(s, item(i), q, latents, blocks, ring)
            return _

        lax.fori_loop(0, num_rows[cta], fetch, None)


def _fetch(s: Static, item: Item, q: Ref, latents: Ref, blocks: Ref, ring: Ring) -> None:
    """Copies an item's queries and its tiles, each half of their columns by itself."""
    N, S, _ = latents.shape
    M, size = blocks.shape[1], min(S, KEYS)
    columns = [pl.ds(i * s.half, s.half) for i in range(2)]
    rotated = pl.ds(2 * s.half, KEYS)

    def ids_of(j: Array) -> tuple[Array, ...]:
        token = (item.first + j) * KEYS
        # Entries behind the row's end may be anything, so both indices are clamped.
        at = [jnp.minimum(lax.div(token, S) + c, M - 1) for c in range(KEYS // size)]
        return tuple(jnp.clip(blocks[item.row, c], 0, N - 1) for c in at)

    first_ids = ids_of(jnp.int32(0))
    mosaic.barrier_wait(ring.q_free)
    head = (item.row * s.tiles + lax.axis_index("tile")) * s.rows
    rows, to = pl.ds(head, s.rows), pl.ds(0, s.rows)
    for i in range(2):
        mosaic.copy_gmem_to_smem(q.at[rows, columns[i]], ring.q.at[i, to], ring.q_full)
    mosaic.copy_gmem_to_smem(q.at[rows, rotated], ring.q_rotated.at[0, to], ring.q_full)

    def body(j: Array, ids: tuple[Array, ...]) -> tuple[Array, ...]:
        stage, next_ids = lax.rem(j, 2), ids_of(j + 1)
        start = lax.rem((item.first + j) * KEYS, S) if S > KEYS else 0
        tokens = pl.ds(start, size)

        def copy(source: Any, target: Ref, full: Any) -> None:
            for c, block in enumerate(ids):
                to = target.at[pl.ds(c * size, size)]
                mosaic.copy_gmem_to_smem(latents.at[block, tokens, source], to, full)

        for half in (stage, 1 - stage):
            at = place(stage, half)
            mosaic.barrier_wait(ring.free.at[at])
            source = pl.ds(half * s.half, s.half)
            copy(source, ring.values.at[stage, half], ring.full.at[at])
        copy(rotated, ring.rotated.at[stage], ring.full_rotated.at[stage])
        return next_ids

    lax.fori_loop(0, item.num, body, first_ids)
