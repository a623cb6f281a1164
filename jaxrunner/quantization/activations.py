"""Rounding of a product's inputs to 8 bits, where the checkpoint's format says so."""

import jax
import jax.numpy as jnp

from jaxrunner.quantization.scheme import CODES, Activation
from jaxrunner.types import Array

LEAST = 1e-12  # of a scale: a token of zeros has none


def rounded(
    x: Array, how: Activation, scale: Array | None, across: str | None
) -> tuple[Array, Array]:
    """Rounds x, [..., inputs], to numbers of 8 bits. Returns them, in the dtype of x, and scales.

    scale: the checkpoint's scale of all inputs; None for one for each token and group of inputs.
    across: the mesh axis that inputs are cut over, whose devices then share a token's scale.
    Scales are float32, [..., groups or 1].
    """
    most = CODES[how.code].most
    size = how.group or x.shape[-1]
    wide = x.astype(jnp.float32).reshape(*x.shape[:-1], -1, size)
    if scale is None:
        # All are divided, not the largest alone: XLA would do that in a kernel of its own.
        scales = jnp.maximum(jnp.abs(wide) / most, LEAST).max(-1)
        if across is not None and not how.group:
            scales = jax.lax.pmax(scales, across)
    else:
        scales = jnp.broadcast_to(scale, wide.shape[:-1])
    numbers = wide / scales[..., None]
    least = -most - (how.code == "int8" and scale is not None)
    numbers = jnp.clip(numbers, least, most)
    if how.code == "int8":
        numbers = jnp.round(numbers)
    else:
        # Else XLA may take rounding there and back for excess precision, and drop it.
        numbers = jax.lax.optimization_barrier(numbers.astype(jnp.float8_e4m3fn))
    return numbers.reshape(x.shape).astype(x.dtype), scales
