"""A residual addition, the RMSNorm of its result, and the norm as pairs of fp8 (Mosaic GPU).

What `add_rms_norm` and `fp8_pairs` do one after the other, in one kernel.
"""

import functools
from typing import Any

import jax
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from jaxrunner.kernels_pallas import mosaic, pdl
from jaxrunner.kernels_pallas.mosaic import Barrier, Ref, Shaped
from jaxrunner.kernels_pallas.products import add_norm
from jaxrunner.kernels_pallas.quantized import fp8_pairs
from jaxrunner.kernels_pallas.quantized.fp8_tiles import E4M3
from jaxrunner.kernels_pallas.stores import put
from jaxrunner.types import Array


def refuses(x: Shaped, residual: Shaped, weight: Shaped) -> str | None:
    """Says why x, [T, E], residual, [T, E] or parts of it, and weight, [E], are not served."""
    return add_norm.refuses(x, residual, weight) or fp8_pairs.refuses(x)


def add_norm_pairs(
    x: Array, residual: Array, weight: Array, *, eps: float, one_more: bool = False,
    interpret: Any = None,
) -> tuple[Array, Array, Array]:  # fmt: skip
    """Returns x + residual, [T, E], and its RMSNorm as `fp8_pairs` returns it.

    residual, weight, eps and one_more are as for `add_rms_norm`, whose norm it is. interpret:
    parameters of Pallas' interpreter; None on a GPU. arXiv:1910.07467.

    Raises:
      ValueError: what `refuses` says.
    """
    if why := refuses(x, residual, weight):
        raise ValueError(f"add_norm_pairs {why}")
    (T, E), cut = x.shape, add_norm.cut_rows(x.shape[1])
    total, numbers, scale = plgpu.kernel(
        functools.partial(_kernel, interpret is None, eps=eps, one_more=one_more),
        out_type=(
            jax.ShapeDtypeStruct((T, *cut), x.dtype), jax.ShapeDtypeStruct((2, T, *cut), E4M3),
            jax.ShapeDtypeStruct((T,), jnp.float32),
        ),
        scratch_types=(
            plgpu.SMEM((1, *cut[:2]), jnp.float32), plgpu.SMEM((1, *cut[:2]), jnp.float32),
            plgpu.Barrier(num_arrivals=cut[0], num_barriers=2),
        ),
        grid=(T,), grid_names=("row",), num_threads=cut[0], thread_name="group",
        kernel_name="add_norm_pairs",
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True, **pdl.spread(T)),
        interpret=interpret,
    )(x.reshape(T, *cut), add_norm.in_parts(residual, cut), weight.reshape(cut))  # fmt: skip
    return total.reshape(T, E), numbers.reshape(2, T, E), scale


def _kernel(
    is_device: bool, x_ref: Ref, residual_ref: Ref, weight_ref: Ref, total_ref: Ref, out_ref: Ref,
    scale_ref: Ref, part_smem: Ref, most_smem: Ref, barriers: Barrier, *, eps: float,
    one_more: bool,
) -> None:  # fmt: skip
    _, _, warps, width = x_ref.shape
    row, group = lax.axis_index("row"), lax.axis_index("group")
    layout = add_norm.layout_of(warps * width)
    load = functools.partial(mosaic.load, layout=layout, optimized=False)
    weight = load(weight_ref.at[group])
    pdl.begin(is_device)
    x = add_norm.read_sum(x_ref, residual_ref, row, group, load)
    put(total_ref.at[row, group], x)
    normed = add_norm.normed(x, weight, group, part_smem, barriers, eps=eps, one_more=one_more)
    wide, last = normed.astype(jnp.float32), barriers.at[1]
    fp8_pairs.leave(wide, row, group, out_ref, scale_ref, most_smem, last, is_device)
