"""The units of a gated MLP from tokens and weights in fp8, rounded to fp8, on Hopper (Mosaic GPU).

A tile of `fp8_tiles` has 128 gates and what they gate of the same tokens, so that SwiGLU, and the
scale that 128 units share, are found in registers, and neither product is written. The units come
out as `fp8_rounding` makes them of both products, but for an approximate exponential: the numbers
that the next product multiplies. Of tokens that are pairs (`fp8_bands`) they come as pairs.
"""

import functools
from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from jaxrunner.kernels_pallas import mosaic
from jaxrunner.kernels_pallas.mosaic import Ref, Shaped
from jaxrunner.kernels_pallas.products.matmul import COMPILER, ROWS
from jaxrunner.kernels_pallas.quantized import fp8_bands, fp8_tiles
from jaxrunner.kernels_pallas.quantized.fp8_rounding import rounded, swiglu
from jaxrunner.kernels_pallas.quantized.fp8_tiles import (
    DEFAULT,
    E4M3,
    GROUPS,
    HEIGHT,
    TILE,
    Held,
    Item,
    Tiles,
    TuningConfig,
)
from jaxrunner.kernels_pallas.quantized.quantized_steps import HALF
from jaxrunner.kernels_pallas.stores import put
from jaxrunner.types import Array


def refuses(x: Shaped, x_scale: Shaped, weight: Shaped, scale: Shaped) -> str | None:
    """Says why x, [T, E], x_scale, [E / 128, T or more], weight, [2 * F, E], and scale,
    [2 * F / run, E / 128], are not served, or None."""
    if (reason := fp8_tiles.refuses(x, x_scale, weight, scale)) is not None:
        return reason
    if weight.shape[0] % (2 * TILE):
        return f"wants gates in multiples of {TILE}, got {weight.shape[0]} gates and units"
    return None


def fp8_gates(
    x: Array, x_scale: Array, weight: Array, scale: Array, *, dtype: Any = jnp.bfloat16,
    pairs: bool = False, config: TuningConfig = DEFAULT, interpret: Any = None,
) -> tuple[Array, Array]:  # fmt: skip
    """Returns the units of x, [T, E], in float8_e4m3fn, [T, F], and scales, [F / 128, T or more].

    The latter are of whole tiles of tokens, as Mosaic copies a part of one row without regard to
    the row's end.
    weight: [2 * F, E] in float8_e4m3fn, gates first; x_scale and scale: as `fp8_blocks` takes them.
    dtype: what products, activations and units are rounded to on the way. pairs: whether rows are
    those of pairs, of x and of the units. interpret: parameters of Pallas' interpreter; None on a
    GPU. SwiGLU: arXiv:2002.05202.

    Raises:
      ValueError: what `refuses` says, or sums in parts, or one tile at once, are asked for.
    """
    (T, E), F = x.shape, weight.shape[0] // 2
    if why := refuses(x, x_scale, weight, scale):
        raise ValueError(f"fp8_gates {why}")
    if config.parts != 1 or config.halves not in (0, 2):
        given = f"parts={config.parts} and halves={config.halves}"
        raise ValueError(f"fp8_gates wants parts=1 and halves=2, or 0, got {given}")
    s = fp8_tiles.fit(T, E, F, 2 * F // scale.shape[0], TILE + 4, config, 2, gap=F // TILE)
    return plgpu.kernel(
        functools.partial(_kernel, s, jnp.dtype(dtype), pairs, interpret is None),
        out_type=(
            jax.ShapeDtypeStruct((T, F), E4M3),
            jax.ShapeDtypeStruct((F // TILE, s.tokens * HEIGHT), jnp.float32),
        ),
        scratch_types=fp8_tiles.scratch(s) | dict(
            out_smem=plgpu.SMEM((GROUPS, ROWS, TILE), E4M3, transforms=mosaic.tiled(TILE, 1)),
            scale_smem=plgpu.SMEM((GROUPS, ROWS), jnp.float32),
        ),
        **fp8_tiles.grid(s),
        kernel_name="fp8_gates_of_pairs" if pairs else "fp8_gates", compiler_params=COMPILER,
        interpret=interpret,
    )(x, x_scale, weight, fp8_tiles.padded(scale))  # fmt: skip


def _kernel(
    s: Tiles, dtype: jnp.dtype, pairs: bool, is_device: bool, x: Ref, x_scale: Ref, w: Ref,
    scale: Ref, numbers: Ref, scales: Ref, *, out_smem: Ref, scale_smem: Ref, **smem: Any,
) -> None:  # fmt: skip
    def units(totals: list[Array]) -> Array:
        gate, unit = (total.astype(dtype).astype(jnp.float32) for total in totals)
        return swiglu(gate, unit, dtype)

    def leave(wg: Array, at: Item, totals: list[Array]) -> None:
        if pairs:
            sums = [fp8_bands.fold(total, is_device=is_device) for total in totals]
            *both, own = fp8_bands.paired(units(sums), HALF)
            found = fp8_bands.unfold(*both, is_device=is_device)
            own = fp8_bands.unfold(own, own, is_device=is_device)
        else:
            found, own = rounded(units(totals), plgpu.Layout.WGMMA)
        place, scale_place = out_smem.at[wg], scale_smem.at[wg]
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        put(place, found)
        put(scale_place, own)
        plgpu.commit_smem()
        rows = pl.ds(at.tokens * HEIGHT + wg * ROWS, ROWS)
        mosaic.copy_smem_to_gmem(place, numbers.at[rows, pl.ds(at.outputs * TILE, TILE)])
        mosaic.copy_smem_to_gmem(scale_place, scales.at[at.outputs, rows])

    fp8_tiles.run(s, is_device, x, x_scale, w, scale, Held(**smem), leave)
