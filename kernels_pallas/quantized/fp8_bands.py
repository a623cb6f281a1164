"""Pairs of fp8 (`fp8_pairs`) as rows of a product, with a scale for 128 terms (Mosaic GPU).

Pairs of T tokens are 2 * T rows in bands: the upper numbers of eight tokens, then their lower ones;
both rows of a token have its scales. So `fp8_tiles` multiplies them as it does tokens that are
rounded to fp8, and a thread has both sums of a token in its registers and adds them up. A kernel
that makes pairs needs no more of a token than the 128 terms that share a scale.
"""

from typing import Any

from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np

from jaxrunner.kernels_pallas import mosaic
from jaxrunner.kernels_pallas.mosaic import Layout, Shaped
from jaxrunner.kernels_pallas.quantized.fp8_pairs import EXPONENT, LEAST, TOP, masked, split
from jaxrunner.kernels_pallas.quantized.quantized_steps import HALF, halves
from jaxrunner.types import Array

SIDE = 8  # tokens of a band


def refuses(x: Shaped) -> str | None:
    """Says why tokens, [T, E], do not come in bands, or None."""
    if x.dtype != jnp.bfloat16:
        return f"wants pairs of bfloat16, got {x.dtype}"
    if x.shape[0] % SIDE:
        return f"wants bands of {SIDE} tokens, got {x.shape[0]}"
    return None


def rows(token: Array) -> tuple[Array, Array]:
    """Returns the rows of a token's upper and lower numbers."""
    upper = token + lax.div(token, SIDE) * SIDE
    return upper, upper + SIDE


def paired(wide: Array, layout: Layout) -> tuple[Array, Array, Array]:
    """Returns 128 terms of tokens, [tokens, 128] in float32, as pairs, and their scales, [tokens].

    The sum of a pair times the scale, which is a power of two, is the number.
    """
    most = jnp.maximum(jnp.maximum(wide, -wide).max(1), LEAST)
    power = masked(most, EXPONENT) * 2.0**-TOP
    by_term = lax.broadcast_in_dim(1 / power, wide.shape, [0])
    return *split(wide * plgpu.layout_cast(by_term, layout)), power


def fold(x: Array, *, is_device: bool) -> Array:
    """Adds the rows of pairs up: of x, [64, n] in float32 as products lie, [32, n] in `HALF`."""
    if not is_device:  # an interpreter of kernels knows no registers
        return x.reshape(-1, 2, SIDE, x.shape[1]).sum(1).reshape(-1, x.shape[1])
    upper, lower = halves(x)
    return upper + lower


def unfold(upper: Array, lower: Array, *, is_device: bool) -> Array:
    """Returns the rows of pairs, [64, n] or [64], of both numbers in `HALF`, [32, n] or [32]."""
    shape = upper.shape[0] * 2, *upper.shape[1:]
    if not is_device:
        bands = [x.reshape(-1, 1, SIDE, *shape[1:]) for x in (upper, lower)]
        return jnp.concatenate(bands, 1).reshape(shape)
    half, whole = HALF, plgpu.Layout.WGMMA
    if upper.ndim == 1:
        half, whole = half.reduce(1), whole.reduce(1)
    out = plgpu.ShapeDtypeStruct(shape, upper.dtype, layout=whole)

    @mosaic.inline_mgpu(arg_types=(half, half), return_type=out)
    def merge(
        _: Any, upper: mgpu.FragmentedArray, lower: mgpu.FragmentedArray
    ) -> mgpu.FragmentedArray:
        kind = whole.to_mgpu()
        both = np.stack([upper.registers.ravel(), lower.registers.ravel()], -1)
        registers = both.reshape(kind.registers_shape(shape))
        return mgpu.FragmentedArray(_registers=registers, _layout=kind, _is_signed=None)

    return merge(upper, lower)
