"""Attention over the paged cache: rows of one token through one kernel, longer through another."""

import jax.numpy as jnp

from jaxrunner.kernels_pallas import reference
from jaxrunner.kernels_pallas.decode_attention import decode_attention
from jaxrunner.kernels_pallas.prefill_attention import prefill_attention
from jaxrunner.model import AttentionSpec
from jaxrunner.types import Array, Batch, LayerCache


def paged_attention(
    batch: Batch, q: Array, k: Array, v: Array, cache: LayerCache, spec: AttentionSpec
) -> tuple[Array, LayerCache]:
    """Writes k and v, [T, K, D], then attends q, [T, H, D], to each token's request.

    Returns the attended values, [T, H, D], and the cache, which is consumed.
    """
    cache = reference.write_kv(batch, k, v, cache, spec.group)
    return attend(batch, q, cache, spec), cache


def attend(batch: Batch, q: Array, cache: LayerCache, spec: AttentionSpec) -> Array:
    """Causal attention of q, [T, H, D], over the blocks of each token's request."""
    kv = cache.k, cache.v, batch.blocks[spec.group]
    sizes = dict(scale=spec.scale, window=spec.window)
    start, lens = batch.query_start, batch.seq_lens
    if batch.query_len == 1:
        return decode_attention(q, *kv, lens, **sizes)
    if batch.query_len:  # rows stand apart by more tokens than they may have
        return reference.attend(batch, q, cache, spec)
    T, one = q.shape[0], start[1:] - start[:-1] == 1
    # A row of one token has none for the other kernel, so its tokens count as padding there.
    first = jnp.where(one, start[:-1], T)
    out = prefill_attention(q, *kv, start, jnp.where(one, 0, lens), **sizes)
    singles = q.at[first].get(mode="fill", fill_value=0)
    singles = decode_attention(singles, *kv, jnp.where(one, lens, 0), **sizes)
    return out.at[first].set(singles, mode="drop", unique_indices=True)
