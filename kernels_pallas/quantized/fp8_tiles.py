"""Sums of products of fp8 with fp8 whose blocks have scales, tile by tile, on Hopper (Mosaic GPU).

Tensor cores sum 128 terms of fp8 up with some 14 bits; each of these sums is multiplied with the
scale of its token and that of its block of weights, and added to others in float32. A block of the
grid takes one tile after another, of 128 tokens and of 128 outputs, of twice as many, or of 128
gates and what they gate: one warpgroup copies, two compute 64 tokens each, so that one multiplies
while the other adds. The two blocks of a cluster have tiles beside each other and share the weights
of both, or the tokens. Neighbours in time share weights or tokens in the L2 cache.
DeepSeek-V3, arXiv:2412.19437.
"""

from collections.abc import Callable
from dataclasses import dataclass
import functools
import itertools
import math
from typing import Any, NamedTuple

from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np

from jaxrunner.kernels_pallas import mosaic
from jaxrunner.kernels_pallas.mosaic import TOO_OLD, Barrier, Index, Ref, Shaped
from jaxrunner.kernels_pallas.products import copies
from jaxrunner.kernels_pallas.products.gated_mlp import SMEM_BYTES
from jaxrunner.kernels_pallas.products.matmul import ROWS
from jaxrunner.kernels_pallas.registers import OWN_REGISTERS
from jaxrunner.types import Array

TILE = 128  # outputs of a tile
TERMS = 128  # that share a scale
GROUPS = 2  # warpgroups that compute
HEIGHT = GROUPS * ROWS  # tokens of a tile
# Of threads that compute and of those that copy. With fewer for either, `fp8_gates` has numbers in
# memory.
REGISTERS = 216, 72
WINDOW = 8  # steps whose scales are copied at once, more than there are stages; fewer end a tile
WINDOWS = 3  # in shared memory: one is read, a short one may follow, and the next is on its way
LINE = 32  # scales of weights that are copied at once: 128 bytes are the fewest
ALIGNED = 4  # scales in 16 bytes: no copy may begin elsewhere
E4M3 = jnp.float8_e4m3fn


@dataclass(frozen=True)
class TuningConfig:
    """Sizes that change speed alone, but for the order of a sum in parts."""

    num_ctas: int = 132  # at most: an H200's
    stages: int = 6  # steps that are in shared memory
    together: int = 8  # tiles of tokens that are taken for one tile of outputs after another
    cluster: int = 2  # blocks that share weights or tokens, where their tiles can be halved
    parts: int = 1  # of a sum
    halves: int = 0  # 2 where `fp8_blocks` has two tiles at once; 0: as many as are done first
    width: int = 0  # outputs of a product; 0: as many as registers hold beside the sums


DEFAULT = TuningConfig()


class Item(NamedTuple):
    """A tile, and the part of its sum."""

    tokens: Array
    outputs: Array
    part: Array


class Tiles(NamedTuple):
    """The compile-time parameters of a kernel."""

    tokens: int  # tiles
    outputs: int  # tiles, or pairs of them
    steps: int  # of a part
    run: int  # tiles of outputs that share a scale
    stages: int
    clusters: int
    together: int  # tiles of tokens, or pairs of them
    parts: int
    cluster: int  # blocks
    of_tokens: bool  # its blocks have tiles of tokens beside each other, and share weights
    halves: int  # 2 where a block has two tiles of outputs at once
    gap: int  # tiles from one to the other: to the next, or from gates to what they gate
    width: int  # outputs of a product

    @property
    def wide(self) -> tuple[int, int]:
        """Tiles of tokens and of outputs, or pairs of them, that clusters take."""
        across = self.cluster if self.of_tokens else 1
        return self.tokens // across, self.outputs // (self.cluster // across)

    @property
    def items(self) -> int:
        """Pieces of work of all clusters."""
        return math.prod(self.wide) * self.parts

    def item(self, team: Array, peer: Index, turn: Array) -> Item:
        """Returns a block's share of a piece of its cluster's work."""
        tokens, outputs = self.wide
        number, size = team + turn * self.clusters, self.together * outputs
        part, number = lax.div(number, tokens * outputs), lax.rem(number, tokens * outputs)
        first, rest = lax.div(number, size) * self.together, lax.rem(number, size)
        together = jnp.minimum(tokens - first, self.together)
        one, other = first + lax.rem(rest, together), lax.div(rest, together)
        if self.of_tokens:
            return Item(one * self.cluster + peer, other, part)
        return Item(one, other * self.cluster + peer, part)

    def place(self, at: Item, half: int) -> Array:
        """Returns which tile of the outputs one of a block's two is."""
        return at.outputs * (self.halves if self.gap == 1 else 1) + half * self.gap

    def window(self, step: Index) -> Index:
        """Returns which window of scales a step of a block is in."""
        turn, rest = lax.div(step, self.steps), lax.rem(step, self.steps)
        return turn * -(-self.steps // WINDOW) + lax.div(rest, WINDOW)

    def rounds(self, team: Array) -> Array:
        """Returns how many pieces of work a cluster has."""
        return lax.div(self.items - team + self.clusters - 1, self.clusters)


class Held(NamedTuple):
    """What lies in shared memory."""

    x_smem: Ref  # [stages, HEIGHT, TERMS]
    w_smem: Ref  # [stages, halves * TILE, TERMS]
    own: Ref  # [WINDOWS, WINDOW, HEIGHT]: scales of tokens
    shared: Ref  # [WINDOWS, halves, LINE]: of weights
    full: Barrier
    free: Barrier
    told: Barrier  # that scales are there


def refuses(x: Shaped, x_scale: Shaped, weight: Shaped, scale: Shaped) -> str | None:
    """Says why x, [T, E], x_scale, [E / 128, T or more], weight, [F, E], and scale, [F / run,
    E / 128], are not served, or None."""
    (T, E), F = x.shape, weight.shape[0]
    if TOO_OLD is not None:
        return TOO_OLD
    if x.dtype != E4M3 or weight.dtype != E4M3:
        return f"wants tokens and weights in float8_e4m3fn, got {x.dtype} and {weight.dtype}"
    if x_scale.dtype != jnp.float32 or scale.dtype != jnp.float32:
        return f"wants scales in float32, got {x_scale.dtype} and {scale.dtype}"
    if E % TERMS or F % TILE:
        return f"wants sums of a multiple of {TERMS} terms and outputs of {TILE}, got {E} and {F}"
    if T % 8:
        return f"wants tokens in multiples of 8, got {T}"
    if x_scale.shape[0] != E // TERMS or scale.shape[1] != E // TERMS:
        return f"wants a scale for {TERMS} terms, got {x_scale.shape} and {scale.shape}"
    if x_scale.shape[1] < T or x_scale.shape[1] % ALIGNED:
        return f"wants scales of {T} tokens, or more in fours, got {x_scale.shape}"
    if F % scale.shape[0] or F // scale.shape[0] % TILE:
        return f"wants a scale for a multiple of {TILE} outputs, got {scale.shape[0]} for {F}"
    return None


def padded(scale: Array) -> Array:
    """Returns scales of weights, [rows, E / 128], in rows that copies may begin in."""
    return jnp.pad(scale, ((0, 0), (0, -scale.shape[1] % ALIGNED)))


def fit(
    T: int, E: int, F: int, run: int, size: int, c: TuningConfig, halves: int = 1, gap: int = 1
) -> Tiles:
    """Shares the work out. F: outputs of a half; run: those that share a scale; size: bytes of a
    token that a tile writes; gap: as `Tiles` has it."""
    tokens, outputs, steps = -(-T // HEIGHT), F // TILE, E // (TERMS * c.parts)
    of_tokens = tokens % c.cluster == 0
    cluster = c.cluster if of_tokens or outputs % c.cluster == 0 else 1
    left = SMEM_BYTES - HEIGHT * size - WINDOWS * 4 * (WINDOW * HEIGHT + halves * LINE)
    stages = min(c.stages, left // ((HEIGHT + halves * TILE) * TERMS), steps)
    s = Tiles(
        tokens, outputs, steps, run // TILE, stages, 0, 1, c.parts, cluster, of_tokens, halves, gap,
        c.width or (TILE if halves == 1 or OWN_REGISTERS else TILE // 2),
    )  # fmt: skip
    return s._replace(
        clusters=min(s.items, c.num_ctas // cluster), together=min(c.together, s.wide[0])
    )


def scratch(s: Tiles) -> dict[str, Any]:
    """Returns what a block has in shared memory, by the names of `Held`."""
    layout = mosaic.tiled(TERMS, 1)
    return dict(
        x_smem=plgpu.SMEM((s.stages, HEIGHT, TERMS), E4M3, transforms=layout),
        w_smem=plgpu.SMEM((s.stages, s.halves * TILE, TERMS), E4M3, transforms=layout),
        own=plgpu.SMEM((WINDOWS, WINDOW, HEIGHT), jnp.float32),
        shared=plgpu.SMEM((WINDOWS, s.halves, LINE), jnp.float32),
        full=plgpu.Barrier(num_arrivals=1 + s.halves, num_barriers=s.stages),
        free=copies.free_slots(s.stages, GROUPS, s.cluster),
        told=plgpu.Barrier(num_arrivals=1 + s.halves, num_barriers=WINDOWS),
    )


def grid(s: Tiles) -> dict[str, Any]:
    """Returns the blocks and threads of a kernel, as `plgpu.kernel` takes them."""
    cluster = dict(cluster=(s.cluster,), cluster_names=("peer",)) if s.cluster > 1 else {}
    threads = dict(num_threads=GROUPS + 1, thread_name="wg")
    return dict(grid=(s.clusters,), grid_names=("team",)) | threads | cluster


def run(
    s: Tiles, is_device: bool, x: Ref, x_scale: Ref, w: Ref, scale: Ref, held: Held,
    leave: Callable[[Array, Item, list[Array]], None],
) -> None:  # fmt: skip
    """Computes the tiles of a block. leave: (warpgroup, tile, sums [ROWS, TILE] by halves) -> None,
    which writes them."""
    wg, team = lax.axis_index("wg"), lax.axis_index("team")
    item = functools.partial(s.item, team, lax.axis_index("peer") if s.cluster > 1 else 0)
    rounds = s.rounds(team)

    def compute(turn: Array, _: None) -> None:
        at = item(turn)
        leave(wg, at, _sums(s, is_device, wg, at, turn, held))
        return _

    @pl.when(wg < GROUPS)
    def _() -> None:
        if is_device:  # an interpreter of kernels knows no registers, and no launches
            plgpu.set_max_registers(REGISTERS[0], action="increase")
        lax.fori_loop(0, rounds, compute, None)
        plgpu.wait_smem_to_gmem(0)

    @pl.when(wg == GROUPS)
    def _() -> None:
        if is_device:
            plgpu.set_max_registers(REGISTERS[1], action="decrease")
        _fetch(s, is_device, rounds, item, x, x_scale, w, scale, held)


def _fetch(
    s: Tiles, is_device: bool, rounds: Array, item: Callable[[Array], Item], x: Ref, x_scale: Ref,
    w: Ref, scale: Ref, held: Held,
) -> None:  # fmt: skip
    """Copies tokens and weights, step by step of each tile, and scales of several steps."""
    both: dict[str, Any] = dict(collective_axes="peer") if s.cluster > 1 else {}
    of_tokens, of_weights = ({}, both) if s.of_tokens else (both, {})

    def place(step: Index) -> tuple[Item, Array, Array]:
        at = item(lax.div(step, s.steps))
        return at, at.part * s.steps + lax.rem(step, s.steps), lax.rem(step, s.stages)

    def weights(step: Index) -> None:
        at, n, slot = place(step)
        for half in range(s.halves):
            source = w.at[pl.ds(s.place(at, half) * TILE, TILE), pl.ds(n * TERMS, TERMS)]
            target = held.w_smem.at[slot, pl.ds(half * TILE, TILE)]
            mosaic.copy_gmem_to_smem(source, target, held.full.at[slot], **of_weights)

    def tokens(step: Index) -> None:
        at, n, slot = place(step)
        source = x.at[pl.ds(at.tokens * HEIGHT, HEIGHT), pl.ds(n * TERMS, TERMS)]
        mosaic.copy_gmem_to_smem(source, held.x_smem.at[slot], held.full.at[slot], **of_tokens)

    def scales(step: Index) -> None:
        (at, n, _), slot = place(step), lax.rem(s.window(step), WINDOWS)

        @pl.when(lax.rem(lax.rem(step, s.steps), WINDOW) == 0)
        def copy() -> None:
            source = x_scale.at[pl.ds(n, WINDOW), pl.ds(at.tokens * HEIGHT, HEIGHT)]
            mosaic.copy_gmem_to_smem(source, held.own.at[slot], held.told.at[slot])
            line = pl.ds(n - lax.rem(n, ALIGNED), LINE)
            for half in range(s.halves):
                source = scale.at[lax.div(s.place(at, half), s.run), line]
                mosaic.copy_gmem_to_smem(source, held.shared.at[slot, half], held.told.at[slot])

    others = tokens, scales
    producer = copies.Producer(s.stages, rounds * s.steps, held.free, weights, others)
    producer.run(s.halves * TILE * TERMS, is_device)


def _sums(s: Tiles, is_device: bool, wg: Array, at: Item, turn: Array, held: Held) -> list[Array]:
    """Sums up 64 tokens of a tile."""
    layout, mine = plgpu.Layout.WGMMA, pl.ds(wg * ROWS, ROWS)
    shape, places = (ROWS, s.width), [*itertools.product(range(s.halves), range(0, TILE, s.width))]

    def body(step: Array, totals: list[Array]) -> list[Array]:
        number, entry = turn * s.steps + step, lax.rem(step, WINDOW)
        slot, window = lax.rem(number, s.stages), lax.rem(s.window(number), WINDOWS)
        pl.when(entry == 0)(lambda: mosaic.barrier_wait(held.told.at[window]))
        mosaic.barrier_wait(held.full.at[slot])
        own = mosaic.load(
            held.own.at[window, entry, mine], layout=layout.reduce(1), optimized=False
        )
        begin = at.part * s.steps + step - entry
        found = []
        for (half, first), total in zip(places, totals, strict=True):
            scale = own * held.shared[window, half, lax.rem(begin, ALIGNED) + entry]
            weights = held.w_smem.at[slot, pl.ds(half * TILE + first, s.width)]

            def multiply(acc: Ref, weights: Ref = weights) -> Array:
                mosaic.wgmma(acc, held.x_smem.at[slot, mine], weights.T)
                return acc[...]

            y = pl.run_scoped(multiply, mosaic.ACC(shape, jnp.float32))
            if (half, first) == places[-1]:
                mosaic.barrier_arrive(held.free.at[slot])
            wide = plgpu.layout_cast(lax.broadcast_in_dim(scale, shape, [0]), layout)
            found.append(total + y * wide)
        return found

    zeros = plgpu.layout_cast(jnp.zeros(shape, jnp.float32), layout)
    sums = lax.fori_loop(0, s.steps, body, [zeros] * len(places))
    num = len(places) // s.halves
    return [_beside(sums[i : i + num], is_device) for i in range(0, len(places), num)]


def _beside(sums: list[Array], is_device: bool) -> Array:
    """Returns sums, [ROWS, n] each, side by side."""
    if len(sums) == 1:
        return sums[0]
    shape, layout = (ROWS, sum(x.shape[1] for x in sums)), plgpu.Layout.WGMMA
    if not is_device:  # an interpreter of kernels knows no registers
        return jnp.concatenate(sums, 1)

    @mosaic.inline_mgpu(
        arg_types=(layout,) * len(sums),
        return_type=plgpu.ShapeDtypeStruct(shape, jnp.float32, layout=layout),
    )
    def join(_: Any, *sums: mgpu.FragmentedArray) -> mgpu.FragmentedArray:
        registers = np.concatenate([x.registers for x in sums], 1)  # by columns
        return mgpu.FragmentedArray(_registers=registers, _layout=layout.to_mgpu(), _is_signed=None)

    return join(*sums)
