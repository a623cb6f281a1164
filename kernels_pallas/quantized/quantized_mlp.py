"""The gated MLP of a layer with weights of 8 or 4 bits for few tokens, as one kernel (Hopper).

What `gated_mlp` is for floats: each block of the grid computes its share of the units, for all
tokens; then all blocks meet, and each computes a part of the outputs. One warpgroup copies weights
as they are stored, and goes on with those of the second product while the first one ends and the
blocks meet; four others widen them in registers and multiply (`quantized_steps`).
Weights are on their way before the kernel that makes the tokens has ended, so it must not be that
kernel which makes the weights.
"""

from dataclasses import dataclass
import functools
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from jaxrunner.kernels_pallas import mosaic
from jaxrunner.kernels_pallas.mosaic import Barrier, Index, Ref, Shaped
from jaxrunner.kernels_pallas.products import copies, grid_barrier
from jaxrunner.kernels_pallas.products.gated_mlp import SMEM_BYTES
from jaxrunner.kernels_pallas.products.matmul import COMPILER, ROWS
from jaxrunner.kernels_pallas.quantized import widen
from jaxrunner.kernels_pallas.quantized.quantized_matmul import refuses_numbers
from jaxrunner.kernels_pallas.quantized.quantized_steps import (
    CONSUMERS,
    REGISTERS,
    STEP,
    Own,
    Steps,
    put_units,
    sums,
    unlike,
)
from jaxrunner.kernels_pallas.quantized.widen import TERMS
from jaxrunner.kernels_pallas.stores import put_transposed
from jaxrunner.types import Array

TOKENS = 1, 8, 16, 24, 32
TILE = CONSUMERS * ROWS  # outputs of a block
MAX_UNITS = TILE // 2  # of a block
COPIES = 3  # of a step: two of weights, one of tokens


@dataclass(frozen=True)
class TuningConfig:
    """Sizes that change speed alone."""

    num_ctas: int = 132  # at most, and no more than the device has multiprocessors: an H200's
    stages: int = 16  # steps that are in shared memory, fewer where they do not fit
    least: int = 4  # of them: with fewer, two products are as fast
    busy: float = 0.8  # of `num_ctas`, at least


class Few(NamedTuple):
    """Weights of a product: [rows, E] in 8 bits or [rows, E / 2], and scales, as `Steps` has."""

    weight: Shaped
    scale: Shaped


class _Static(NamedTuple):
    """The compile-time parameters of the kernel."""

    ctas: int
    first: Steps
    second: Steps
    tiles: int  # of outputs
    parts: int  # of a sum of the second product


def refuses(
    x: Shaped, gate_up: Few, down: Few, code: str, config: TuningConfig = TuningConfig()
) -> str | None:
    """Says why x, [T, E], gate_up, of [2 * F, E] numbers, and down, of [E, F], are not served."""
    for w in gate_up, down:
        if reason := refuses_numbers(x, w.scale, code, widen.PAIRS):
            return reason
    if x.shape[0] not in TOKENS:
        return f"wants {TOKENS} tokens, got {x.shape[0]}"
    (T, E), F, packed = x.shape, gate_up.weight.shape[0] // 2, widen.PACKED[code]
    if (down.weight.shape[0], down.weight.shape[1] * packed) != (E, F):
        shapes = gate_up.weight.shape, down.weight.shape
        return f"wants weights of {E}, [2 * F, E] and [E, F], got {shapes}"
    fit = _fit(T, E, F, gate_up.scale.shape, down.scale.shape, code, config)
    return fit if isinstance(fit, str) else None


def _fit(
    T: int, E: int, F: int, first: tuple[int, ...], second: tuple[int, ...], code: str,
    config: TuningConfig,
) -> _Static | str:  # fmt: skip
    """Shares the work out, or says why it cannot."""
    for reason in unlike(E, 2 * F, first, code), unlike(F, E, second, code):
        if reason:
            return reason
    # All blocks must be on the chip at once, or they never meet.
    most = min(config.num_ctas, grid_barrier.multiprocessors() or config.num_ctas)
    ctas = next((n for n in range(most, 0, -1) if F % (8 * n) == 0), 0)
    terms, least = STEP * widen.PACKED[code], config.busy * most
    if ctas < least or F // ctas > MAX_UNITS:
        return f"wants units that {least:.0f} to {most} blocks share, {MAX_UNITS} each, got {F}"
    tiles = E // TILE
    parts = max((n for n in range(1, 9) if F % (n * terms) == 0 and tiles * n <= ctas), default=0)
    if E % TILE or tiles * parts < least:
        return f"wants outputs that {least:.0f} to {most} blocks share in tiles of {TILE}, got {E}"
    units, chunk = F // ctas, max(8, T)
    groups = [0 if n == 1 else of // n for n, of in ((first[1], E), (second[1], F))]
    steps = [
        Steps(code, chunk, CONSUMERS, E // terms, 2 * F // first[0], groups[0], TILE, F, units),
        Steps(code, chunk, CONSUMERS, F // (parts * terms), E // second[0], groups[1], TILE),
    ]
    size = TILE * STEP + chunk * terms * 2
    left = SMEM_BYTES - 2048 - CONSUMERS * 4 * max(s.window.size for s in steps)
    stages = min(config.stages, left // size, sum(s.steps for s in steps))
    if stages < config.least:
        return f"wants shared memory for {config.least} steps of {size} bytes, has {left}"
    one, other = (s._replace(stages=stages) for s in steps)
    return _Static(ctas, one, other, tiles, parts)


def quantized_mlp(
    x: Array, gate_up: Few, down: Few, *, code: str, config: TuningConfig = TuningConfig()
) -> Array:
    """Returns parts whose sum is the gated MLP of x, [T, E]: [parts, T, E] in float32.

    gate_up is of [2 * F, E] numbers, gates first, down of [E, F]; the units are rounded to the
    dtype of x. arXiv:2002.05202.

    Raises:
      ValueError: what `refuses` says.
    """
    if why := refuses(x, gate_up, down, code, config):
        raise ValueError(f"quantized_mlp {why}")
    (T, E), F = x.shape, gate_up.weight.shape[0] // 2
    s = _fit(T, E, F, gate_up.scale.shape, down.scale.shape, code, config)
    assert isinstance(s, _Static)
    stages, chunk, terms = s.first.stages, s.first.T, s.first.terms
    layout = mosaic.tiled(STEP, 1), mosaic.tiled(TERMS, 2)
    units = jax.empty_ref(jax.ShapeDtypeStruct((T, F), x.dtype))
    out = jax.empty_ref(jax.ShapeDtypeStruct((s.parts, T, E), jnp.float32))
    plgpu.kernel(
        functools.partial(_kernel, s),
        out_type=(),
        scratch_types=[
            plgpu.SMEM((stages * TILE, STEP), gate_up.weight.dtype, transforms=layout[0]),
            plgpu.SMEM((stages, chunk, terms), x.dtype, transforms=layout[1]),
            plgpu.SMEM(
                (CONSUMERS, 1, max(s.first.window.size, s.second.window.size)), jnp.float32
            ),
            plgpu.Barrier(num_arrivals=COPIES, num_barriers=stages),
            plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=stages),
            plgpu.Barrier(num_arrivals=CONSUMERS),
        ],
        grid=(s.ctas,), grid_names=("block",), num_threads=CONSUMERS + 1, thread_name="wg",
        kernel_name="quantized_mlp", compiler_params=COMPILER,
    )(x, *gate_up, *down, jnp.zeros((1,), jnp.int32), units, out)  # fmt: skip
    return jax.freeze(out)


class _Given(NamedTuple):
    """The references that the kernel reads and writes."""

    x: Ref
    gate_up: Ref
    gate_up_scale: Ref
    down: Ref
    down_scale: Ref
    counter: Ref
    units: Ref
    out: Ref


class _Ring(NamedTuple):
    """Steps in shared memory, and barriers of those to be read and replaced."""

    w: Ref
    x: Ref
    kept: Ref
    full: Barrier
    free: Barrier
    told: Barrier


def _kernel(s: _Static, *refs: Any) -> None:
    given, ring = _Given(*refs[:8]), _Ring(*refs[8:])
    wg, block = lax.axis_index("wg"), lax.axis_index("block")
    tile, part = lax.rem(block, s.tiles), jnp.minimum(lax.div(block, s.tiles), s.parts - 1)

    @pl.when(wg < CONSUMERS)
    def _() -> None:
        plgpu.set_max_registers(REGISTERS[0], action="increase")
        _compute(s, wg, block, tile, part, given, ring)

    @pl.when(wg == CONSUMERS)
    def _() -> None:
        plgpu.set_max_registers(REGISTERS[1], action="decrease")
        _fetch(s, block, tile, part, given, ring)


def _fetch(s: _Static, block: Array, tile: Array, part: Array, given: _Given, ring: _Ring) -> None:
    """Copies the steps of the first product, then those of the second."""
    stages, first, terms, T = s.first.stages, s.first.steps, s.first.terms, s.first.T
    total, start = first + s.second.steps, part * s.second.steps - first
    F, units = s.first.gap, s.first.units

    def slot(step: Index) -> Array:
        return lax.rem(step, stages)

    def weights(step: Index, source: Ref, rows: list[Index], num: int, column: Index) -> None:
        for i, row in enumerate(rows):
            target = ring.w.at[pl.ds(slot(step) * TILE + i * num, num)]
            mine = source.at[pl.ds(row, num), pl.ds(column * STEP, STEP)]
            mosaic.copy_gmem_to_smem(mine, target, ring.full.at[slot(step)])

    def first_weights(step: Index) -> None:
        mine = block * units
        weights(step, given.gate_up, [mine, F + mine], units, step)

    def second_weights(step: Index) -> None:
        mine, half = tile * TILE, TILE // 2
        weights(step, given.down, [mine, mine + half], half, start + step)

    # Fewer tokens than T are copied with zeros behind them; JAX would refuse so many rows from a
    # number that it knows.
    none = block * 0

    def tokens(step: Index, source: Ref, column: Index) -> None:
        mine = source.at[pl.ds(none, T), pl.ds(column * terms, terms)]
        mosaic.copy_gmem_to_smem(mine, ring.x.at[slot(step)], ring.full.at[slot(step)])

    def first_tokens(step: Index) -> None:
        tokens(step, given.x, step)

    def second_tokens(step: Index) -> None:
        tokens(step, given.units, start + step)

    def wait(step: Index) -> None:
        mosaic.barrier_wait(ring.free.at[slot(step)])

    copies.begin(min(stages, first), 2 * units * STEP, first_weights, first_tokens)
    copies.each(first, stages, second_weights)
    copies.each(stages, first, wait, first_weights, first_tokens)
    ahead = min(first + stages, total)
    copies.each(max(first, stages), ahead, wait, second_weights)
    mosaic.barrier_wait(ring.told)
    grid_barrier.wait(given.counter)
    copies.each(first, ahead, second_tokens)
    copies.each(ahead, total, wait, second_weights, second_tokens)


def _compute(
    s: _Static, wg: Array, block: Array, tile: Array, part: Array, given: _Given, ring: _Ring
) -> None:
    """Sums up both products."""
    kept, turn, columns = ring.kept.at[wg], jnp.int32(0), s.first.columns
    mine, T = block * s.first.units, given.units.shape[0]
    start = part * s.second.steps
    own = Own(
        s.first, wg, turn, 0, mine + wg * (ROWS // 2), given.gate_up_scale, None, kept
    )  # fmt: skip
    totals = sums(own, ring.w, ring.x, ring.full, ring.free)
    for n, total in enumerate(totals):
        tokens = pl.ds(n * columns, min(columns, T))
        units = given.units.at[tokens, pl.ds(mine, s.first.units)]
        put_units(total, units, wg * (ROWS // 2))
    grid_barrier.arrive(given.counter, s.ctas * CONSUMERS)
    mosaic.barrier_arrive(ring.told)
    outputs = tile * TILE + wg * ROWS
    own = Own(s.second, wg, turn, start, outputs, given.down_scale, None, kept)
    totals = sums(own, ring.w, ring.x, ring.full, ring.free, s.first.steps)

    @pl.when(block < s.tiles * s.parts)
    def _() -> None:
        for n, total in enumerate(totals):
            tokens = pl.ds(n * columns, min(columns, T))
            put_transposed(total, given.out.at[part, tokens, pl.ds(outputs, ROWS)])
