"""Products of some dozens to hundreds of tokens with weights, on Hopper (Mosaic GPU).

Each weight is read once. Two blocks of the grid form a cluster: of 128 or 256 tokens each takes
half, for the same tile of the outputs, and they share what they read of the weights; of 64 or 192
each takes all, for a tile of its own, and they share what they read of the tokens. One warpgroup of
a block copies weights and tokens into shared memory, step by step of the sum, and the others
compute, 64 tokens each. The gate and the up projection of a gated MLP are halves of one tile, and
meet in registers.
Weights are on their way before the kernel that makes the tokens has ended, so it must not be that
kernel which makes the weights.
"""

from dataclasses import dataclass
import functools
from typing import NamedTuple

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from jaxrunner.kernels_pallas.stores import put
from jaxrunner.types import Array

ROWS = 64  # tokens of a warpgroup: the height of a Hopper matrix product
STEP = 64  # terms of a sum that a step takes: 128 bytes, the widest swizzle
SMEM_BYTES = 226 * 1024  # of a block, less what barriers need
MAX_TILE = 128, 256  # outputs of a block with all tokens, and with half: what registers hold
CLUSTER = 2
COMPILER = plgpu.CompilerParams(approx_math=True, lowering_semantics=mgpu.LoweringSemantics.Lane)


@dataclass(frozen=True)
class TuningConfig:
    """Sizes that change speed alone."""

    tile: int = 0  # outputs of a block, gates included; 0: what keeps the chip busiest
    stages: int = 12  # steps that are in shared memory, fewer where they do not fit
    num_ctas: int = 132  # at most: one for each multiprocessor of an H200

    def fit(self, T: int, E: int, outputs: int, parts: int, gated: bool) -> "TuningConfig":
        """Returns the sizes for [T, E] tokens, with a tile of 0 where none fits."""
        halved, clusters = _halved(T), self.num_ctas // CLUSTER
        tiles = 1 if halved else CLUSTER  # of a cluster
        unit = 32 if halved and gated else 16  # a copy takes rows in eights
        sizes = [self.tile] if self.tile else range(unit, MAX_TILE[halved] + 1, unit)
        sizes = [size for size in sizes if outputs % (tiles * size) == 0]

        def cost(size: int) -> tuple[int, int]:
            turns = -(-outputs * parts // (size * tiles * clusters))
            return turns * size, -size

        tile = min(sizes, key=cost, default=0)
        fitting = SMEM_BYTES // (2 * STEP * (T // (1 + halved) + tile))
        stages = min(self.stages, fitting, E // (STEP * parts))
        return TuningConfig(tile, stages, self.num_ctas)


class _Static(NamedTuple):
    """What is known when the kernel is compiled."""

    rows: int  # tokens of a block
    halved: bool  # whether a block takes half of the tokens, not half of a cluster's outputs
    gated: bool
    steps: int  # of a part of a tile
    tiles: int  # of the outputs; or pairs, which a cluster computes at once
    jobs: int  # parts of tiles
    clusters: int
    tile: int
    stages: int


def _halved(T: int) -> bool:
    return T % (CLUSTER * ROWS) == 0


def refuses(x, weight, config: TuningConfig = TuningConfig(), *, parts: int = 1) -> str | None:
    """Says why x, [T, E], and weight, [F, E] or [2, F, E], are not served; None if they are."""
    T, E = x.shape
    if jax.__version_info__ < (0, 11):
        return f"wants JAX 0.11 or later, got {jax.__version__}"
    if x.dtype not in (jnp.bfloat16, jnp.float16) or weight.dtype != x.dtype:
        return f"wants one dtype, bfloat16 or float16, got {x.dtype} and {weight.dtype}"
    if T % ROWS or not ROWS <= T <= 4 * ROWS:
        return f"wants 64, 128, 192 or 256 tokens, got {T}"
    if weight.shape[-1] != E or E % (STEP * parts):
        return f"wants sums of a multiple of {STEP * parts} terms, got {E} and {weight.shape[-1]}"
    if not config.fit(T, E, weight.size // E, parts, weight.ndim == 3).tile:
        return f"wants outputs in tiles of 16 to {MAX_TILE[_halved(T)]}, got {weight.shape[:-1]}"
    return None


def matmul(
    x: Array, weight: Array, config: TuningConfig = TuningConfig(), *, parts: int | None = None
) -> Array:
    """Returns x, [T, E], times weight, [F, E]: [T, F]; or parts of it, [parts, T, F] in float32.

    Raises: ValueError where `refuses` says why.
    """
    return _call(x, weight, config, parts)


def swiglu(x: Array, gate_up: Array, config: TuningConfig = TuningConfig()) -> Array:
    """Returns the units of a gated MLP, [T, F], of x, [T, E], and gate_up, [2, F, E].

    arXiv:2002.05202. Raises: ValueError where `refuses` says why.
    """
    return _call(x, gate_up, config, None)


def _call(x: Array, weight: Array, config: TuningConfig, parts: int | None) -> Array:
    num = 1 if parts is None else parts
    if reason := refuses(x, weight, config, parts=num):
        raise ValueError(f"matmul {reason}")
    (T, E), F, gated, halved = x.shape, weight.shape[-2], weight.ndim == 3, _halved(x.shape[0])
    fit = config.fit(T, E, weight.size // E, num, gated)
    rows, tile, stages = T // (1 + halved), fit.tile, fit.stages
    tiles = weight.size // (E * tile * (1 if halved else CLUSTER))
    clusters, consumers = min(config.num_ctas // CLUSTER, tiles * num), rows // ROWS
    steps = E // (STEP * num)
    s = _Static(rows, halved, gated, steps, tiles, tiles * num, clusters, tile, stages)
    layout = plgpu.TilingTransform((8, STEP)), plgpu.SwizzleTransform(2 * STEP)
    out = (num, T, F), x.dtype if parts is None else jnp.float32
    out = plgpu.kernel(
        functools.partial(_kernel, s),
        out_type=jax.ShapeDtypeStruct(*out),
        scratch_types=dict(
            x_smem=plgpu.SMEM((stages, rows, STEP), x.dtype, transforms=layout),
            w_smem=plgpu.SMEM((stages, tile, STEP), x.dtype, transforms=layout),
            full=plgpu.Barrier(num_arrivals=2 + gated, num_barriers=stages),
            free=plgpu.ClusterBarrier(
                collective_axes=("peer",), num_arrivals=consumers, num_barriers=stages
            ),
        ),
        grid=(clusters,), grid_names=("team",), cluster=(CLUSTER,), cluster_names=("peer",),
        num_threads=consumers + 1, thread_name="wg",
        kernel_name="swiglu" if gated else "matmul", compiler_params=COMPILER,
    )(x, weight)  # fmt: skip
    return out[0] if parts is None else out


def _kernel(s: _Static, x, w, out, **smem):
    wg, team, peer = (lax.axis_index(name) for name in ("wg", "team", "peer"))
    rounds = lax.div(s.jobs - team + s.clusters - 1, s.clusters)

    def job(r):
        """Returns the tile of a round, and the part of its sum."""
        n = team + r * s.clusters
        tile = lax.rem(n, s.tiles)
        return tile if s.halved else tile * CLUSTER + peer, lax.div(n, s.tiles)

    consumers, first = s.rows // ROWS, peer * s.rows if s.halved else 0
    pl.when(wg < consumers)(lambda: _compute(s, wg, first, rounds, job, out, **smem))
    pl.when(wg == consumers)(lambda: _fetch(s, first, rounds, job, x, w, **smem))


def _fetch(s: _Static, first, rounds, job, x, w, *, x_smem, w_smem, full, free):
    """Copies weights and tokens, the `first` one and those behind it, step by step of each tile."""
    both, mine = dict(collective_axes="peer"), {}

    def place(step):
        tile, part = job(lax.div(step, s.steps))
        return tile, pl.ds((part * s.steps + lax.rem(step, s.steps)) * STEP, STEP)

    def weights(step, slot):
        (tile, at), width = place(step), s.tile // (1 + s.gated)
        rows = pl.ds(tile * width, width)
        for i in range(1 + s.gated):
            source = w.at[i, rows, at] if s.gated else w.at[rows, at]
            target = w_smem.at[slot, pl.ds(i * width, width)]
            shared = both if s.halved else mine
            plgpu.copy_gmem_to_smem(source, target, full.at[slot], **shared)

    def tokens(step, slot):
        source, shared = x.at[pl.ds(first, s.rows), place(step)[1]], mine if s.halved else both
        plgpu.copy_gmem_to_smem(source, x_smem.at[slot], full.at[slot], **shared)

    for slot in range(s.stages):
        weights(slot, slot)
    plgpu.griddepcontrol_wait()
    plgpu.griddepcontrol_launch_dependents()
    for slot in range(s.stages):
        tokens(slot, slot)

    def body(step, _):
        slot = lax.rem(step, s.stages)
        plgpu.barrier_wait(free.at[slot])
        weights(step, slot)
        tokens(step, slot)
        return _

    def drain(step, _):
        plgpu.barrier_wait(free.at[lax.rem(step, s.stages)])
        return _

    total = rounds * s.steps
    lax.fori_loop(s.stages, total, body, None)
    # A block may not end while its peer still tells it that a slot is free.
    lax.fori_loop(total, total + s.stages, drain, None)


def _compute(s: _Static, wg, first, rounds, job, out, *, x_smem, w_smem, full, free):
    """Sums up each tile for the 64 tokens of a warpgroup."""
    mine, rows = pl.ds(wg * ROWS, ROWS), pl.ds(first + wg * ROWS, ROWS)

    def operands(slot):
        return x_smem.at[slot, mine], w_smem.at[slot]

    def one(r, _):
        y = sums(operands, s.tile, r * s.steps, (r + 1) * s.steps, s.stages, full, free)
        (tile, part), width = job(r), s.tile // (1 + s.gated)
        if s.gated:
            gate, up = (lax.slice(y, (0, i * width), (ROWS, (i + 1) * width)) for i in range(2))
            y = gate / (1 + jnp.exp(-gate)) * up
        put(out.at[part, rows, pl.ds(tile * width, width)], y.astype(out.dtype))
        return _

    lax.fori_loop(0, rounds, one, None)


def sums(operands, width: int, first, last, stages: int, full, free) -> Array:
    """Returns the sum of steps of a product for the rows of a warpgroup, [ROWS, width].

    operands: (slot) -> tokens, [ROWS, STEP], and weights, [width, STEP], in shared memory.
    full, free: barriers of the slots that may be read, and replaced.
    """

    def multiply(acc):
        def body(step, _):
            slot = lax.rem(step, stages)
            plgpu.barrier_wait(full.at[slot])
            x, w = operands(slot)
            plgpu.wgmma(acc, x, w.T)
            plgpu.wgmma_wait(1)

            @pl.when(step > first)
            def _():
                plgpu.barrier_arrive(free.at[lax.rem(step - 1, stages)])

            return _

        lax.fori_loop(first, last, body, None)
        result = acc[...]
        plgpu.barrier_arrive(free.at[lax.rem(last - 1, stages)])
        return result

    return pl.run_scoped(multiply, plgpu.ACC((ROWS, width), jnp.float32))
