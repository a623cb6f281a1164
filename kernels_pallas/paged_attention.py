"""Attention over the paged cache: rows of one token through one kernel, longer through another."""

from typing import Any

import jax.numpy as jnp

from jaxrunner.kernels_pallas import reference
from jaxrunner.kernels_pallas.decode_attention import decode_attention
from jaxrunner.kernels_pallas.prefill_attention import prefill_attention
from jaxrunner.model import AttentionSpec
from jaxrunner.types import Array, Batch, LayerCache


def attend(batch: Batch, q: Array, cache: LayerCache, spec: AttentionSpec) -> Array:
    """Causal attention of q, [T, H, D], over the blocks of each token's request."""
    kv = cache.k, cache.v, batch.blocks[spec.group]
    sizes: dict[str, Any] = dict(scale=spec.scale, window=spec.window)
    sizes |= dict(k_scale=cache.k_scale, v_scale=cache.v_scale)
    start, lens = batch.query_start, batch.seq_lens
    if batch.query_len == 1:
        return decode_attention(q, *kv, lens, **sizes)
    # Rows of a uniform batch stand apart by more tokens than they may have.
    if batch.query_len:
        return reference.attend(batch, q, cache, spec)
    T, one = q.shape[0], start[1:] - start[:-1] == 1
    # A row of one token has none for the other kernel, so its tokens count as padding there.
    first = jnp.where(one, start[:-1], T)
    out = prefill_attention(q, *kv, start, jnp.where(one, 0, lens), **sizes)
    singles = q.at[first].get(mode="fill", fill_value=0)
    lens = jnp.where(one, lens, 0)
    singles = decode_attention(singles, *kv, lens, skip_empty=True, **sizes)  # those are dropped
    return out.at[first].set(singles, mode="drop", unique_indices=True)
