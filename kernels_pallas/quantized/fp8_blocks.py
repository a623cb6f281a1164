"""Products of tokens with weights, both in fp8 with scales of blocks, on Hopper (Mosaic GPU).

Tensor cores sum 128 terms of fp8 up with some 14 bits; each of these sums is multiplied with the
scale of its token and that of its block of weights, and added to others in float32. A block of the
grid takes one tile of 128 or 192 tokens and 128 outputs after another: one warpgroup copies, two or
three compute 64 tokens each, so that one multiplies while another adds. The two blocks of a cluster
have tiles beside each other and share the weights of both, or the tokens. Neighbours in time share
weights or tokens in the L2 cache. DeepSeek-V3, arXiv:2412.19437.
"""

from collections.abc import Callable
from dataclasses import dataclass
import functools
import math
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from jaxrunner.kernels_pallas import mosaic, pdl
from jaxrunner.kernels_pallas.mosaic import TOO_OLD, Barrier, Index, Ref, Shaped
from jaxrunner.kernels_pallas.products.gated_mlp import SMEM_BYTES, each
from jaxrunner.kernels_pallas.products.matmul import COMPILER, ROWS
from jaxrunner.kernels_pallas.quantized.quantized_tile import free_slots
from jaxrunner.types import Array

TILE = 128  # outputs of a tile
TERMS = 128  # that share a scale
# By the warpgroups that compute: registers of their threads and of those that copy; time of a tile.
REGISTERS, PACE = {2: (232, 40), 3: (152, 40)}, {2: 2.0, 3: 2.65}
MAX_PARTS = 8
WINDOW = 8  # steps whose scales are copied at once, more than there are stages; fewer end a tile
WINDOWS = 3  # in shared memory: one is read, a short one may follow, and the next is on its way
LINE = 32  # scales of weights that are copied at once: 128 bytes are the fewest
ALIGNED = 4  # scales in 16 bytes: no copy may begin elsewhere
E4M3 = jnp.float8_e4m3fn


@dataclass(frozen=True)
class TuningConfig:
    """Sizes that change speed alone, but for the order of a sum in parts."""

    groups: int = 0  # warpgroups that have 64 tokens of a tile each; 0: those that are done first
    num_ctas: int = 132  # at most: an H200's
    stages: int = 6  # steps that are in shared memory
    together: int = 8  # tiles of tokens that are taken for one tile of outputs after another
    cluster: int = 2  # blocks that share weights or tokens, where their tiles can be halved
    parts: int = 1  # of a sum


class _Static(NamedTuple):
    """The compile-time parameters of the kernel."""

    groups: int  # of warpgroups that compute
    tokens: int  # tiles
    outputs: int  # tiles
    steps: int  # of a part
    run: int  # tiles of outputs that share a scale
    stages: int
    clusters: int
    together: int  # tiles of tokens, or pairs of them
    parts: int
    cluster: int  # blocks
    of_tokens: bool  # its blocks have tiles of tokens beside each other, and share weights

    @property
    def height(self) -> int:
        """Tokens of a tile."""
        return self.groups * ROWS

    @property
    def wide(self) -> tuple[int, int]:
        """Tiles of tokens and of outputs, or pairs of them, that clusters take."""
        across = self.cluster if self.of_tokens else 1
        return self.tokens // across, self.outputs // (self.cluster // across)

    @property
    def items(self) -> int:
        """Pieces of work of all clusters."""
        return math.prod(self.wide) * self.parts

    def item(self, team: Array, peer: Index, turn: Array) -> "_Item":
        """Returns a block's share of a piece of its cluster's work."""
        tokens, outputs = self.wide
        number, size = team + turn * self.clusters, self.together * outputs
        part, number = lax.div(number, tokens * outputs), lax.rem(number, tokens * outputs)
        first, rest = lax.div(number, size) * self.together, lax.rem(number, size)
        together = jnp.minimum(tokens - first, self.together)
        one, other = first + lax.rem(rest, together), lax.div(rest, together)
        if self.of_tokens:
            return _Item(one * self.cluster + peer, other, part)
        return _Item(one, other * self.cluster + peer, part)

    def window(self, step: Index) -> Index:
        """Returns which window of scales a step of a block is in."""
        turn, rest = lax.div(step, self.steps), lax.rem(step, self.steps)
        return turn * -(-self.steps // WINDOW) + lax.div(rest, WINDOW)

    def rounds(self, team: Array) -> Array:
        """Returns how many pieces of work a cluster has."""
        return lax.div(self.items - team + self.clusters - 1, self.clusters)


class _Held(NamedTuple):
    """What lies in shared memory."""

    x_smem: Ref  # [stages, height, TERMS]
    w_smem: Ref  # [stages, TILE, TERMS]
    out_smem: Ref  # [groups, ROWS, TILE]
    own: Ref  # [WINDOWS, WINDOW, height]: scales of tokens
    shared: Ref  # [WINDOWS, LINE]: of weights
    full: Barrier
    free: Barrier
    told: Barrier  # that scales are there


class _Item(NamedTuple):
    """A tile, and the part of its sum."""

    tokens: Array
    outputs: Array
    part: Array


def refuses(x: Shaped, x_scale: Shaped, weight: Shaped, scale: Shaped) -> str | None:
    """Says why x, [T, E], [E / 128, T], weight, [F, E], and scale, [F / run, E / 128], are not
    served, or None."""
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
    if x_scale.shape != (E // TERMS, T) or scale.shape[1] != E // TERMS:
        return f"wants a scale for {TERMS} terms, got {x_scale.shape} and {scale.shape}"
    if F % scale.shape[0] or F // scale.shape[0] % TILE:
        return f"wants a scale for a multiple of {TILE} outputs, got {scale.shape[0]} for {F}"
    return None


def fp8_blocks(
    x: Array, x_scale: Array, weight: Array, scale: Array, *, dtype: Any = jnp.bfloat16,
    config: TuningConfig = TuningConfig(), interpret: Any = None,
) -> Array:  # fmt: skip
    """Returns x, [T, E], times weight, [F, E], both in float8_e4m3fn: [T, F] in `dtype`.

    With several parts, which are to be added up: [parts, T, F].
    x_scale: [E / 128, T], float32, of each token, as `fp8_rounding` returns it; scale: [F / run,
    E / 128], float32, of runs of outputs. interpret: parameters of Pallas' interpreter; None on a
    GPU.

    Raises:
      ValueError: what `refuses` says, or `config.parts` do not divide the sums.
    """
    c, (T, E), F = config, x.shape, weight.shape[0]
    if why := refuses(x, x_scale, weight, scale):
        raise ValueError(f"fp8_blocks {why}")
    if E % (TERMS * c.parts):
        raise ValueError(f"fp8_blocks wants parts that divide {E // TERMS} steps, got {c.parts}")
    size = jnp.dtype(dtype).itemsize
    scale = jnp.pad(scale, ((0, 0), (0, -(E // TERMS) % ALIGNED)))
    s = _fit(T, E, F, scale.shape[0], size, c)
    layout = mosaic.tiled(TERMS, 1)
    return plgpu.kernel(
        functools.partial(_kernel, s, interpret is None),
        out_type=jax.ShapeDtypeStruct((T, F) if c.parts == 1 else (c.parts, T, F), dtype),
        scratch_types=dict(
            x_smem=plgpu.SMEM((s.stages, s.height, TERMS), E4M3, transforms=layout),
            w_smem=plgpu.SMEM((s.stages, TILE, TERMS), E4M3, transforms=layout),
            out_smem=plgpu.SMEM(
                (s.groups, ROWS, TILE), dtype, transforms=mosaic.tiled(128 // size, size)
            ),
            own=plgpu.SMEM((WINDOWS, WINDOW, s.height), jnp.float32),
            shared=plgpu.SMEM((WINDOWS, LINE), jnp.float32),
            full=plgpu.Barrier(num_arrivals=2, num_barriers=s.stages),
            free=free_slots(s.stages, s.groups, s.cluster),
            told=plgpu.Barrier(num_arrivals=2, num_barriers=WINDOWS),
        ),
        grid=(s.clusters,), grid_names=("team",), num_threads=s.groups + 1, thread_name="wg",
        cluster=(s.cluster,) if s.cluster > 1 else (),
        cluster_names=("peer",) if s.cluster > 1 else (),
        kernel_name="fp8_blocks", compiler_params=COMPILER, interpret=interpret,
    )(x, x_scale, weight, scale)  # fmt: skip


def num_parts(T: int, E: int, F: int, num_ctas: int = TuningConfig.num_ctas) -> int:
    """Returns into how many parts sums are best cut: those that leave least idle, of equals few."""
    steps, tiles = E // TERMS, -(-T // TILE) * (F // TILE)
    parts = [n for n in range(1, MAX_PARTS + 1) if steps % n == 0 and (n == 1 or T <= 2 * TILE)]
    return min(parts, key=lambda n: -(-tiles * n // num_ctas) / n)


def num_groups(T: int, F: int, config: TuningConfig) -> int:
    """Returns how many warpgroups are best to compute: those that are done first, of equals few."""
    return min(
        PACE,
        key=lambda n: -(-(-(-T // (n * ROWS)) * (F // TILE) * config.parts) // config.num_ctas)
        * PACE[n],
    )


def _fit(T: int, E: int, F: int, scales: int, size: int, c: TuningConfig) -> _Static:
    """Shares the work out; size: bytes of a number of the output."""
    groups = c.groups or num_groups(T, F, c)
    height = groups * ROWS
    tokens, outputs, steps = -(-T // height), F // TILE, E // (TERMS * c.parts)
    of_tokens = tokens % c.cluster == 0
    cluster = c.cluster if of_tokens or outputs % c.cluster == 0 else 1
    left = SMEM_BYTES - height * TILE * size - WINDOWS * 4 * (WINDOW * height + LINE)
    stages = min(c.stages, left // ((height + TILE) * TERMS), steps)
    s = _Static(
        groups, tokens, outputs, steps, outputs // scales, stages, 0, 1, c.parts, cluster,
        of_tokens,
    )  # fmt: skip
    return s._replace(
        clusters=min(s.items, c.num_ctas // cluster), together=min(c.together, s.wide[0])
    )


def _kernel(
    s: _Static, is_device: bool, x: Ref, x_scale: Ref, w: Ref, scale: Ref, out: Ref, **smem: Any
) -> None:
    held, wg, team = _Held(**smem), lax.axis_index("wg"), lax.axis_index("team")
    item = functools.partial(s.item, team, lax.axis_index("peer") if s.cluster > 1 else 0)
    rounds = s.rounds(team)

    @pl.when(wg < s.groups)
    def _() -> None:
        if is_device:  # an interpreter of kernels knows no registers, and no launches
            plgpu.set_max_registers(REGISTERS[s.groups][0], action="increase")
        lax.fori_loop(0, rounds, functools.partial(_compute, s, wg, item, out, held), None)
        plgpu.wait_smem_to_gmem(0)

    @pl.when(wg == s.groups)
    def _() -> None:
        if is_device:
            plgpu.set_max_registers(REGISTERS[s.groups][1], action="decrease")
        _fetch(s, is_device, rounds, item, x, x_scale, w, scale, held)


def _fetch(
    s: _Static, is_device: bool, rounds: Array, item: Callable[[Array], _Item], x: Ref,
    x_scale: Ref, w: Ref, scale: Ref, held: _Held,
) -> None:  # fmt: skip
    """Copies tokens and weights, step by step of each tile, and scales of several steps."""
    both: dict[str, Any] = dict(collective_axes="peer") if s.cluster > 1 else {}
    of_tokens, of_weights = ({}, both) if s.of_tokens else (both, {})

    def place(step: Index) -> tuple[_Item, Array, Array]:
        at = item(lax.div(step, s.steps))
        return at, at.part * s.steps + lax.rem(step, s.steps), lax.rem(step, s.stages)

    def weights(step: Index) -> None:
        at, n, slot = place(step)
        source = w.at[pl.ds(at.outputs * TILE, TILE), pl.ds(n * TERMS, TERMS)]
        mosaic.copy_gmem_to_smem(source, held.w_smem.at[slot], held.full.at[slot], **of_weights)

    def tokens(step: Index) -> None:
        at, n, slot = place(step)
        source = x.at[pl.ds(at.tokens * s.height, s.height), pl.ds(n * TERMS, TERMS)]
        mosaic.copy_gmem_to_smem(source, held.x_smem.at[slot], held.full.at[slot], **of_tokens)

    def scales(step: Index) -> None:
        (at, n, _), slot = place(step), lax.rem(s.window(step), WINDOWS)

        @pl.when(lax.rem(lax.rem(step, s.steps), WINDOW) == 0)
        def copy() -> None:
            source = x_scale.at[pl.ds(n, WINDOW), pl.ds(at.tokens * s.height, s.height)]
            mosaic.copy_gmem_to_smem(source, held.own.at[slot], held.told.at[slot])
            line = pl.ds(n - lax.rem(n, ALIGNED), LINE)
            source = scale.at[lax.div(at.outputs, s.run), line]
            mosaic.copy_gmem_to_smem(source, held.shared.at[slot], held.told.at[slot])

    def wait(step: Array) -> None:
        mosaic.barrier_wait(held.free.at[lax.rem(step, s.stages)])

    each(0, s.stages, weights)
    if is_device:
        pdl.begin()
    each(0, s.stages, tokens, scales)
    total = rounds * s.steps
    each(s.stages, total, wait, weights, tokens, scales)
    # A block may not end while its peer still tells it that a slot is free.
    each(total, total + s.stages, wait)


def _compute(
    s: _Static, wg: Array, item: Callable[[Array], _Item], out: Ref, held: _Held, turn: Array,
    _: None,
) -> None:  # fmt: skip
    """Sums up 64 tokens of a tile."""
    layout, mine, place = plgpu.Layout.WGMMA, pl.ds(wg * ROWS, ROWS), held.out_smem.at[wg]
    at = item(turn)

    def body(step: Array, total: Array) -> Array:
        number, entry = turn * s.steps + step, lax.rem(step, WINDOW)
        slot, window = lax.rem(number, s.stages), lax.rem(s.window(number), WINDOWS)
        pl.when(entry == 0)(lambda: mosaic.barrier_wait(held.told.at[window]))
        mosaic.barrier_wait(held.full.at[slot])
        scale = mosaic.load(
            held.own.at[window, entry, mine], layout=layout.reduce(1), optimized=False
        )
        begin = at.part * s.steps + step - entry
        scale = scale * held.shared[window, lax.rem(begin, ALIGNED) + entry]

        def multiply(acc: Ref) -> Array:
            mosaic.wgmma(acc, held.x_smem.at[slot, mine], held.w_smem.at[slot].T)
            return acc[...]

        y = pl.run_scoped(multiply, mosaic.ACC((ROWS, TILE), jnp.float32))
        mosaic.barrier_arrive(held.free.at[slot])
        wide = plgpu.layout_cast(lax.broadcast_in_dim(scale, (ROWS, TILE), [0]), layout)
        return total + y * wide

    zeros = plgpu.layout_cast(jnp.zeros((ROWS, TILE), jnp.float32), layout)
    total = lax.fori_loop(0, s.steps, body, zeros)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    place[...] = total.astype(out.dtype)
    plgpu.commit_smem()
    target = out if s.parts == 1 else out.at[at.part]
    target = target.at[pl.ds(at.tokens * s.height + wg * ROWS, ROWS), pl.ds(at.outputs * TILE, TILE)]
    mosaic.copy_smem_to_gmem(place, target)
