"""A residual addition, the RMSNorm of its result, and the norm in fp8, in one kernel (Mosaic GPU).

What `add_rms_norm` and `fp8_rounding` do one after the other, without writing the norm as floats:
128 numbers of a row have a scale of their own, and lie in half a warp. Or the norm comes as pairs
of fp8 in bands of rows (`fp8_bands`).
"""

import functools
from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from jaxrunner.kernels_pallas import mosaic, pdl
from jaxrunner.kernels_pallas.mosaic import Barrier, Ref, Shaped
from jaxrunner.kernels_pallas.products import add_norm
from jaxrunner.kernels_pallas.quantized import fp8_bands
from jaxrunner.kernels_pallas.quantized.fp8_rounding import LAYOUT, rounded
from jaxrunner.kernels_pallas.quantized.fp8_tiles import E4M3, TERMS
from jaxrunner.kernels_pallas.stores import put
from jaxrunner.types import Array

ROWS = 8, 16  # of 128 numbers, that a warpgroup holds
WIDTH = 1024  # of a warpgroup, at least


def refuses(
    x: Shaped, residual: Shaped, weight: Shaped, *, pairs: bool = False
) -> str | None:  # fmt: skip
    """Says why x, [T, E], residual, [T, E] or parts of it, and weight, [E], are not served."""
    if (reason := add_norm.refuses(x, residual, weight)) is not None:
        return reason
    if pairs and (reason := fp8_bands.refuses(x)) is not None:
        return reason
    if mosaic.TOO_OLD is not None:
        return mosaic.TOO_OLD
    if x.shape[1] % WIDTH or _cut(x.shape[1]) is None:
        return f"wants rows of a multiple of {WIDTH} numbers that 8 warpgroups hold, got {x.shape}"
    return None


def add_norm_fp8(
    x: Array, residual: Array, weight: Array, *, eps: float, one_more: bool = False,
    pairs: bool = False, interpret: Any = None,
) -> tuple[Array, Array, Array]:  # fmt: skip
    """Returns x + residual, [T, E], and its RMSNorm as `fp8_rounding` returns it.

    The latter are numbers in float8_e4m3fn, [T, E], and scales in float32, [E / 128, T]; those of
    `pairs` are in bands of 2 * T rows (`fp8_bands`). residual, weight, eps and one_more are as for
    `add_rms_norm`, whose norm is what is rounded. interpret: parameters of Pallas' interpreter;
    None on a GPU. arXiv:1910.07467.

    Raises:
      ValueError: what `refuses` says.
    """
    if why := refuses(x, residual, weight, pairs=pairs):
        raise ValueError(f"add_norm_fp8 {why}")
    (T, E), lines = x.shape, x.shape[0] * (2 if pairs else 1)
    cut = _cut(E)
    assert cut is not None
    groups, rows, _ = cut
    total, numbers, scale = plgpu.kernel(
        functools.partial(_kernel, interpret is None, eps=eps, one_more=one_more, pairs=pairs),
        out_type=(
            jax.ShapeDtypeStruct((T, *cut), x.dtype), jax.ShapeDtypeStruct((lines, *cut), E4M3),
            jax.ShapeDtypeStruct((groups, rows, lines), jnp.float32),
        ),
        scratch_types=(
            plgpu.SMEM((1, groups, rows), jnp.float32),
            plgpu.Barrier(num_arrivals=groups, num_barriers=1),
        ),
        grid=(T,), grid_names=("row",), num_threads=groups, thread_name="group",
        kernel_name="add_norm_bands" if pairs else "add_norm_fp8",
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True, **pdl.spread(T)),
        interpret=interpret,
    )(x.reshape(T, *cut), add_norm.in_parts(residual, cut), weight.reshape(cut))  # fmt: skip
    return total.reshape(T, E), numbers.reshape(lines, E), scale.reshape(E // TERMS, lines)


def _cut(E: int) -> tuple[int, int, int] | None:
    """Returns the shape of a row of E: warpgroups, rows of each, and their numbers."""
    fits = (
        (E // (rows * TERMS), rows, TERMS) for rows in reversed(ROWS) if E % (rows * TERMS) == 0
    )
    return next((cut for cut in fits if cut[0] <= add_norm.MAX_GROUPS), None)


def _kernel(
    is_device: bool, x_ref: Ref, residual_ref: Ref, weight_ref: Ref, total_ref: Ref, out_ref: Ref,
    scale_ref: Ref, part_smem: Ref, barriers: Barrier, *, eps: float, one_more: bool, pairs: bool,
) -> None:  # fmt: skip
    row, group = lax.axis_index("row"), lax.axis_index("group")
    load = functools.partial(mosaic.load, layout=LAYOUT, optimized=False)
    weight = load(weight_ref.at[group])
    pdl.begin(is_device)
    x = add_norm.read_sum(x_ref, residual_ref, row, group, load)
    put(total_ref.at[row, group], x)
    normed = add_norm.normed(x, weight, group, part_smem, barriers, eps=eps, one_more=one_more)
    normed = normed.astype(jnp.float32)
    *found, scale = (fp8_bands.paired if pairs else rounded)(normed, LAYOUT)
    places = fp8_bands.rows(row) if pairs else [row]
    for place, numbers in zip(places, found, strict=True):
        put(out_ref.at[place, group], numbers)
        put(scale_ref.at[group, pl.ds(0, scale.shape[0]), place], scale)
