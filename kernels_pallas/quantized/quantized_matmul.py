"""Products of few tokens with weights of 8 or 4 bits, on Hopper (Mosaic GPU).

Weights are the tall operand: a block of the grid takes some of their rows and some terms of the
sum, one warpgroup copies them and the tokens into shared memory, step by step, and four others
widen them in registers (`widen`) and multiply. Each of these has 64 rows, or every second or
fourth step of the same ones; then their sums are added up. The steps that they take at a time are
copied at once: fewer copies of longer pieces of rows. A sum of terms that share a scale is
multiplied with it in float32, so weights are as exact as they are stored.
"""

from collections.abc import Collection
from dataclasses import dataclass
import functools
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from jaxrunner.kernels_pallas import mosaic
from jaxrunner.kernels_pallas.mosaic import TOO_OLD, Barrier, Index, Ref, Shaped
from jaxrunner.kernels_pallas.products import copies
from jaxrunner.kernels_pallas.products.gated_mlp import SMEM_BYTES
from jaxrunner.kernels_pallas.products.matmul import COMPILER, ROWS
from jaxrunner.kernels_pallas.quantized import widen
from jaxrunner.kernels_pallas.quantized.quantized_steps import (
    CONSUMERS,
    REGISTERS,
    STEP,
    Own,
    Steps,
    sums,
    unlike,
)
from jaxrunner.kernels_pallas.quantized.widen import TERMS
from jaxrunner.kernels_pallas.stores import put, put_transposed
from jaxrunner.types import Array

TOKENS = 1, *range(8, 65, 8)  # of a block; more are several blocks
MAX_PARTS = 8
LEAST = 4  # stages, of steps that are copied at once


@dataclass(frozen=True)
class TuningConfig:
    """Sizes that change speed alone."""

    num_ctas: int = 132  # no more than the device has multiprocessors: an H200's
    stages: int = 16  # steps that are in shared memory, fewer where they do not fit


class _Static(NamedTuple):
    """The compile-time parameters of the kernel."""

    steps: Steps  # of a part
    tiles: int  # of rows
    parts: int  # of a sum

    @property
    def writers(self) -> int:
        """Warpgroups whose sums others add to their own."""
        return CONSUMERS - self.steps.groups


def refuses(
    x: Shaped, weight: Shaped, scale: Shaped, code: str, max_parts: int = 1,
    config: TuningConfig = TuningConfig(),
) -> str | None:  # fmt: skip
    """Says why x, [T, E], weight, [F, E / packed], and scale, [F / run, G], are not served."""
    T, E = x.shape
    if reason := refuses_numbers(x, scale, code, widen.PAIRS):
        return reason
    if T not in TOKENS and (T % TOKENS[-1] or T > 4 * TOKENS[-1]):
        return f"wants 1, 8, 16, 24, ... 64, 128, 192 or 256 tokens, got {T}"
    fit = _fit(T, E, weight.shape[0], scale.shape, code, max_parts, config)
    return fit if isinstance(fit, str) else None


def refuses_numbers(x: Shaped, scale: Shaped, code: str, codes: Collection[str]) -> str | None:
    """Says why tokens, scales or weights, of which code, are not served; `codes`: which are."""
    if TOO_OLD is not None:
        return TOO_OLD
    if x.dtype != jnp.bfloat16 or scale.dtype != jnp.float32:
        return f"wants tokens in bfloat16 and scales in float32, got {x.dtype} and {scale.dtype}"
    return None if code in codes else f"wants weights in one of {[*codes]}, got {code}"


def _fit(
    T: int, E: int, F: int, scale: tuple[int, ...], code: str, max_parts: int, config: TuningConfig,
    has_zero: bool = True,
) -> _Static | str:  # fmt: skip
    """Shares the work out, or says why it cannot."""
    if reason := unlike(E, F, scale, code):
        return reason
    terms, whole = STEP * widen.PACKED[code], scale[1] == 1
    # Of one token the copies read eight: what is not there is 0.
    steps, chunk = E // terms, max(8, min(T, TOKENS[-1]))

    def cost(rows: int, parts: int) -> tuple[float, int]:
        """Bytes that a multiprocessor reads: of weights, and of tokens from a nearer memory.

        And of parts, a row of which one reads that adds them up. Rows that a warpgroup computes
        for nothing count as half.
        """
        turns = -(-F // rows * parts * -(-T // chunk) // config.num_ctas)
        counted = (rows + rows // _height(rows) * ROWS) // 2
        turn = counted * STEP + chunk * terms * 2
        return turns * (steps // parts) * turn + (parts > 1) * parts * F * 4, parts

    sizes = [
        (cost(rows, parts), rows, parts)
        for rows in range(8, CONSUMERS * ROWS + 1, 8)
        for parts in range(1, max_parts + 1)
        if F % rows == 0 and steps % parts == 0 and _height(rows)
    ]
    _, rows, parts = min(sizes)
    size, group = rows * STEP + chunk * terms * 2, 0 if whole else E // scale[1]
    s = Steps(code, chunk, rows // _height(rows), steps // parts, F // scale[0], group, rows)
    left = SMEM_BYTES - (CONSUMERS - s.groups) * ROWS * chunk * 4 - 2048
    left -= CONSUMERS * 4 * s.window.size * (1 + has_zero)

    def held(wide: int) -> int:
        """Steps that fit: a place is of the same warpgroups' steps for ever."""
        fit = min(config.stages, (left - s.spare * wide * STEP) // size)
        return fit - fit % s.turns

    at_once = held(s.turns) >= LEAST * s.turns and s.steps >= s.turns
    wide = s.turns if at_once else 1
    if not held(wide):
        return f"wants shared memory for a step of {size} bytes, has {left}"
    return _Static(s._replace(wide=wide, stages=held(wide) // wide), F // rows, parts)


def _height(rows: int) -> int:
    """Returns the rows of a warpgroup, of those of a block; 0 where they cannot be shared out."""
    for groups in (1, 2, 4):
        if rows % (8 * groups) == 0 and rows // groups <= ROWS:
            return rows // groups
    return 0


def quantized_matmul(
    x: Array, weight: Array, scale: Array, zero: Array | None = None, *, code: str,
    max_parts: int = 1, dtype: Any = None, config: TuningConfig = TuningConfig(),
) -> Array:  # fmt: skip
    """Returns x, [T, E], times the weights: [T, F] in `dtype`, that of x if None.

    With `max_parts` over 1, parts that are to be added up: [parts, T, F], in float32 as a rule.
    weight: [F, E] in 8 bits, or [F, E / 2] with two numbers a byte, the first in the low half, of
    int4 8 more than the number. scale: float32 [F / run, E / group], of runs of rows and of terms.
    zero: int8, the same shape: what is taken from a number first.

    Raises:
      ValueError: what `refuses` says.
    """
    if why := refuses(x, weight, scale, code, max_parts, config):
        raise ValueError(f"quantized_matmul {why}")
    (T, E), F = x.shape, weight.shape[0]
    s = _fit(T, E, F, scale.shape, code, max_parts, config, zero is not None)
    assert isinstance(s, _Static)
    shape, own = (T, F) if max_parts == 1 else (s.parts, T, F), s.steps
    layout = mosaic.tiled(STEP, 1), mosaic.tiled(TERMS, 2)
    zeros = () if zero is None else (zero,)
    return plgpu.kernel(
        functools.partial(_kernel, s, bool(zeros)),
        out_type=jax.ShapeDtypeStruct(shape, dtype or x.dtype),
        scratch_types=[
            # A warpgroup reads 64 rows: behind its own are those of another.
            plgpu.SMEM(
                (own.stages * own.place + own.spare, own.wide * STEP), weight.dtype,
                transforms=layout[0],
            ),
            plgpu.SMEM((own.stages, own.T, own.wide * own.terms), x.dtype, transforms=layout[1]),
            plgpu.SMEM((s.writers, ROWS, own.T) if s.writers else (1, 8, 8), jnp.float32),
            plgpu.SMEM((CONSUMERS, 1 + len(zeros), own.window.size), jnp.float32),
            plgpu.Barrier(num_arrivals=2, num_barriers=own.stages),
            plgpu.Barrier(num_arrivals=own.readers, num_barriers=own.stages),
            plgpu.Barrier(num_arrivals=max(s.writers, 1)),
        ],
        grid=(-(-T // own.T), s.parts, s.tiles), grid_names=("chunk", "part", "tile"),
        num_threads=CONSUMERS + 1, thread_name="wg",
        kernel_name="quantized_matmul", compiler_params=COMPILER,
    )(x, weight, scale, *zeros)  # fmt: skip


def _kernel(s: _Static, has_zero: bool, x: Ref, w: Ref, scale: Ref, *refs: Any) -> None:
    zero, (out, w_smem, x_smem, other, kept, full, free, told) = (
        (refs[0], refs[1:]) if has_zero else (None, refs)
    )
    wg, chunk, part, tile = (lax.axis_index(name) for name in ("wg", "chunk", "part", "tile"))
    groups, columns = s.steps.groups, s.steps.columns
    height = s.steps.place // groups

    @pl.when(wg < CONSUMERS)
    def _() -> None:
        plgpu.set_max_registers(REGISTERS[0], action="increase")
        group, turn = lax.rem(wg, groups), lax.div(wg, groups)
        first = (tile * groups + group) * height
        start = part * s.steps.steps
        own = Own(s.steps, group, turn, start, first, scale, zero, kept.at[wg])
        totals = sums(own, w_smem, x_smem, full, free)
        if s.writers:

            @pl.when(turn > 0)
            def _() -> None:
                for n, total in enumerate(totals):
                    put(other.at[wg - groups, :, pl.ds(n * columns, columns)], total)
                mosaic.barrier_arrive(told)

        @pl.when(turn == 0)
        def _() -> None:
            if s.writers:
                mosaic.barrier_wait(told)
            for n, y in enumerate(totals):
                for i in range(1, s.steps.turns):
                    at = other.at[group + (i - 1) * groups, :, pl.ds(n * columns, columns)]
                    y = y + mosaic.load(at, layout=plgpu.Layout.WGMMA, optimized=False)
                target = out if len(out.shape) == 2 else out.at[part]
                tokens = pl.ds(chunk * s.steps.T + n * columns, min(columns, target.shape[0]))
                put_transposed(y.astype(out.dtype), target.at[tokens, pl.ds(first, height)])

    @pl.when(wg == CONSUMERS)
    def _() -> None:
        plgpu.set_max_registers(REGISTERS[1], action="decrease")
        _fetch(s.steps, chunk, part, tile, x, w, w_smem, x_smem, full, free)


def _fetch(
    s: Steps, chunk: Array, part: Array, tile: Array, x: Ref, w: Ref, w_smem: Ref, x_smem: Ref,
    full: Barrier, free: Barrier,
) -> None:  # fmt: skip
    """Copies weights and tokens, some steps at a time."""
    start, total = part * s.steps, s.copies

    def wait(copy: Array) -> None:
        mosaic.barrier_wait(free.at[lax.rem(copy, s.stages)])

    def columns(copy: Index, each: int) -> Any:
        return pl.ds((start + copy * s.wide) * each, s.wide * each)

    def weights(copy: Index) -> None:
        slot = lax.rem(copy, s.stages)
        source = w.at[pl.ds(tile * s.place, s.place), columns(copy, STEP)]
        target = w_smem.at[pl.ds(slot * s.place, s.place)]
        mosaic.copy_gmem_to_smem(source, target, full.at[slot])

    def tokens(copy: Index) -> None:
        slot = lax.rem(copy, s.stages)
        source = x.at[pl.ds(chunk * s.T, s.T), columns(copy, s.terms)]
        mosaic.copy_gmem_to_smem(source, x_smem.at[slot], full.at[slot])

    ahead = min(s.stages, total)
    copies.begin(ahead, s.place * STEP * s.wide, weights, tokens)
    copies.each(ahead, total, wait, weights, tokens)
