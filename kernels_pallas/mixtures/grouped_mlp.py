"""The gated MLPs of a mixture, each for the tokens that are sent to it, on Hopper (Mosaic GPU).

Few tokens are sent to one expert, so weights are the tall operand of a product, and its tokens the
narrow one. A block of the grid takes 128 rows of weights for each warpgroup that computes, of one
tile of tokens after another; the gate and the up projection meet in registers. Then all blocks
meet, and share the second products out, whose weights are on their way by then. What these give is
weighed and left by route: the norm that follows sums the experts of a token up, always in one
order. Weights are copied step by step of a sum by one warpgroup, as in `gated_mlp`.
"""

from collections.abc import Callable
from dataclasses import dataclass
import functools
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from jaxrunner.kernels_pallas import mosaic
from jaxrunner.kernels_pallas.mixtures import expert_tile
from jaxrunner.kernels_pallas.mixtures.expert_tile import ACTIVATIONS, activate, by_token
from jaxrunner.kernels_pallas.mixtures.group_tokens import LEAST, Groups
from jaxrunner.kernels_pallas.mosaic import TOO_OLD, Barrier, Index, Ref, Shaped
from jaxrunner.kernels_pallas.products import copies, grid_barrier
from jaxrunner.kernels_pallas.products.gated_mlp import SMEM_BYTES
from jaxrunner.kernels_pallas.products.matmul import COMPILER, ROWS, STEP
from jaxrunner.kernels_pallas.stores import put_columns, put_routed
from jaxrunner.types import Array

POWERS = (LEAST, 16, 32, 64, 128)
TILES = tuple(sorted((*POWERS, 80)))  # rows of a tile of tokens
REGISTERS = 232, 40  # of a thread that computes, and of one that copies, where two warpgroups do
HELD = 32  # rows of a tile whose routes stay in registers during a product


@dataclass(frozen=True)
class TuningConfig:
    """Sizes that change speed alone."""

    consumers: int = 1  # warpgroups that compute
    stages: int = 16  # steps that are in shared memory, fewer where they do not fit
    num_ctas: int = 132  # no more than the device has multiprocessors: an H200's
    dtype: str = "float32"  # of what each expert gives

    def fit(self, tile: int) -> int:
        """Returns the steps that are in shared memory."""
        return min(self.stages, SMEM_BYTES // (2 * STEP * (2 * ROWS * self.consumers + tile)))


class _Phase(NamedTuple):
    """The first or the second products: an expert has `blocks` pieces of work for a tile."""

    blocks: int
    height: int  # rows of an expert's weights
    step: int  # rows from one piece of work to the next
    gap: int  # rows from the first half of a piece of work to the other
    steps: int  # of a sum
    pitch: int  # rows from the tokens of one tile to those of the next

    def rounds(self, s: "_Static", block: Array, count: Ref) -> Array:
        """Returns how many pieces of work a block of the grid has."""
        return lax.div(count[0] * self.blocks - block + s.ctas - 1, s.ctas)

    def item(self, s: "_Static", block: Array, turn: Array) -> tuple[Array, Array]:
        """Returns the tile and the number among its own of a piece of work."""
        number = block + turn * s.ctas
        return lax.div(number, self.blocks), lax.rem(number, self.blocks)


class _Static(NamedTuple):
    """The compile-time parameters of the kernel."""

    first: _Phase
    second: _Phase
    tile: int
    stages: int
    ctas: int
    consumers: int
    activation: str
    is_one: bool  # whether there is one token

    @property
    def size(self) -> int:
        """Rows of half a piece of work."""
        return ROWS * self.consumers


def refuses(
    x: Shaped, gate_up: Shaped, down: Shaped, tile: int, config: TuningConfig = TuningConfig(),
    activation: str = "swiglu",
) -> str | None:  # fmt: skip
    """Says why x, [n, E], gate_up, [X, 2, F, E], and down, [X, E, F], are not served, or None."""
    E, F = x.shape[1], gate_up.shape[2]
    if TOO_OLD is not None:
        return TOO_OLD
    if x.dtype not in (jnp.bfloat16, jnp.float16) or not gate_up.dtype == down.dtype == x.dtype:
        return f"wants one dtype, bfloat16 or float16, got {x.dtype}, {gate_up.dtype}, {down.dtype}"
    if gate_up.shape[3] != E or down.shape != (gate_up.shape[0], E, F):
        return (
            f"wants weights of {E}, [X, 2, F, E] and [X, E, F], got {gate_up.shape}, {down.shape}"
        )
    rows = ROWS * config.consumers
    if F % rows or E % rows:
        return f"wants units and tokens of a multiple of {rows}, got {F} and {E}"
    if activation not in ACTIVATIONS:
        return f"wants one of {ACTIVATIONS}, got {activation}"
    if tile not in TILES:
        return f"wants tiles of {TILES} rows, got {tile}"
    return None


def grouped_mlp(
    groups: Groups, gate_up: Array, down: Array, shape: tuple[int, int],
    biases: tuple[Array, Array] | None = None, *, activation: str = "swiglu",
    config: TuningConfig = TuningConfig(),
) -> Array:  # fmt: skip
    """Returns what each expert of a token gives, weighed: [k, T, E] in `config.dtype`.

    gate_up: [X, 2, F, E]; down: [X, E, F]; shape: T and k; biases: [X, 2, F] and [X, E];
    activation: of `expert_tile.ACTIVATIONS`. The units are rounded to the dtype of the tokens. What
    is of no expert is anything. arXiv:2002.05202.

    Raises:
      ValueError: what `refuses` says.
    """
    if why := refuses(groups.x, gate_up, down, groups.tile, config, activation):
        raise ValueError(f"grouped_mlp {why}")
    (T, k), (_, E, F), tile = shape, down.shape, groups.tile
    size, stages, dtype = ROWS * config.consumers, config.fit(groups.tile), groups.x.dtype
    s = _Static(
        _Phase(F // size, 2 * F, size, F, E // STEP, 0 if groups.is_one else tile),
        _Phase(-(-E // (2 * size)), E, 2 * size, size, F // STEP, tile),
        tile, stages, config.num_ctas, config.consumers, activation, groups.is_one,
    )  # fmt: skip
    layout = mosaic.tiled(STEP, 2)
    units = jax.empty_ref(jax.ShapeDtypeStruct((groups.expert.shape[0] * tile, F), dtype))
    out = jax.empty_ref(jax.ShapeDtypeStruct((k, T, E), jnp.dtype(config.dtype)))
    plgpu.kernel(
        functools.partial(_kernel, s),
        out_type=(),
        scratch_types=[
            plgpu.SMEM((stages, tile, STEP), dtype, transforms=layout),
            plgpu.SMEM((stages, 2, size, STEP), dtype, transforms=layout),
            plgpu.Barrier(num_arrivals=3, num_barriers=stages),
            plgpu.Barrier(num_arrivals=config.consumers, num_barriers=stages),
            plgpu.Barrier(num_arrivals=config.consumers),
        ],
        grid=(s.ctas,), grid_names=("block",), num_threads=config.consumers + 1, thread_name="wg",
        kernel_name="grouped_mlp", compiler_params=COMPILER,
    )(
        groups.x, gate_up.reshape(-1, E), down.reshape(-1, F), groups.expert, groups.rows,
        groups.num_tiles, groups.route, groups.weight, jnp.zeros((1,), jnp.int32), units, out,
        *(bias.reshape(-1, 1) for bias in biases or ()),
    )  # fmt: skip
    return jax.freeze(out)


class _Ring(NamedTuple):
    """Steps in shared memory: tokens and weights, and barriers of those to be read and replaced."""

    s: _Static
    block: Array
    expert: Ref
    x: Ref
    w: Ref
    full: Barrier
    free: Barrier

    def copies(
        self, phase: _Phase, start: Index, x: Ref, w: Ref
    ) -> tuple[Callable[[Array], None], Callable[[Array], None]]:
        """Returns what copies the weights, and what the tokens, of a step behind `start`."""

        def at(step: Array) -> tuple[Array, Array, Any, Array]:
            turn, terms = lax.div(step - start, phase.steps), lax.rem(step - start, phase.steps)
            item = phase.item(self.s, self.block, turn)
            return *item, pl.ds(terms * STEP, STEP), lax.rem(step, self.s.stages)

        def weights(step: Array) -> None:
            tile, part, terms, slot = at(step)
            first = self.expert[tile] * phase.height + part * phase.step
            for i in range(2):
                rows = pl.ds(first + i * phase.gap, self.s.size)
                mosaic.copy_gmem_to_smem(w.at[rows, terms], self.w.at[slot, i], self.full.at[slot])

        def tokens(step: Array) -> None:
            tile, _, terms, slot = at(step)
            rows = pl.ds(tile * phase.pitch, self.s.tile)  # zeros behind the last one
            mosaic.copy_gmem_to_smem(x.at[rows, terms], self.x.at[slot], self.full.at[slot])

        return weights, tokens

    def wait(self, step: Array) -> None:
        """Waits until what has the place of a step has been read."""

        @pl.when(step >= self.s.stages)
        def _() -> None:
            mosaic.barrier_wait(self.free.at[lax.rem(step, self.s.stages)])

    def products(self, wg: Array, first: Array, last: Array) -> tuple[Array, Array]:
        """Returns the sums of both halves of a piece of work for 64 of its rows, [64, tile]."""
        s, mine = self.s, pl.ds(wg * ROWS, ROWS)

        def multiply(*halves: Ref) -> tuple[Array, Array]:
            def body(step: Array, _: None) -> None:
                slot = lax.rem(step, s.stages)
                mosaic.barrier_wait(self.full.at[slot])
                for i, acc in enumerate(halves):
                    mosaic.wgmma(acc, self.w.at[slot, i, mine], self.x.at[slot].T)
                plgpu.wgmma_wait(2)

                @pl.when(step > first)
                def _() -> None:
                    mosaic.barrier_arrive(self.free.at[lax.rem(step - 1, s.stages)])

                return _

            lax.fori_loop(first, last, body, None)
            found = halves[0][...], halves[1][...]
            mosaic.barrier_arrive(self.free.at[lax.rem(last - 1, s.stages)])
            return found

        acc = mosaic.ACC((ROWS, s.tile), jnp.float32)
        return pl.run_scoped(multiply, acc, acc)


def _kernel(
    s: _Static, x: Ref, gate_up: Ref, down: Ref, expert: Ref, rows: Ref, count: Ref, route: Ref,
    weight: Ref, counter: Ref, units: Ref, out: Ref, *refs: Any,
) -> None:  # fmt: skip
    *biases, x_smem, w_smem, full, free, told = refs
    wg, block = lax.axis_index("wg"), lax.axis_index("block")
    ring = _Ring(s, block, expert, x_smem, w_smem, full, free)
    plgpu.griddepcontrol_wait()

    @pl.when(wg < s.consumers)
    def _() -> None:
        if s.consumers > 1:
            plgpu.set_max_registers(REGISTERS[0], action="increase")
        _compute(ring, wg, rows, count, route, weight, counter, units, out, told, *biases)

    @pl.when(wg == s.consumers)
    def _() -> None:
        if s.consumers > 1:
            plgpu.set_max_registers(REGISTERS[1], action="decrease")
        plgpu.griddepcontrol_launch_dependents()
        _fetch(ring, x, gate_up, down, count, counter, units, told)


def _fetch(
    ring: _Ring, x: Ref, gate_up: Ref, down: Ref, count: Ref, counter: Ref, units: Ref,
    told: Barrier,
) -> None:  # fmt: skip
    """Copies the steps of the first products, then those of the second ones."""
    s = ring.s
    half = s.first.rounds(s, ring.block, count) * s.first.steps
    total = half + s.second.rounds(s, ring.block, count) * s.second.steps
    ahead = jnp.minimum(half + s.stages, total)
    weights, tokens = ring.copies(s.first, 0, x, gate_up)
    copies.each(0, half, ring.wait, weights, tokens)
    weights, tokens = ring.copies(s.second, half, units, down)
    copies.each(half, ahead, ring.wait, weights)
    mosaic.barrier_wait(told)
    grid_barrier.wait(counter)
    copies.each(half, ahead, tokens)
    copies.each(ahead, total, ring.wait, weights, tokens)


def _compute(
    ring: _Ring, wg: Array, rows: Ref, count: Ref, route: Ref, weight: Ref, counter: Ref,
    units: Ref, out: Ref, told: Barrier, *biases: Ref,
) -> None:  # fmt: skip
    """Sums up both products."""
    s, mine = ring.s, wg * ROWS

    def with_bias(y: Array, which: int, tile: Array, height: int, row: Array) -> Array:
        if not biases:
            return y
        expert = jnp.minimum(ring.expert[tile], biases[which].shape[0] // height - 1)
        return y + expert_tile.biases(biases[which], expert * height + row, s.tile)

    rounds, E = s.first.rounds(s, ring.block, count), s.second.height
    half = rounds * s.first.steps

    def columns(tile: Array) -> tuple[Array, Array]:
        if s.is_one:
            route_of_all = jnp.full((ROWS, s.tile), tile, jnp.int32)
            return plgpu.layout_cast(route_of_all, plgpu.Layout.WGMMA), weight[tile]
        return by_token(route, tile, s.tile), by_token(weight, tile, s.tile)

    def one(turn: Array, _: None) -> None:
        tile, part = s.first.item(s, ring.block, turn)
        num = rows[tile]
        gate, up = ring.products(wg, turn * s.first.steps, (turn + 1) * s.first.steps)
        row = part * s.size + mine
        gate = with_bias(gate, 0, tile, s.first.height, row)
        up = with_bias(up, 0, tile, s.first.height, row + s.first.gap)
        y = activate(gate, up, s.activation).astype(units.dtype)
        at = pl.ds(tile * s.tile, s.tile), pl.ds(row, ROWS)
        put_columns(y, units.at[at], num)
        return _

    def two(turn: Array, _: None) -> None:
        tile, part = s.second.item(s, ring.block, turn)
        num, first = rows[tile], half + turn * s.second.steps

        # Before the products, which take longer; registers are few where tiles are large.
        early = s.tile <= HELD and columns(tile)
        found = ring.products(wg, first, first + s.second.steps)
        routes, weights = early or columns(tile)
        for i, y in enumerate(found):
            start = part * s.second.step + i * s.second.gap + mine
            y = with_bias(y, 1, tile, E, start)
            write = functools.partial(
                put_routed, (y * weights).astype(out.dtype), routes, out, num, start
            )
            # The last piece of work has one half where outputs are an odd number of halves.
            pl.when(start < E)(write) if E % s.second.step else write()
        return _

    lax.fori_loop(0, rounds, one, None)
    grid_barrier.arrive(counter, s.ctas * s.consumers)
    mosaic.barrier_arrive(told)
    lax.fori_loop(0, s.second.rounds(s, ring.block, count), two, None)
