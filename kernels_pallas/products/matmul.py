"""Products of some dozens to hundreds of tokens with weights, on Hopper (Mosaic GPU).

A block of the grid computes a tile of the outputs for all tokens, so that each weight is read
once: one warpgroup copies weights and tokens into shared memory, step by step of the sum, and the
others compute, 64 tokens each. Two blocks form a cluster and share what they read of the tokens.
The gate and the up projection of a gated MLP are halves of one tile, and meet in registers.
Weights are on their way before the kernel that makes the tokens has ended, so it must not be that
kernel which makes the weights.
"""

from collections.abc import Callable
from dataclasses import dataclass
import functools
import math
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from jaxrunner.kernels_pallas import mosaic
from jaxrunner.kernels_pallas.mosaic import TOO_OLD, Barrier, Index, Ref, Shaped
from jaxrunner.kernels_pallas.products import copies
from jaxrunner.kernels_pallas.stores import put
from jaxrunner.types import Array

ROWS = 64  # tokens of a warpgroup: the height of a Hopper matrix product
STEP = 64  # terms of a sum that a step takes: 128 bytes, the widest swizzle
SMEM_BYTES = 226 * 1024  # of a block, less what barriers need
MAX_TILE = 128  # outputs of a block: with more, registers run out
CLUSTER = 2
COMPILER = plgpu.CompilerParams(approx_math=True, lowering_semantics=mgpu.LoweringSemantics.Lane)
ACTIVATIONS = "silu", "gelu_tanh"  # of gates


@dataclass(frozen=True)
class TuningConfig:
    """Sizes that change speed alone."""

    tile: int = 0  # outputs of a block, gates included; 0: what keeps the chip busiest
    stages: int = 8  # steps that are in shared memory, fewer where they do not fit
    num_ctas: int = 132  # at most: one for each multiprocessor of an H200

    def fit(self, T: int, outputs: int) -> "TuningConfig":
        """Returns the sizes for T tokens, with a tile of 0 where none fits."""
        sizes = [self.tile] if self.tile else range(16, MAX_TILE + 1, 16)
        sizes = [size for size in sizes if outputs % (CLUSTER * size) == 0]

        def cost(size: int) -> tuple[int, int]:
            turns = -(-outputs // (size * (self.num_ctas // CLUSTER * CLUSTER)))
            return turns * size, -size

        tile = min(sizes, key=cost, default=0)
        stages = min(self.stages, SMEM_BYTES // (2 * STEP * (T + tile)))
        return TuningConfig(tile, stages, self.num_ctas)


class _Static(NamedTuple):
    """The compile-time parameters of the kernel."""

    T: int
    activation: str | None  # of gates; None for a product that is none of a gated MLP
    steps: int  # of a tile
    pairs: int  # of tiles, which a cluster computes at once
    clusters: int
    tile: int
    stages: int

    @property
    def halves(self) -> int:
        """Products side by side in a tile."""
        return 1 if self.activation is None else 2


def refuses(x: Shaped, weight: Shaped, config: TuningConfig = TuningConfig()) -> str | None:
    """Says why x, [T, E], and weight, [F, E] or [2, F, E], are not served; None if they are."""
    T, E = x.shape
    if TOO_OLD is not None:
        return TOO_OLD
    if x.dtype not in (jnp.bfloat16, jnp.float16) or weight.dtype != x.dtype:
        return f"wants one dtype, bfloat16 or float16, got {x.dtype} and {weight.dtype}"
    if T % ROWS or not ROWS <= T <= 4 * ROWS:
        return f"wants 64, 128, 192 or 256 tokens, got {T}"
    if weight.shape[-1] != E or E % STEP:
        return f"wants sums of a multiple of {STEP} terms, got {E} and {weight.shape[-1]}"
    fit = config.fit(T, weight.size // E)
    if not fit.tile:
        return f"wants outputs in pairs of tiles of 16 to {MAX_TILE}, got {weight.shape[:-1]}"
    if fit.stages > E // STEP:
        return f"wants sums of at least {fit.stages} x {STEP} terms, got {E}"
    return None


def matmul(x: Array, weight: Array, config: TuningConfig = TuningConfig()) -> Array:
    """Returns x, [T, E], times weight, [F, E]: [T, F].

    Raises: ValueError where `refuses` says why.
    """
    return _call(x, weight, None, config)


def glu(
    x: Array, gate_up: Array, activation: str = "silu", config: TuningConfig = TuningConfig()
) -> Array:
    """Returns the units of a gated MLP, [T, F], of x, [T, E], and gate_up, [2, F, E].

    activation: one of `ACTIVATIONS`: SwiGLU or GEGLU of arXiv:2002.05202. Raises: ValueError where
    `refuses` or `refuses_activation` says why.
    """
    if reason := refuses_activation(activation):
        raise ValueError(f"glu {reason}")
    return _call(x, gate_up, activation, config)


def refuses_activation(activation: str) -> str | None:
    """Says why gates with this activation are not served, or None."""
    return None if activation in ACTIVATIONS else f"wants one of {ACTIVATIONS}, got {activation}"


def _call(x: Array, weight: Array, activation: str | None, config: TuningConfig) -> Array:
    if reason := refuses(x, weight, config):
        raise ValueError(f"matmul {reason}")
    (T, E), F, consumers = x.shape, weight.shape[-2], x.shape[0] // ROWS
    tile, stages, num_ctas = (fit := config.fit(T, weight.size // E)).tile, fit.stages, fit.num_ctas
    pairs = weight.size // (E * tile * CLUSTER)
    clusters = min(num_ctas // CLUSTER, pairs)
    s = _Static(T, activation, E // STEP, pairs, clusters, tile, stages)
    layout = mosaic.tiled(STEP, 2)
    return plgpu.kernel(
        functools.partial(_kernel, s),
        out_type=jax.ShapeDtypeStruct((T, F), x.dtype),
        scratch_types=dict(
            x_smem=plgpu.SMEM((stages, T, STEP), x.dtype, transforms=layout),
            w_smem=plgpu.SMEM((stages, tile, STEP), x.dtype, transforms=layout),
            full=plgpu.Barrier(num_arrivals=1 + s.halves, num_barriers=stages),
            free=plgpu.ClusterBarrier(
                collective_axes=("peer",), num_arrivals=consumers, num_barriers=stages
            ),
        ),
        grid=(clusters,), grid_names=("team",), cluster=(CLUSTER,), cluster_names=("peer",),
        num_threads=consumers + 1, thread_name="wg",
        kernel_name="matmul" if activation is None else "glu", compiler_params=COMPILER,
    )(x, weight)  # fmt: skip


def _kernel(s: _Static, x: Ref, w: Ref, out: Ref, **smem: Any) -> None:
    wg, team, peer = (lax.axis_index(name) for name in ("wg", "team", "peer"))
    rounds = lax.div(s.pairs - team + s.clusters - 1, s.clusters)

    def tile(r: Array) -> Array:
        return (team + r * s.clusters) * CLUSTER + peer

    consumers = s.T // ROWS
    pl.when(wg < consumers)(lambda: _compute(s, wg, rounds, tile, out, **smem))
    pl.when(wg == consumers)(lambda: _fetch(s, rounds, tile, x, w, **smem))


def _fetch(
    s: _Static, rounds: Array, tile: Callable[[Array], Array], x: Ref, w: Ref,
    *, x_smem: Ref, w_smem: Ref, full: Barrier, free: Barrier,
) -> None:  # fmt: skip
    """Copies weights and tokens, step by step of each tile."""

    def terms(step: Index) -> Any:
        return pl.ds(lax.rem(step, s.steps) * STEP, STEP)

    def slot(step: Index) -> Array:
        return lax.rem(step, s.stages)

    def weights(step: Index) -> None:
        n, at, width = tile(lax.div(step, s.steps)), terms(step), s.tile // s.halves
        rows = pl.ds(n * width, width)
        for i in range(s.halves):
            source = w.at[rows, at] if s.activation is None else w.at[i, rows, at]
            target = w_smem.at[slot(step), pl.ds(i * width, width)]
            mosaic.copy_gmem_to_smem(source, target, full.at[slot(step)])

    def tokens(step: Index) -> None:
        source, target = x.at[:, terms(step)], x_smem.at[slot(step)]
        mosaic.copy_gmem_to_smem(source, target, full.at[slot(step)], collective_axes="peer")

    producer = copies.Producer(s.stages, rounds * s.steps, free, weights, (tokens,))
    producer.run(s.tile * STEP * w.dtype.itemsize)


def _compute(
    s: _Static, wg: Array, rounds: Array, tile: Callable[[Array], Array], out: Ref,
    *, x_smem: Ref, w_smem: Ref, full: Barrier, free: Barrier,
) -> None:  # fmt: skip
    """Sums up each tile for the 64 tokens of a warpgroup."""
    rows = pl.ds(wg * ROWS, ROWS)

    def operands(slot: Array) -> tuple[Ref, Ref]:
        return x_smem.at[slot, rows], w_smem.at[slot]

    def one(r: Array, _: None) -> None:
        y = sums(operands, s.tile, r * s.steps, (r + 1) * s.steps, s.stages, full, free)
        y = y if s.activation is None else activate(y, s.activation)
        width = y.shape[1]
        put(out.at[rows, pl.ds(tile(r) * width, width)], y.astype(out.dtype))
        return _

    lax.fori_loop(0, rounds, one, None)


def activate(y: Array, activation: str) -> Array:
    """Returns the units of a gated MLP, [ROWS, n], of its two products side by side."""
    n = y.shape[1] // 2
    gate, up = (lax.slice(y, (0, i * n), (ROWS, (i + 1) * n)) for i in range(2))
    return gated(gate, up, activation)


def gated(gate: Array, up: Array, activation: str) -> Array:
    """Returns the units of a gated MLP (arXiv:2002.05202)."""
    inner = gate
    if activation == "gelu_tanh":  # (1 + tanh(z)) / 2 is the sigmoid of 2 z
        inner = gate * (2 * math.sqrt(2 / math.pi)) * (1 + 0.044715 * gate * gate)
    return gate / (1 + jnp.exp(-inner)) * up


def sums(
    operands: Callable[[Array], tuple[Ref, Ref]], width: int, first: Index, last: Index,
    stages: int, full: Barrier, free: Barrier,
) -> Array:  # fmt: skip
    """Returns the sum of steps of a product for the rows of a warpgroup, [ROWS, width].

    operands: (slot) -> tokens, [ROWS, STEP], and weights, [width, STEP], in shared memory.
    full, free: barriers of the slots that may be read, and replaced.
    """

    def multiply(acc: Ref) -> Array:
        def body(step: Array, _: None) -> None:
            slot = lax.rem(step, stages)
            mosaic.barrier_wait(full.at[slot])
            x, w = operands(slot)
            mosaic.wgmma(acc, x, w.T)
            plgpu.wgmma_wait(1)

            @pl.when(step > first)
            def _() -> None:
                mosaic.barrier_arrive(free.at[lax.rem(step - 1, stages)])

            return _

        lax.fori_loop(first, last, body, None)
        result = acc[...]
        mosaic.barrier_arrive(free.at[lax.rem(last - 1, stages)])
        return result

    return pl.run_scoped(multiply, mosaic.ACC((ROWS, width), jnp.float32))
