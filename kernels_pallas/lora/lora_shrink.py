"""The first product of adapters, a x, for few tokens, on Hopper (Mosaic GPU).

A block of the grid computes some ranks of one adapter for 64 tokens, over a part of the sum: all
it reads is asked for at once, the adapter before the kernel that makes the tokens has ended. It
writes the rows that are of this adapter and no others. Of one token only its own adapter is read.
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
from jaxrunner.kernels_pallas.lora.lora_rows import ROWS, refuses_tokens, take_rows
from jaxrunner.kernels_pallas.mosaic import TOO_OLD, Barrier, Ref, Shaped
from jaxrunner.kernels_pallas.products.matmul import COMPILER
from jaxrunner.kernels_pallas.stores import put_rows, put_some_rows
from jaxrunner.types import Array

STEP = 64  # terms of a sum that a step takes: 128 bytes, the widest swizzle


@dataclass(frozen=True)
class TuningConfig:
    """Sizes that change speed alone."""

    num_ctas: int = 132  # that parts of sums are made for: an H200's multiprocessors
    least: int = 7  # steps of a part: with fewer, the parts take longer to read than they save
    most: int = 16  # steps of a part: all are in shared memory
    max_parts: int = 16


class Static(NamedTuple):
    """The compile-time parameters of the kernel."""

    T: int
    places: int  # of which a block takes one; 1 for one token
    ranks: int  # of a block
    tiles: int  # of ranks in a place
    parts: int
    steps: int  # of a part

    @property
    def rows(self) -> int:
        """Tokens of a block."""
        return min(self.T, ROWS)


def refuses(
    x: Shaped, a: Shaped, place: Shaped, config: TuningConfig = TuningConfig()
) -> str | None:
    """Says why x, [T, I], a, [blocks, places, rank, I], and place, [T], are not served, or None."""
    T, width = x.shape
    if TOO_OLD is not None:
        return TOO_OLD
    if x.dtype not in (jnp.bfloat16, jnp.float16) or a.dtype != x.dtype:
        return f"wants one dtype, bfloat16 or float16, got {x.dtype} and {a.dtype}"
    if reason := refuses_tokens(T, place):
        return reason
    if a.shape[-1] != width or width % STEP:
        return f"wants sums of a multiple of {STEP} terms, got {width} and {a.shape[-1]}"
    if a.shape[2] % 8:
        return f"wants ranks in eights, got {a.shape[2]}"
    if not _fit(T, a.shape, config).parts:
        return f"wants sums that can be cut into parts of at most {config.most * STEP}, got {width}"
    return None


def _fit(T: int, shape: tuple[int, ...], config: TuningConfig) -> Static:
    """Shares the work out; into 0 parts where it cannot."""
    blocks, places, rank, width = shape
    ranks = 16 if rank % 16 == 0 else 8
    tiles, steps = rank // ranks, width // STEP
    num = blocks * tiles * -(-T // ROWS) * (places if T > 1 else 1)
    sizes = [n for n in range(1, steps + 1) if steps % n == 0 and steps // n <= config.most]
    limit = min(config.num_ctas // num, config.max_parts)
    good = [n for n in sizes if n <= limit and steps // n >= config.least]
    parts = max(good, default=min(sizes, default=0))
    return Static(T, places if T > 1 else 1, ranks, tiles, parts, steps // max(parts, 1))


def lora_shrink(x: Array, a: Array, place: Array, config: TuningConfig = TuningConfig()) -> Array:
    """Returns parts whose sum is a x of each token's own adapter: [parts, T, blocks * rank].

    x: [T, I]; a: [blocks, places, rank, I]; place: [T], int32, of a token's adapter, plus one.
    Rows of a token without adapter, 0, are anything. In float32.

    Raises:
      ValueError: what `refuses` says.
    """
    if why := refuses(x, a, place, config):
        raise ValueError(f"lora_shrink {why}")
    T, blocks, rank = x.shape[0], a.shape[0], a.shape[2]
    s = _fit(T, a.shape, config)
    layout = mosaic.tiled(STEP, 2)
    # A product reads 64 rows: behind the tokens of a step are those of another.
    rows = (s.steps - 1) * s.rows + ROWS if T > 1 else 8
    return plgpu.kernel(
        functools.partial(_kernel, s),
        out_type=jax.ShapeDtypeStruct((s.parts, T, blocks * rank), jnp.float32),
        scratch_types=dict(
            x_smem=plgpu.SMEM((rows, STEP), x.dtype, transforms=layout),
            a_smem=plgpu.SMEM((s.steps, s.ranks, STEP), x.dtype, transforms=layout),
            full=plgpu.Barrier(num_arrivals=1 + (T > 1), num_barriers=s.steps),
        ),
        grid=(s.parts, blocks * s.places * s.tiles, -(-T // ROWS)),
        grid_names=("part", "tile", "m"),
        kernel_name="lora_shrink", compiler_params=COMPILER,
    )(x, a, place)  # fmt: skip


def _kernel(
    s: Static, x: Ref, a: Ref, place: Ref, out: Ref, *, x_smem: Ref, a_smem: Ref, full: Barrier
) -> None:
    part, tile, m = (lax.axis_index(name) for name in ("part", "tile", "m"))
    block, tile = lax.div(tile, s.places * s.tiles), lax.rem(tile, s.places * s.tiles)
    p, tile = lax.div(tile, s.tiles), lax.rem(tile, s.tiles)
    rows, rank = pl.ds(m * s.rows, s.rows), s.tiles * s.ranks

    def terms(step: int) -> Any:
        return pl.ds((part * s.steps + step) * STEP, STEP)

    def adapter(p: Array) -> None:
        for step in range(s.steps):
            source = a.at[block, p, pl.ds(tile * s.ranks, s.ranks), terms(step)]
            mosaic.copy_gmem_to_smem(source, a_smem.at[step], full.at[step])

    def tokens(step: int) -> Ref | Array:
        if s.T == 1:
            return take_rows(x.at[:, terms(step)])
        return x_smem.at[pl.ds(step * s.rows, ROWS)]

    def multiply(acc: Ref) -> Array:
        for step in range(s.steps):
            left = tokens(step)
            mosaic.barrier_wait(full.at[step])
            mosaic.wgmma(acc, left, a_smem.at[step].T)
        return acc[...]

    if s.T > 1:
        adapter(p)
    plgpu.griddepcontrol_wait()
    plgpu.griddepcontrol_launch_dependents()
    if s.T == 1:
        adapter(jnp.maximum(place[0] - 1, 0))
    else:
        for step in range(s.steps):
            target = x_smem.at[pl.ds(step * s.rows, s.rows)]
            mosaic.copy_gmem_to_smem(x.at[rows, terms(step)], target, full.at[step])
    y = pl.run_scoped(multiply, mosaic.ACC((ROWS, s.ranks), jnp.float32))
    target = out.at[part, rows, pl.ds(block * rank + tile * s.ranks, s.ranks)]
    if s.T == 1:
        put_rows(y, target)
    else:
        put_some_rows(y, target, place.at[rows], p + 1)
