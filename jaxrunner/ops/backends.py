"""Which implementation of a layer's operations runs, and why not another."""

from collections.abc import Callable
from dataclasses import replace
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrunner.config import EngineConfig, ModelConfig
from jaxrunner.kernels_pallas import (
    add_norm,
    decode_attention,
    gated_mlp,
    matmul,
    paged_attention,
    prefill_attention,
    reference,
    rope_write,
    sampler,
)
from jaxrunner.model import AttentionSpec, Ops, RopeAndNorm
from jaxrunner.ops import cpu_attention
from jaxrunner.ops.plain import add_rms_norm, linear, linear_parts, rms_norm, rotate, swiglu
from jaxrunner.types import Array, Batch

# Where XLA, too, cuts the sum of a product into parts: they are summed by the norm that follows.
TILES, TILE, MAX_PARTS = 256, (64, 128), 8
# Our own products are ahead of XLA's for weights of so many numbers and so few tokens; with SwiGLU
# for more tokens too.
BIG, FEW = 1 << 24, 128


class Choice(NamedTuple):
    """An implementation, by its name in `EngineConfig.attention_backend`, and why it was taken."""

    name: str
    ops: Callable[[Batch], Ops]
    reason: str
    sample: Callable[..., Any] | None = None  # draws by the usual rules; None for plain JAX


def paged(batch: Batch) -> Ops:
    """Plain JAX over the paged cache of `batch`."""
    by_tiles = jax.default_backend() == "cpu" and not batch.query_len
    attention = cpu_attention if by_tiles else reference
    return _plain(functools.partial(attention.paged_attention, batch))


def dense(batch_size: int) -> Ops:
    """Plain JAX without a cache, for training: T is `batch_size` equal sequences."""
    return _plain(functools.partial(reference.dense_attention, batch_size))


def _plain(attention: Callable[..., Any]) -> Ops:
    def attend(qkv: Array, heads: RopeAndNorm, cache: Any, spec: AttentionSpec):
        return attention(*split_heads(qkv, heads), cache, spec)

    def mlp(
        x: Array, gate_up: Array, gate_up_bias: Array | None, down: Array, down_bias: Array | None
    ) -> Array:
        return linear(swiglu(x, gate_up, gate_up_bias), down, down_bias)

    return Ops(attend, linear, _contract, mlp, add_rms_norm)


def _contract(x: Array, weight: Array, bias: Array | None = None) -> Array:
    return linear(x, weight, bias, axes=weight.ndim - 1)


def fused(batch: Batch) -> Ops:
    """Kernels over the paged cache of `batch`; plain JAX for the steps that a kernel refuses."""

    def attend(qkv: Array, heads: RopeAndNorm, cache: Any, spec: AttentionSpec):
        at = batch.cache_index[spec.group]
        cos, sin, q_norm, k_norm, eps = heads
        args = qkv, cos, sin, cache.k, cache.v, at, q_norm, k_norm
        if cache.k_scale is None and rope_write.refuses(*args) is None:
            q, k, v = rope_write.rope_write(*args, eps=eps)
            cache = replace(cache, k=k, v=v)
        else:
            q, k, v = split_heads(qkv, heads)
            cache = reference.write_kv(batch, k, v, cache, spec.group)
        return paged_attention.attend(batch, q, cache, spec), cache

    def norm(x: Array, residual: Array, weight: Array, eps: float) -> tuple[Array, Array]:
        if add_norm.refuses(x, residual, weight) is None:
            return add_norm.add_rms_norm(x, residual, weight, eps=eps)
        whole = residual if residual.ndim == 2 else residual.sum(0)
        return add_rms_norm(x, whole.astype(x.dtype), weight, eps)

    return Ops(attend, _linear, _project, _mlp, norm)


def _linear(x: Array, weight: Array, bias: Array | None = None) -> Array:
    flat = weight.reshape(-1, weight.shape[-1])
    few = bias is None and x.shape[0] <= FEW and weight.size >= BIG
    if few and matmul.refuses(x, flat) is None:
        return matmul.matmul(x, flat).reshape(x.shape[0], *weight.shape[:-1])
    return linear(x, weight, bias)


def _project(x: Array, weight: Array, bias: Array | None = None) -> Array:
    """Multiplies; in parts where the tiles of the product are too few for the chip."""
    T, E = x.shape[0], weight.shape[0]
    parts = max(1, min(MAX_PARTS, TILES * TILE[0] * TILE[1] // (max(T, TILE[0]) * E)))
    if parts == 1 or bias is not None or weight.size // E % (parts * TILE[1]):
        return _contract(x, weight, bias)
    return linear_parts(x, weight, parts)


def _mlp(
    x: Array, gate_up: Array, gate_up_bias: Array | None, down: Array, down_bias: Array | None
) -> Array:
    """Runs in one kernel, or in two products: with SwiGLU in the first, or with XLA's."""
    if gate_up_bias is None and down_bias is None:
        if gated_mlp.refuses(x, gate_up, down) is None:
            return gated_mlp.gated_mlp(x, gate_up, down)
        if gate_up.size >= BIG and matmul.refuses(x, gate_up) is None:
            return _project(matmul.swiglu(x, gate_up), down)
    return _project(swiglu(x, gate_up, gate_up_bias), down, down_bias)


def split_heads(qkv: Array, heads: RopeAndNorm) -> tuple[Array, Array, Array]:
    """Returns queries, [T, H, D], keys and values, [T, K, D], of packed projections."""
    T, K, P, D = qkv.shape
    q, k, v = qkv[:, :, :-2].reshape(T, K * (P - 2), D), qkv[:, :, -2], qkv[:, :, -1]
    if heads.q_norm is not None and heads.k_norm is not None:
        q, k = rms_norm(q, heads.q_norm, heads.eps), rms_norm(k, heads.k_norm, heads.eps)
    return rotate(q, heads.cos, heads.sin), rotate(k, heads.cos, heads.sin), v


def choose_ops(model: ModelConfig, engine: EngineConfig) -> Choice:
    """Returns what computes the layers of an engine.

    Raises:
      ValueError: `attention_backend` names kernels that this model or device cannot use.
    """
    wanted = engine.attention_backend
    if wanted == "reference":
        return Choice("reference", paged, "it was asked for")
    reason = "is compiled, and enforce_eager compiles nothing" if engine.enforce_eager else None
    reason = reason or refuses(model, engine)
    if reason is None:
        shape = engine.max_num_seqs, model.vocab_size
        logits = jax.ShapeDtypeStruct(shape, jnp.dtype(engine.dtype))
        sample = sampler.sample_tokens if sampler.refuses(logits, sampler.DEFAULT) is None else None
        return Choice("mosaic_gpu", fused, "it serves this model on this device", sample)
    if wanted == "mosaic_gpu":
        raise ValueError(f"attention_backend='mosaic_gpu' {reason}: use 'auto' or 'reference'")
    return Choice("reference", paged, f"mosaic_gpu {reason}")


def refuses(model: ModelConfig, engine: EngineConfig) -> str | None:
    """Says why the kernels do not serve this model on this device; None if they do."""
    device = jax.local_devices()[0]
    if getattr(device, "compute_capability", None) != "9.0":
        return f"wants a Hopper GPU (compute capability 9.0), got {device.device_kind}"
    H, K, D = model.num_attention_heads, model.num_key_value_heads, model.head_dim
    q = jax.ShapeDtypeStruct((1, H, D), jnp.dtype(engine.dtype))
    shape = engine.num_blocks, K, engine.block_size, D
    kv = jax.ShapeDtypeStruct(shape, jnp.dtype(engine.kv_dtype))
    return decode_attention.refuses(q, kv) or prefill_attention.refuses(q, kv)
