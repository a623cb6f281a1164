"""Tokens rounded to fp8, 128 terms with a scale of their own (Mosaic GPU).

What `fp8_blocks` multiplies, in one kernel: each token is read once, where plain JAX reads it for
the largest of its numbers and again to divide them. The units of a gated MLP are rounded as they
come from their product, and are never written as floats. DeepSeek-V3, arXiv:2412.19437.
"""

import functools
from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from jaxrunner.kernels_pallas import mosaic, pdl
from jaxrunner.kernels_pallas.mosaic import TOO_OLD, Layout, Ref, Shaped
from jaxrunner.kernels_pallas.quantized.fp8_tiles import E4M3, TERMS
from jaxrunner.kernels_pallas.stores import put
from jaxrunner.quantization.activations import LEAST
from jaxrunner.quantization.scheme import CODES
from jaxrunner.types import Array

LARGEST = CODES["float8_e4m3fn"].most
MIN_BLOCKS = 256  # of the grid, where so many can be: two a multiprocessor
MAX_TOKENS, EIGHT = 64, 8  # of a block of the grid
# Half a warp has the terms of a scale, eight a thread: what it reads at once.
LAYOUT: Layout = plgpu.Layout.TILED(
    plgpu.Tiling(((EIGHT, TERMS), (2, TERMS), (8,))), (-5,), (-3, -2), -1
)


def refuses(x: Shaped) -> str | None:
    """Says why x, [T, E], or gates and units, [T, 2, E], are not served, or None."""
    if TOO_OLD is not None:
        return TOO_OLD
    if x.dtype not in (jnp.bfloat16, jnp.float16):
        return f"wants tokens in bfloat16 or float16, got {x.dtype}"
    if x.shape[0] % EIGHT or x.shape[-1] % TERMS:
        return f"wants multiples of {EIGHT} tokens and of {TERMS} terms, got {x.shape}"
    return None


def fp8_rounding(x: Array, *, interpret: Any = None) -> tuple[Array, Array]:
    """Returns x, [T, E], as numbers in float8_e4m3fn, and their scales, float32 [E / 128, T].

    Gates and units, [T, 2, E], of a SwiGLU (arXiv:2002.05202) are multiplied first, as plain JAX
    does: silu of a gate is rounded to the dtype of x, and so is its product with the unit.
    interpret: parameters of Pallas' interpreter; None on a GPU.

    Raises:
      ValueError: what `refuses` says.
    """
    if why := refuses(x):
        raise ValueError(f"fp8_rounding {why}")
    T, E = x.shape[0], x.shape[-1]
    tokens = next(
        n for n in (MAX_TOKENS, 32, 16, EIGHT)
        if n == EIGHT or (T % n == 0 and T // n * (E // TERMS) >= MIN_BLOCKS)
    )  # fmt: skip
    return plgpu.kernel(
        functools.partial(_kernel, tokens, interpret is None),
        out_type=(
            jax.ShapeDtypeStruct((T, E), E4M3), jax.ShapeDtypeStruct((E // TERMS, T), jnp.float32)
        ),
        grid=(T // tokens, E // TERMS), grid_names=("tokens", "group"),
        kernel_name="fp8_rounding",
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True), interpret=interpret,
    )(x)  # fmt: skip


def _kernel(tokens: int, is_device: bool, x: Ref, numbers: Ref, scales: Ref) -> None:
    pdl.begin(is_device)
    group = lax.axis_index("group")
    rows = pl.ds(lax.axis_index("tokens") * tokens, tokens)
    terms = pl.ds(group * TERMS, TERMS)
    load = functools.partial(mosaic.load, layout=LAYOUT, optimized=False)
    if len(x.shape) == 2:
        wide = load(x.at[rows, terms]).astype(jnp.float32)
    else:
        gate, unit = (load(x.at[rows, i, terms]).astype(jnp.float32) for i in range(2))
        wide = swiglu(gate, unit, x.dtype)
    found, scale = rounded(wide, LAYOUT)
    put(numbers.at[rows, terms], found)
    put(scales.at[group, rows], scale)


def swiglu(gate: Array, unit: Array, dtype: jnp.dtype) -> Array:
    """Returns units of gates, all in float32, rounded to `dtype` where plain JAX rounds them."""
    gate = (gate / (1 + jnp.exp(-gate))).astype(dtype).astype(jnp.float32)
    return (gate * unit).astype(dtype).astype(jnp.float32)


def rounded(wide: Array, layout: Layout) -> tuple[Array, Array]:
    """Returns 128 terms a token, [tokens, 128] in float32, in fp8, and their scales, [tokens]."""
    scale = jnp.maximum(jnp.maximum(wide, -wide).max(1) / LARGEST, LEAST)
    by_term = plgpu.layout_cast(lax.broadcast_in_dim(scale, wide.shape, [0]), layout)
    return (wide / by_term).astype(E4M3), scale
