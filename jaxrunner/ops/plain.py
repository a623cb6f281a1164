"""Building blocks that decoders share."""

import math

import jax
import jax.numpy as jnp

from jaxrunner.types import Array


def linear(x: Array, weight: Array, bias: Array | None = None, *, axes: int = 1) -> Array:
    """Multiplies the last `axes` axes of x, [..., in], with those of weight, [out, in].

    In float32 no precision is traded for speed: greedy tokens must not depend on the device.
    """
    rows, out = x.shape[: x.ndim - axes], weight.shape[: weight.ndim - axes]
    size = math.prod(weight.shape[weight.ndim - axes :])
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    # As matrices: of weights with more axes XLA makes transposed copies in every step.
    y = jax.lax.dot_general(
        x.reshape(-1, size), weight.reshape(-1, size), (((1,), (1,)), ((), ())), precision=precision
    ).reshape(*rows, *out)
    return y if bias is None else y + jnp.broadcast_to(bias, y.shape)


def linear_parts(x: Array, weight: Array, num_parts: int) -> Array:
    """Returns parts whose sum is `linear` of x, [T, ...], and weight, [out, ...].

    [num_parts, T, out] in float32: the chip is busy with few tokens too, and the parts may be
    summed up by what comes next.
    """
    x, weight = (a.reshape(a.shape[0], num_parts, -1) for a in (x, weight))
    dims = (((2,), (2,)), ((1,), (1,)))
    return jax.lax.dot_general(x, weight, dims, preferred_element_type=jnp.float32)


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    """Root-mean-square norm over the last axis, computed in float32. arXiv:1910.07467."""
    x32 = x.astype(jnp.float32)
    x32 = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, -1, keepdims=True) + eps)
    return x32.astype(x.dtype) * jnp.broadcast_to(weight, x.shape)


def add_rms_norm(x: Array, residual: Array, weight: Array, eps: float) -> tuple[Array, Array]:
    """Returns x + residual, [T, E], and its norm."""
    total = x + residual
    return total, rms_norm(total, weight, eps)


def swiglu(x: Array, gate_up: Array, bias: Array | None = None) -> Array:
    """Returns the units of a gated MLP, [T, F], of x, [T, E]; gate_up is [2, F, E].

    arXiv:2002.05202.
    """
    gate, up = jnp.moveaxis(linear(x, gate_up, bias), 1, 0)
    return jax.nn.silu(gate) * up


def rotate(x: Array, cos: Array, sin: Array) -> Array:
    """Rotates x, [T, H, D], by its tokens' angles; the pairs are D / 2 apart."""
    a, b = jnp.split(x.astype(jnp.float32), 2, -1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x.dtype)
