"""The gated MLP of a layer for few tokens, as one kernel, on Hopper (Mosaic GPU).

Each block of the grid computes its share of the units, for all tokens; then all blocks meet, and
each computes a part of the outputs. One warpgroup copies weights and tokens into shared memory,
step by step of the sums, and goes on with the weights of the second product while the first one
ends and the blocks meet; the others compute 64 rows each, of which the tokens are the first.
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
from jaxrunner.kernels_pallas.mosaic import TOO_OLD, Barrier, Index, Ref, Shaped
from jaxrunner.kernels_pallas.products import copies, grid_barrier
from jaxrunner.kernels_pallas.products.matmul import (
    COMPILER,
    ROWS,
    STEP,
    activate,
    refuses_activation,
    sums,
)
from jaxrunner.kernels_pallas.stores import put_rows
from jaxrunner.types import Array

SMEM_BYTES = 225 * 1024  # of a block, less what barriers need
TOKENS = (*range(8, ROWS + 1, 8), 2 * ROWS)  # with more, two products are as fast
MAX_UNITS = 128, 64  # of a block, with up to 64 tokens and with 128: each block reads all tokens


@dataclass(frozen=True)
class TuningConfig:
    """Sizes that change speed alone."""

    num_ctas: int = 132  # at most, and no more than the device has multiprocessors: an H200's
    stages: int = 24  # steps that are in shared memory, fewer where they do not fit
    tiles: tuple[int, ...] = (128, 64, 32)  # outputs of a block; the first that keeps enough busy
    busy: float = 0.8  # of `num_ctas`, at least


class _Static(NamedTuple):
    """The compile-time parameters of the kernel."""

    T: int
    ctas: int
    units: int  # of a block
    first: int  # steps of the first product
    tile: int  # outputs of a block
    tiles: int
    parts: int  # of a sum of the second product
    second: int  # steps of a part
    stages: int
    activation: str

    @property
    def consumers(self) -> int:
        """Warpgroups that compute."""
        return -(-self.T // ROWS)

    @property
    def widest(self) -> int:
        """Outputs of the wider product of a block."""
        return max(2 * self.units, self.tile)


def refuses(
    x: Shaped, gate_up: Shaped, down: Shaped, activation: str = "silu",
    config: TuningConfig = TuningConfig(),
) -> str | None:  # fmt: skip
    """Says why x, [T, E], gate_up, [2, F, E], and down, [E, F], are not served, or None."""
    T, E = x.shape
    if reason := refuses_activation(activation):
        return reason
    if TOO_OLD is not None:
        return TOO_OLD
    if x.dtype not in (jnp.bfloat16, jnp.float16) or not gate_up.dtype == down.dtype == x.dtype:
        return f"wants one dtype, bfloat16 or float16, got {x.dtype}, {gate_up.dtype}, {down.dtype}"
    if T not in TOKENS:
        return f"wants 8, 16, 24, ... 64 or 128 tokens, got {T}"
    if gate_up.shape != (2, *down.shape[::-1]) or down.shape[0] != E:
        return f"wants weights of {E}, [2, F, E] and [E, F], got {gate_up.shape} and {down.shape}"
    fit = _fit(T, E, down.shape[1], activation, config)
    return fit if isinstance(fit, str) else None


def _fit(T: int, E: int, F: int, activation: str, config: TuningConfig) -> _Static | str:
    """Shares the work out, or says why it cannot."""
    # All blocks must be on the chip at once, or they never meet.
    most = min(config.num_ctas, grid_barrier.multiprocessors() or config.num_ctas)
    least = config.busy * most
    ctas = next((n for n in range(most, 0, -1) if F % (8 * n) == 0), 0)
    if ctas < least or E % STEP:
        return f"wants units that {least:.0f} to {most} blocks share in eights, got {F} of {E}"
    units, limit = F // ctas, MAX_UNITS[T > ROWS]
    if units > limit:
        return f"wants at most {limit} units a block of {T} tokens, got {units}"
    for tile in config.tiles:
        tiles, num = E // tile, [n for n in range(1, 9) if F % (n * STEP) == 0]
        parts = max((n for n in num if tiles * n <= ctas), default=0)
        if E % tile == 0 and tiles * parts >= least:
            first, second = E // STEP, F // (parts * STEP)
            size = 2 * STEP * (T + max(2 * units, tile))
            stages = min(config.stages, (SMEM_BYTES - 2 * STEP * ROWS) // size, first + second)
            return _Static(T, ctas, units, first, tile, tiles, parts, second, stages, activation)
    return f"wants outputs that {least:.0f} to {most} blocks can share in tiles, got {E}"


def gated_mlp(
    x: Array, gate_up: Array, down: Array, activation: str = "silu",
    config: TuningConfig = TuningConfig(),
) -> Array:  # fmt: skip
    """Returns parts whose sum is the gated MLP of x, [T, E]: [parts, T, E] in float32.

    gate_up is [2, F, E], down [E, F]; the units are rounded to the dtype of x. activation: of the
    gates, one of `matmul.ACTIVATIONS`. arXiv:2002.05202.

    Raises:
      ValueError: what `refuses` says.
    """
    if why := refuses(x, gate_up, down, activation, config):
        raise ValueError(f"gated_mlp {why}")
    (T, E), F = x.shape, down.shape[1]
    s = _fit(T, E, F, activation, config)
    assert isinstance(s, _Static)
    layout = mosaic.tiled(STEP, 2)
    units = jax.empty_ref(jax.ShapeDtypeStruct((T, F), x.dtype))
    out = jax.empty_ref(jax.ShapeDtypeStruct((s.parts, T, E), jnp.float32))
    # A product reads 64 rows: behind the tokens of a step are those of another.
    rows = (s.stages - 1) * T + max(T, ROWS)
    plgpu.kernel(
        functools.partial(_kernel, s),
        out_type=(),
        scratch_types=[
            plgpu.SMEM((rows, STEP), x.dtype, transforms=layout),
            plgpu.SMEM((s.stages, s.widest, STEP), x.dtype, transforms=layout),
            plgpu.Barrier(num_arrivals=3, num_barriers=s.stages),
            plgpu.Barrier(num_arrivals=s.consumers, num_barriers=s.stages),
            plgpu.Barrier(num_arrivals=s.consumers),
        ],
        grid=(s.ctas,), grid_names=("block",), num_threads=s.consumers + 1, thread_name="wg",
        kernel_name="gated_mlp", compiler_params=COMPILER,
    )(x, gate_up, down, jnp.zeros((1,), jnp.int32), units, out)  # fmt: skip
    return jax.freeze(out)


class _Ring(NamedTuple):
    """Steps in shared memory: tokens and weights, and barriers of those to be read and replaced."""

    s: _Static
    x: Ref
    w: Ref
    full: Barrier
    free: Barrier

    def slot(self, step: Index) -> Array:
        return lax.rem(step, self.s.stages)

    def copy_tokens(self, step: Index, source: Ref) -> None:
        slot, T = self.slot(step), self.s.T
        mosaic.copy_gmem_to_smem(source, self.x.at[pl.ds(slot * T, T)], self.full.at[slot])

    def copy_weights(self, step: Index, halves: list[Ref]) -> None:
        slot = self.slot(step)
        for i, half in enumerate(halves):
            target = self.w.at[slot, pl.ds(i * half.shape[0], half.shape[0])]
            mosaic.copy_gmem_to_smem(half, target, self.full.at[slot])

    def wait(self, step: Index) -> None:
        """Waits until what has the place of a step has been read."""
        mosaic.barrier_wait(self.free.at[self.slot(step)])

    def product(self, wg: Array, width: int, first: int, last: int) -> Array:
        """Returns the sum of some steps for the rows of a warpgroup, [ROWS, width]."""

        def operands(slot: Array) -> tuple[Ref, Ref]:
            rows = pl.ds(slot * self.s.T + wg * ROWS, ROWS)
            return self.x.at[rows], self.w.at[slot, pl.ds(0, width)]

        return sums(operands, width, first, last, self.s.stages, self.full, self.free)


def _kernel(
    s: _Static, x: Ref, gate_up: Ref, down: Ref, counter: Ref, units: Ref, out: Ref,
    x_smem: Ref, w_smem: Ref, full: Barrier, free: Barrier, told: Barrier,
) -> None:  # fmt: skip
    ring = _Ring(s, x_smem, w_smem, full, free)
    wg, block = lax.axis_index("wg"), lax.axis_index("block")

    @pl.when(wg < s.consumers)
    def _() -> None:
        _compute(ring, wg, block, counter, units, out, told)

    @pl.when(wg == s.consumers)
    def _() -> None:
        _fetch(ring, block, x, gate_up, down, counter, units, told)


def _fetch(
    ring: _Ring, block: Array, x: Ref, gate_up: Ref, down: Ref, counter: Ref, units: Ref,
    told: Barrier,
) -> None:  # fmt: skip
    """Copies the steps of the first product, then those of the second."""
    s = ring.s
    tile, part = lax.rem(block, s.tiles), jnp.minimum(lax.div(block, s.tiles), s.parts - 1)
    total, start = s.first + s.second, part * s.second - s.first

    def terms(step: Index) -> Any:
        return pl.ds(step * STEP, STEP)

    def first_weights(step: Index) -> None:
        mine = pl.ds(block * s.units, s.units)
        ring.copy_weights(step, [gate_up.at[i, mine, terms(step)] for i in range(2)])

    def second_weights(step: Index) -> None:
        half = s.tile // 2
        rows = [pl.ds(tile * s.tile + i * half, half) for i in range(2)]
        ring.copy_weights(step, [down.at[mine, terms(start + step)] for mine in rows])

    def first_tokens(step: Index) -> None:
        ring.copy_tokens(step, x.at[:, terms(step)])

    def second_tokens(step: Index) -> None:
        ring.copy_tokens(step, units.at[:, terms(start + step)])

    size = 2 * s.units * STEP * gate_up.dtype.itemsize
    copies.begin(min(s.stages, s.first), size, first_weights, first_tokens)
    copies.each(s.first, s.stages, second_weights)
    copies.each(s.stages, s.first, ring.wait, first_weights, first_tokens)
    ahead = min(s.first + s.stages, total)
    copies.each(max(s.first, s.stages), ahead, ring.wait, second_weights)
    mosaic.barrier_wait(told)
    grid_barrier.wait(counter)
    copies.each(s.first, ahead, second_tokens)
    copies.each(ahead, total, ring.wait, second_weights, second_tokens)


def _compute(
    ring: _Ring, wg: Array, block: Array, counter: Ref, units: Ref, out: Ref, told: Barrier
) -> None:
    """Sums up both products."""
    s = ring.s
    mine = pl.ds(wg * ROWS, min(s.T, ROWS))
    y = activate(ring.product(wg, 2 * s.units, 0, s.first), s.activation)
    put_rows(y.astype(units.dtype), units.at[mine, pl.ds(block * s.units, s.units)])
    grid_barrier.arrive(counter, s.ctas * s.consumers)
    mosaic.barrier_arrive(told)
    y = ring.product(wg, s.tile, s.first, s.first + s.second)
    tile, part = lax.rem(block, s.tiles), lax.div(block, s.tiles)

    @pl.when(part < s.parts)
    def _() -> None:
        put_rows(y, out.at[part, mine, pl.ds(tile * s.tile, s.tile)])
