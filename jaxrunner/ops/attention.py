"""What attention over the paged cache runs through, by the rows of a batch."""

from dataclasses import replace
from typing import Any

import jax.numpy as jnp

from jaxrunner.kernels_pallas import reference, rope_write
from jaxrunner.kernels_pallas.decode_attention import decode_attention, refuses
from jaxrunner.kernels_pallas.prefill_attention import prefill_attention
from jaxrunner.model import AttentionSpec, RopeAndNorm
from jaxrunner.operation import Operation
from jaxrunner.ops.plain import split_heads
from jaxrunner.types import Array, Batch, LayerCache


def _decode(batch: Batch, q: Array, cache: LayerCache, spec: AttentionSpec) -> Array:
    Q, num = batch.query_len, None
    if Q > 1:  # a row's tokens are its last; its first place has one if any has, and else 0
        num = batch.seq_lens - batch.inputs.positions[::Q]
    blocks, sizes = _blocks(batch, cache, spec), _sizes(cache, spec)
    return decode_attention(q, *blocks, batch.seq_lens, query_len=Q, num_tokens=num, **sizes)


def _refuses_decode(batch: Batch, q: Array, cache: LayerCache, spec: AttentionSpec) -> str | None:
    if not batch.query_len:
        return "wants as many tokens of every row"
    return _refuses_chunks(batch, cache, spec) or refuses(q, cache.k, query_len=batch.query_len)


def _mixed(batch: Batch, q: Array, cache: LayerCache, spec: AttentionSpec) -> Array:
    """Runs rows of one token through the decode kernel, longer ones through the other."""
    blocks, sizes = _blocks(batch, cache, spec), _sizes(cache, spec)
    start, lens = batch.query_start, batch.seq_lens
    T, one = q.shape[0], start[1:] - start[:-1] == 1
    # A row of one token has none for the other kernel, so its tokens count as padding there.
    first = jnp.where(one, start[:-1], T)
    out = prefill_attention(q, *blocks, start, jnp.where(one, 0, lens), **sizes)
    singles = q.at[first].get(mode="fill", fill_value=0)
    lens = jnp.where(one, lens, 0)
    singles = decode_attention(singles, *blocks, lens, skip_empty=True, **sizes)
    return out.at[first].set(singles, mode="drop", unique_indices=True)  # those of 0 are dropped


def _refuses_mixed(batch: Batch, q: Array, cache: LayerCache, spec: AttentionSpec) -> str | None:
    # Rows of a uniform batch stand apart by more tokens than they may have.
    if apart := batch.query_len:
        return f"wants rows side by side, not {apart} tokens apart"
    return _refuses_chunks(batch, cache, spec)


def _refuses_chunks(batch: Batch, cache: LayerCache, spec: AttentionSpec) -> str | None:
    """Says why kernels, which know windows alone, would see too much; None where they do not."""
    most = batch.blocks[spec.group].shape[1] * cache.k.shape[2]
    if spec.chunk_size is None or most <= spec.chunk_size:
        return None
    return f"wants requests of one chunk, {spec.chunk_size} tokens, got up to {most}"


def _blocks(batch: Batch, cache: LayerCache, spec: AttentionSpec) -> tuple[Array, Array, Array]:
    return cache.k, cache.v, batch.blocks[spec.group]


def _sizes(cache: LayerCache, spec: AttentionSpec) -> dict[str, Any]:
    scales = dict(k_scale=cache.k_scale, v_scale=cache.v_scale)
    own = dict(scale=spec.scale, window=spec.window, soft_cap=spec.soft_cap, sinks=spec.sinks)
    return own | scales


# (batch, q [T, H, D], cache, spec) -> causal attention over each token's request, [T, H, D].
ATTENTION = (
    Operation("decode_attention", _decode, _refuses_decode),
    Operation("prefill_attention", _mixed, _refuses_mixed),
    Operation("plain JAX", reference.attend),
)


def _fused_write(
    batch: Batch, qkv: Array, heads: RopeAndNorm, cache: LayerCache, group: int
) -> tuple[Array, LayerCache]:
    q, k, v = rope_write.rope_write(*_write_args(batch, qkv, heads, cache, group), eps=heads.eps)
    return q, replace(cache, k=k, v=v)


def _refuses_write(
    batch: Batch, qkv: Array, heads: RopeAndNorm, cache: LayerCache, group: int
) -> str | None:
    if cache.k_scale is not None:
        return "wants a cache without scales"
    return rope_write.refuses(*_write_args(batch, qkv, heads, cache, group))


def _write_args(
    batch: Batch, qkv: Array, heads: RopeAndNorm, cache: LayerCache, group: int
) -> tuple[Any, ...]:
    cos, sin, q_norm, k_norm, _ = heads
    return qkv, cos, sin, cache.k, cache.v, batch.cache_index[group], q_norm, k_norm


def _plain_write(
    batch: Batch, qkv: Array, heads: RopeAndNorm, cache: LayerCache, group: int
) -> tuple[Array, LayerCache]:
    q, k, v = split_heads(qkv, heads)
    return q, reference.write_kv(batch, k, v, cache, group)


# (batch, qkv [T, K, P, D], heads, cache, group) -> rotated queries, [T, H, D], and the cache with
# the new keys and values.
ROTATE_WRITE = (
    Operation("rope_write", _fused_write, _refuses_write),
    Operation("plain JAX", _plain_write),
)
