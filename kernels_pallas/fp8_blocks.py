"""Products of many tokens with weights, both in fp8 with scales of blocks, on Hopper (Mosaic GPU).

Tensor cores sum 128 terms of fp8 up with some 14 bits; each of these sums is multiplied with the
scale of its token and that of its block of weights, and added to others in float32. A block of the
grid takes one tile of 128 tokens and 128 outputs after another: one warpgroup copies, two compute
64 tokens each, so that one multiplies while the other adds. Neighbours in time share weights or
tokens in the L2 cache. DeepSeek-V3, arXiv:2412.19437.
"""

from dataclasses import dataclass
import functools
import math
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from jaxrunner.kernels_pallas import mosaic
from jaxrunner.kernels_pallas.gated_mlp import SMEM_BYTES, each
from jaxrunner.kernels_pallas.matmul import COMPILER, ROWS
from jaxrunner.kernels_pallas.mosaic import TOO_OLD, Barrier, Index, Ref, Shaped
from jaxrunner.types import Array

TILE = 128  # tokens, and outputs, of a tile
TERMS = 128  # that share a scale
CONSUMERS = TILE // ROWS
REGISTERS = 232, 40  # of a thread that computes, and of one that copies
E4M3 = jnp.float8_e4m3fn


@dataclass(frozen=True)
class TuningConfig:
    """Sizes that change speed alone."""

    num_ctas: int = 132  # at most: an H200's
    stages: int = 6  # steps that are in shared memory
    together: int = 8  # tiles of tokens that are taken for one tile of outputs after another


class _Static(NamedTuple):
    """The compile-time parameters of the kernel."""

    tokens: int  # tiles
    outputs: int  # tiles
    steps: int
    run: int  # tiles of outputs that share a scale
    stages: int
    ctas: int
    together: int

    def item(self, block: Array, turn: Array) -> tuple[Array, Array]:
        """Returns the tile of tokens and the tile of outputs of a piece of work."""
        number, size = block + turn * self.ctas, self.together * self.outputs
        first, rest = lax.div(number, size), lax.rem(number, size)
        return first * self.together + lax.rem(rest, self.together), lax.div(rest, self.together)

    def rounds(self, block: Array) -> Array:
        """Returns how many pieces of work a block of the grid has."""
        return lax.div(self.tokens * self.outputs - block + self.ctas - 1, self.ctas)


def refuses(x: Shaped, x_scale: Shaped, weight: Shaped, scale: Shaped) -> str | None:
    """Says why x, [T, E], [T, E / 128], weight, [F, E], and scale, [F / run, E / 128], are not
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
    if x_scale.shape != (T, E // TERMS) or scale.shape[1] != E // TERMS:
        return f"wants a scale for {TERMS} terms, got {x_scale.shape} and {scale.shape}"
    if F % scale.shape[0] or F // scale.shape[0] % TILE:
        return f"wants a scale for a multiple of {TILE} outputs, got {scale.shape[0]} for {F}"
    return None


def fp8_blocks(
    x: Array, x_scale: Array, weight: Array, scale: Array, *, dtype: Any = jnp.bfloat16,
    config: TuningConfig = TuningConfig(),
) -> Array:  # fmt: skip
    """Returns x, [T, E], times weight, [F, E], both in float8_e4m3fn: [T, F] in `dtype`.

    x_scale: [T, E / 128], float32, of each token; scale: [F / run, E / 128], float32, of runs of
    outputs.

    Raises:
      ValueError: what `refuses` says.
    """
    if why := refuses(x, x_scale, weight, scale):
        raise ValueError(f"fp8_blocks {why}")
    (T, E), F = x.shape, weight.shape[0]
    tokens, outputs = -(-T // TILE), F // TILE
    size = jnp.dtype(dtype).itemsize
    stages = min(config.stages, (SMEM_BYTES - TILE * TILE * size) // (2 * TILE * TERMS))
    s = _Static(
        tokens, outputs, E // TERMS, outputs // scale.shape[0], stages,
        min(config.num_ctas, tokens * outputs), math.gcd(config.together, tokens),
    )  # fmt: skip
    # A token's scales lie beside those of others, and there are as many as tiles have tokens.
    x_scale = jnp.pad(x_scale.T, ((0, 0), (0, tokens * TILE - T)))
    layout = mosaic.tiled(TERMS, 1)
    return plgpu.kernel(
        functools.partial(_kernel, s),
        out_type=jax.ShapeDtypeStruct((T, F), dtype),
        scratch_types=dict(
            x_smem=plgpu.SMEM((stages, TILE, TERMS), E4M3, transforms=layout),
            w_smem=plgpu.SMEM((stages, TILE, TERMS), E4M3, transforms=layout),
            out_smem=plgpu.SMEM(
                (CONSUMERS, ROWS, TILE), dtype, transforms=mosaic.tiled(128 // size, size)
            ),
            full=plgpu.Barrier(num_arrivals=2, num_barriers=stages),
            free=plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=stages),
        ),
        grid=(s.ctas,), grid_names=("block",), num_threads=CONSUMERS + 1, thread_name="wg",
        kernel_name="fp8_blocks", compiler_params=COMPILER,
    )(x, x_scale, weight, scale)  # fmt: skip


def _kernel(
    s: _Static, x: Ref, x_scale: Ref, w: Ref, scale: Ref, out: Ref, *, x_smem: Ref, w_smem: Ref,
    out_smem: Ref, full: Barrier, free: Barrier,
) -> None:  # fmt: skip
    wg, block = lax.axis_index("wg"), lax.axis_index("block")

    @pl.when(wg < CONSUMERS)
    def _() -> None:
        plgpu.set_max_registers(REGISTERS[0], action="increase")
        plgpu.griddepcontrol_wait()
        _compute(s, wg, block, x_scale, scale, out, x_smem, w_smem, out_smem, full, free)

    @pl.when(wg == CONSUMERS)
    def _() -> None:
        plgpu.set_max_registers(REGISTERS[1], action="decrease")
        _fetch(s, block, x, w, x_smem, w_smem, full, free)


def _fetch(
    s: _Static, block: Array, x: Ref, w: Ref, x_smem: Ref, w_smem: Ref, full: Barrier,
    free: Barrier,
) -> None:  # fmt: skip
    """Copies tokens and weights, step by step of each tile."""

    def place(step: Index) -> tuple[Array, Array, Any, Array]:
        tokens, outputs = s.item(block, lax.div(step, s.steps))
        terms = pl.ds(lax.rem(step, s.steps) * TERMS, TERMS)
        return tokens, outputs, terms, lax.rem(step, s.stages)

    def weights(step: Index) -> None:
        _, tile, terms, slot = place(step)
        source = w.at[pl.ds(tile * TILE, TILE), terms]
        mosaic.copy_gmem_to_smem(source, w_smem.at[slot], full.at[slot])

    def tokens(step: Index) -> None:
        tile, _, terms, slot = place(step)
        source = x.at[pl.ds(tile * TILE, TILE), terms]
        mosaic.copy_gmem_to_smem(source, x_smem.at[slot], full.at[slot])

    def wait(step: Array) -> None:
        mosaic.barrier_wait(free.at[lax.rem(step, s.stages)])

    total = s.rounds(block) * s.steps
    ahead = jnp.minimum(s.stages, total)
    each(0, ahead, weights)
    plgpu.griddepcontrol_wait()
    plgpu.griddepcontrol_launch_dependents()
    each(0, ahead, tokens)
    each(ahead, total, wait, weights, tokens)


def _compute(
    s: _Static, wg: Array, block: Array, x_scale: Ref, scale: Ref, out: Ref, x_smem: Ref,
    w_smem: Ref, out_smem: Ref, full: Barrier, free: Barrier,
) -> None:  # fmt: skip
    """Sums up 64 tokens of each tile."""
    layout, mine, place = plgpu.Layout.WGMMA, pl.ds(wg * ROWS, ROWS), out_smem.at[wg]

    def one(turn: Array, _: None) -> None:
        tile, outputs = s.item(block, turn)
        first, row = tile * TILE + wg * ROWS, lax.div(outputs, s.run)

        def scales(step: Index) -> Array:
            own = x_scale.at[step, pl.ds(first, ROWS)]
            own = mosaic.load(own, layout=layout.reduce(1), optimized=False)
            return own * scale[row, step]

        def body(step: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
            total, now = carry
            slot = lax.rem(turn * s.steps + step, s.stages)
            mosaic.barrier_wait(full.at[slot])
            later = scales(jnp.minimum(step + 1, s.steps - 1))

            def multiply(acc: Ref) -> Array:
                mosaic.wgmma(acc, x_smem.at[slot, mine], w_smem.at[slot].T)
                return acc[...]

            y = pl.run_scoped(multiply, mosaic.ACC((ROWS, TILE), jnp.float32))
            mosaic.barrier_arrive(free.at[slot])
            wide = plgpu.layout_cast(lax.broadcast_in_dim(now, (ROWS, TILE), [0]), layout)
            return total + y * wide, later

        zeros = plgpu.layout_cast(jnp.zeros((ROWS, TILE), jnp.float32), layout)
        total = lax.fori_loop(0, s.steps, body, (zeros, scales(0)))[0]
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        place[...] = total.astype(out.dtype)
        plgpu.commit_smem()
        target = out.at[pl.ds(first, ROWS), pl.ds(outputs * TILE, TILE)]
        mosaic.copy_smem_to_gmem(place, target)
        return _

    lax.fori_loop(0, s.rounds(block), one, None)
    plgpu.wait_smem_to_gmem(0)
