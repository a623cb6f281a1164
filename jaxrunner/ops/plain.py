"""Operations of decoders in plain JAX: norms, rotation, gated units, packed projections."""

from collections.abc import Callable
import functools

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxrunner.model import RopeAndNorm
from jaxrunner.types import Array

ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "silu": jax.nn.silu,
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": jax.nn.gelu,
    "relu": jax.nn.relu,
}


def multiply_parts(x: Array, weight: Array, num_parts: int) -> Array:
    """Returns parts whose sum is the product of x, [T, *inputs], and weight, [out, *inputs].

    [num_parts, T, out] in float32: the chip is busy with few tokens too, and the parts may be
    summed up by what comes next.
    """
    x, weight = (a.reshape(a.shape[0], num_parts, -1) for a in (x, weight))
    dims = (((2,), (2,)), ((1,), (1,)))
    return jax.lax.dot_general(x, weight, dims, preferred_element_type=jnp.float32)


def summed(residual: Array, dtype: DTypeLike) -> Array:
    """Returns a residual, [T, E] or parts of it, [parts, T, E], as [T, E] in a dtype.

    Parts are added up in float32.
    """
    whole = residual if residual.ndim == 2 else residual.astype(jnp.float32).sum(0)
    return whole.astype(dtype)


def no_residual(x: Array) -> Array:
    """Returns a residual of x, [T, E], in no parts, so that `add_norm` norms x alone."""
    return jnp.zeros((0, *x.shape), x.dtype)


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    """Root-mean-square norm over the last axis, computed in float32. arXiv:1910.07467."""
    x32 = x.astype(jnp.float32)
    x32 = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, -1, keepdims=True) + eps)
    return x32.astype(x.dtype) * jnp.broadcast_to(weight, x.shape)


def norm_heads(x: Array, weight: Array, eps: float) -> Array:
    """Returns the norm of a token's heads taken together. x: [T, heads, D]; weight: [heads, D]."""
    return rms_norm(x.reshape(x.shape[0], -1), weight.reshape(-1), eps).reshape(x.shape)


def rms_norm_of_one_more(x: Array, weight: Array, eps: float) -> Array:
    """`rms_norm` by 1 + weight, in float32: the sum would lose bits in a dtype of 16."""
    return rms_norm(x.astype(jnp.float32), 1 + weight.astype(jnp.float32), eps).astype(x.dtype)


def add_rms_norm(
    x: Array, residual: Array, weight: Array, eps: float, one_more: bool = False,
    end: Array | None = None,
) -> tuple[Array, Array]:  # fmt: skip
    """Returns x + residual, [T, E], and its norm, by 1 + weight with `one_more`.

    end: weight of a norm of the residual before it is added.
    """
    norm = rms_norm_of_one_more if one_more else rms_norm
    total = x + (residual if end is None else norm(residual, end, eps))
    return total, norm(total, weight, eps)


def glu(gate_up: Array, activation: str = "silu") -> Array:
    """Returns the units of a gated MLP, [T, F], of a product, [T, 2, F]. arXiv:2002.05202.

    activation: of the gate, one of `ACTIVATIONS`.
    """
    gate, up = jnp.moveaxis(gate_up, 1, 0)
    return ACTIVATIONS[activation](gate) * up


def rotate(x: Array, cos: Array, sin: Array) -> Array:
    """Rotates x, [T, H, D], by its tokens' angles; the pairs are D / 2 apart."""
    a, b = jnp.split(x.astype(jnp.float32), 2, -1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x.dtype)


def unpacked(qkv: Array) -> tuple[Array, Array, Array]:
    """Returns queries, [T, H, D], keys and values, [T, K, D], of products, [T, K, P, D]."""
    T, K, P, D = qkv.shape
    return qkv[:, :, :-2].reshape(T, K * (P - 2), D), qkv[:, :, -2], qkv[:, :, -1]


def split_heads(qkv: Array, heads: RopeAndNorm) -> tuple[Array, Array, Array]:
    """Returns queries, [T, H, D], keys and values, [T, K, D], of packed projections."""
    q, k, v = unpacked(qkv)
    if heads.q_norm is not None and heads.k_norm is not None:
        norm = rms_norm_of_one_more if heads.one_more else rms_norm
        q, k = norm(q, heads.q_norm, heads.eps), norm(k, heads.k_norm, heads.eps)
    return rotate(q, heads.cos, heads.sin), rotate(k, heads.cos, heads.sin), v
