"""The second product of adapters, b (a x), added to what a base product gave, on Hopper (Mosaic).

A block of the grid computes some outputs of 64 tokens. It sums up the parts of a x, [64, rank],
and multiplies them with the adapters' ranks one behind the other: in registers each token has its
own values in the place of its adapter, and zeros in those of others. The adapters are on their way
before the kernel that makes a x has ended. Of one token only its own adapter is read.
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
from jaxrunner.kernels_pallas.lora.lora_rows import (
    ROWS,
    own,
    refuses_gates,
    refuses_tokens,
    side_by_side,
    take_places,
    take_rows,
    total,
)
from jaxrunner.kernels_pallas.mosaic import TOO_OLD, Barrier, Ref, Shaped
from jaxrunner.kernels_pallas.products.matmul import COMPILER, gated
from jaxrunner.kernels_pallas.stores import put_rows
from jaxrunner.types import Array

MAX_RANK = 192  # that registers hold, of one block of outputs
SMEM_BYTES = 224 * 1024  # of a block, less what barriers need


@dataclass(frozen=True)
class TuningConfig:
    """Sizes that change speed alone."""

    tile: int = 64  # outputs of a block


class _Static(NamedTuple):
    """The compile-time parameters of the kernel."""

    T: int
    blocks: int  # that a block of the grid computes: 2 of a gated MLP
    ranks: int  # of a block, over all places, or of one place for one token
    rank: int  # of a place
    tile: int

    @property
    def rows(self) -> int:
        """Tokens of a block."""
        return min(self.T, ROWS)

    @property
    def unit(self) -> int:
        """Ranks of a step of the product, whose bytes are the swizzle."""
        return next(n for n in (64, 32, 16) if self.ranks % n == 0)

    @property
    def width(self) -> int:
        """Ranks that are masked at a time: they are of one place."""
        return 16 if self.rank % 16 == 0 else 8


def refuses(
    y: Shaped, b: Shaped, place: Shaped, config: TuningConfig = TuningConfig()
) -> str | None:
    """Says why these are not served, or None.

    y: [T, N], or [parts, T, N] in float32; b: [blocks, places, rank, N / blocks]; place: [T].
    """
    (T, N), (blocks, _, _, width) = y.shape[-2:], b.shape
    if y.dtype != (b.dtype if y.ndim == 2 else jnp.float32):
        return f"wants products in {b.dtype}, or their parts in float32, got {y.dtype}"
    if blocks * width != N:
        return f"wants {N} outputs, got {blocks} x {width}"
    return _refuses(T, b, place, config)


def refuses_units(
    y: Shaped, b: Shaped, place: Shaped, config: TuningConfig = TuningConfig()
) -> str | None:
    """Says why these are not served, as `refuses` does; y: [T, 2, F]."""
    return refuses_gates(y, b) or _refuses(y.shape[0], b, place, config)


def _refuses(T: int, b: Shaped, place: Shaped, config: TuningConfig) -> str | None:
    _, places, rank, width = b.shape
    if TOO_OLD is not None:
        return TOO_OLD
    if b.dtype not in (jnp.bfloat16, jnp.float16):
        return f"wants adapters in bfloat16 or float16, got {b.dtype}"
    if reason := refuses_tokens(T, place):
        return reason
    ranks = rank if T == 1 else places * rank
    if rank % 8 or ranks % 16 or rank > MAX_RANK:
        return f"wants ranks in eights, at most {MAX_RANK}, together in sixteens, got {rank}"
    if width % config.tile:
        return f"wants outputs in tiles of {config.tile}, got {width}"
    if 4 * ranks * config.tile > SMEM_BYTES:
        return f"wants at most {SMEM_BYTES // (4 * config.tile)} ranks of all places, got {ranks}"
    return None


def _refuses_low(low: Shaped, b: Shaped, place: Shaped) -> str | None:
    wanted = place.shape[0], b.shape[0] * b.shape[2]
    if low.shape[1:] != wanted or low.dtype != jnp.float32:
        return f"wants parts of {list(wanted)} in float32, got {low.shape} in {low.dtype}"
    return None


def lora_expand(
    y: Array, low: Array, b: Array, place: Array, config: TuningConfig = TuningConfig(),
    *, whole: bool = False,
) -> Array:  # fmt: skip
    """Returns y, a base product, with what adapters add; written in place where y is given up.

    y: [T, N], or parts of a sum, [parts, T, N] in float32, of which the first one gains it; where
    the `whole` sum is wanted, that is returned, [T, N] in the dtype of b.
    low: parts of a x, [parts, T, blocks * rank], as `lora_shrink` returns them; b: [blocks, places,
    rank, N / blocks]; place: [T], int32, of a token's adapter, plus one, 0 for none. Sums are of
    float32.

    Raises:
      ValueError: what `refuses` says.
    """
    if why := refuses(y, b, place, config) or _refuses_low(low, b, place):
        raise ValueError(f"lora_expand {why}")
    (T, N), blocks = y.shape[-2:], b.shape[0]
    s = _static(T, b, 1, config)

    def kernel(low: Ref, b: Ref, place: Ref, y: Ref, out: Ref, b_smem: Ref, full: Barrier) -> None:
        block, tile, m = (lax.axis_index(name) for name in ("block", "tile", "m"))
        rows, width = pl.ds(m * s.rows, s.rows), b.shape[-1]
        columns = pl.ds(block * width + tile * s.tile, s.tile)
        (more,) = _products(s, low, b, place.at[rows], b_smem, full, block)
        num = y.shape[0] if whole and len(y.shape) == 3 else 1
        parts = [
            y.at[i, rows, columns] if len(y.shape) == 3 else y.at[rows, columns] for i in range(num)
        ]
        base = total([take_rows(part).astype(jnp.float32) for part in parts])
        target = out.at[rows, columns] if len(out.shape) == 2 else out.at[0, rows, columns]
        put_rows((base + more()).astype(out.dtype), target)

    if whole:
        out = jax.ShapeDtypeStruct((T, N), b.dtype)
        return _call(kernel, "lora_expand", s, blocks, out)(low, b, place, y)
    out = jax.new_ref(y)

    def in_place(low: Ref, b: Ref, place: Ref, out: Ref, b_smem: Ref, full: Barrier) -> None:
        kernel(low, b, place, out, out, b_smem, full)

    _call(in_place, "lora_expand", s, blocks, ())(low, b, place, out)
    return jax.freeze(out)


def lora_units(
    y: Array, low: Array, b: Array, place: Array, config: TuningConfig = TuningConfig()
) -> Array:
    """Returns the units of a gated MLP, [T, F], of its base products, [T, 2, F], and adapters.

    The rest as of `lora_expand`, in two blocks. Nothing is rounded before the units are.
    arXiv:2002.05202.

    Raises:
      ValueError: what `refuses_units` says.
    """
    if why := refuses_units(y, b, place, config) or _refuses_low(low, b, place):
        raise ValueError(f"lora_units {why}")
    T, _, F = y.shape
    s = _static(T, b, 2, config)

    def kernel(y: Ref, low: Ref, b: Ref, place: Ref, out: Ref, b_smem: Ref, full: Barrier) -> None:
        tile, m = (lax.axis_index(name) for name in ("tile", "m"))
        rows, columns = pl.ds(m * s.rows, s.rows), pl.ds(tile * s.tile, s.tile)
        products = _products(s, low, b, place.at[rows], b_smem, full, 0)
        bases = [take_rows(y.at[rows, i, columns]) for i in range(2)]  # likewise
        gate, up = (
            base.astype(jnp.float32) + more() for base, more in zip(bases, products, strict=True)
        )
        put_rows(gated(gate, up, "silu").astype(out.dtype), out.at[rows, columns])

    out = jax.ShapeDtypeStruct((T, F), y.dtype)
    return _call(kernel, "lora_units", s, 1, out)(y, low, b, place)


def _static(T: int, b: Array, blocks: int, config: TuningConfig) -> _Static:
    _, places, rank, _ = b.shape
    return _Static(T, blocks, rank if T == 1 else places * rank, rank, config.tile)


def _call(
    kernel: Callable[..., None], name: str, s: _Static, blocks: int, out: Any
) -> Callable[..., Array]:
    def run(*args: Array) -> Array:
        at = next(i for i, x in enumerate(args) if x.ndim == 4)
        b = args[at]
        tiles = b.shape[-1] // s.tile
        if s.T > 1:  # places one behind the other
            b = b.reshape(b.shape[0], 1, -1, b.shape[-1])
        return plgpu.kernel(
            kernel,
            out_type=out,
            scratch_types=dict(
                b_smem=plgpu.SMEM(
                    (s.blocks, s.ranks, s.tile), b.dtype, transforms=mosaic.tiled(s.unit, 2)
                ),
                full=plgpu.Barrier(num_arrivals=1, num_barriers=s.blocks),
            ),
            grid=(blocks, tiles, -(-s.T // ROWS)), grid_names=("block", "tile", "m"),
            kernel_name=name, compiler_params=COMPILER,
        )(*args[:at], b, *args[at + 1 :])  # fmt: skip

    return run


def _products(
    s: _Static, low: Ref, b: Ref, place: Ref, b_smem: Ref, full: Barrier, first: Array | int
) -> list[Callable[[], Array]]:
    """Asks for the adapters, and returns what computes what they add to outputs, [64, tile].

    Of each of the blocks of outputs from `first` on.
    """
    tile, m = lax.axis_index("tile"), lax.axis_index("m")

    def fetch(p: Array | int) -> None:
        for i in range(s.blocks):
            source = b.at[first + i, p, :, pl.ds(tile * s.tile, s.tile)]
            mosaic.copy_gmem_to_smem(source, b_smem.at[i], full.at[i])

    if s.T > 1:
        fetch(0)
    plgpu.griddepcontrol_wait()
    plgpu.griddepcontrol_launch_dependents()
    if s.T == 1:
        fetch(jnp.maximum(place[0] - 1, 0))
    places = take_places(place, s.width)
    rows = pl.ds(m * s.rows, s.rows)

    def chunks(i: int) -> list[Array]:
        """Sums up the parts of a x, some ranks at a time."""
        starts = [(first + i) * s.rank + n for n in range(0, s.rank, s.width)]
        return [
            total(
                [
                    take_rows(low.at[part, rows, pl.ds(start, s.width)])
                    for part in range(low.shape[0])
                ]
            )
            for start in starts
        ]

    sums = [chunks(i) for i in range(s.blocks)]  # all are asked for before the first product

    def product(i: int) -> Array:
        def left(start: int) -> Array:
            """Returns some ranks of all places, from `start` on: a token's own or zeros."""
            p, at = divmod(start, s.rank)
            x = sums[i][at // s.width]
            if s.T == 1:
                return jnp.where(places > 0, x, jnp.zeros_like(x)).astype(b.dtype)
            return own(places, p + 1, x).astype(b.dtype)

        def multiply(acc: Ref) -> Array:
            for start in range(0, s.ranks, s.unit):
                some = [left(n) for n in range(start, start + s.unit, s.width)]
                if start == 0:
                    mosaic.barrier_wait(full.at[i])
                mosaic.wgmma(acc, side_by_side(some), b_smem.at[i, pl.ds(start, s.unit)])
            return acc[...]

        return pl.run_scoped(multiply, mosaic.ACC((ROWS, s.tile), jnp.float32))

    return [functools.partial(product, i) for i in range(s.blocks)]
