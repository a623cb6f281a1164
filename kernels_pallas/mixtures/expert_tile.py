"""The epilogue of a mixture's kernels, on sums of 64 rows of weights for a tile of tokens."""

from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from jaxrunner.kernels_pallas import mosaic
from jaxrunner.kernels_pallas.mosaic import Ref
from jaxrunner.kernels_pallas.products.matmul import ROWS, gated
from jaxrunner.kernels_pallas.quantized.quantized_sums import by_row
from jaxrunner.mixtures.experts import ALPHA, LIMIT
from jaxrunner.types import Array

ACTIVATIONS = "swiglu", "clamped_swiglu"


def activate(gate: Array, up: Array, activation: str) -> Array:
    """Returns the units of a gated MLP, as `experts.activate` does."""
    if activation == "clamped_swiglu":
        gate, up = jnp.minimum(gate, LIMIT), jnp.minimum(jnp.maximum(up, -LIMIT), LIMIT)
        return gate / (1 + jnp.exp(-ALPHA * gate)) * (up + 1)
    return gated(gate, up, "silu")


def by_token(ref: Ref, tile: Array, size: int) -> Array:
    """Reads what the tokens of a tile have, [size], as columns of [64, size]."""
    x = mosaic.load(
        ref.at[pl.ds(tile * size, size)], layout=plgpu.Layout.WGMMA.reduce(0), optimized=False
    )
    return lax.broadcast_in_dim(x, (ROWS, size), [1])


def biases(ref: Ref, first: Array, size: int) -> Array:
    """Reads the biases of 64 rows from `first` on, of ref, [rows, 1], as rows of [64, size]."""
    x = by_row(ref, first, 1, jnp.int32(0), plgpu.Layout.WGMMA).astype(jnp.float32)
    wide = lax.broadcast_in_dim(x, (ROWS, size), [0])
    return plgpu.layout_cast(wide, plgpu.Layout.WGMMA)
