"""Latent attention in plain JAX: what runs without a kernel, and what one is tested against.

All heads attend to one key a token, its cached row of D = rank + rotated numbers, whose first
`rank` are the value, too (multi-query attention; the absorbed form of arXiv:2405.04434). A kernel
for decode reads each row once, for the scores and for the sum of values:

    q [T, H, D], latents [N, S, D], blocks [B, M], seq_lens [B] -> [T, H, rank]

T is B * query_len; of DeepSeek's models D is 576, `rank` 512, and H 16 to 128.
"""

from collections.abc import Callable
from dataclasses import replace

import jax.numpy as jnp

from jaxrunner.caches.interleave import Part
from jaxrunner.caches.latent import LatentCache
from jaxrunner.kernels_pallas import reference
from jaxrunner.model import AttentionSpec
from jaxrunner.types import Array, Batch, LayerCache

Attend = Callable[[Batch, Array, LayerCache, AttentionSpec, Part | None], Array]


def write_latents(batch: Batch, latents: Array, cache: LatentCache, group: int) -> LatentCache:
    """Writes latents, [T, D], into the blocks of their requests; padding writes nothing."""
    S, index, to = cache.latents.shape[1], batch.cache_index[group], cache.latents.dtype

    def put(blocks: Array, new: Array) -> Array:
        new = new.astype(blocks.dtype)
        return blocks.at[index // S, index % S].set(new, mode="drop", unique_indices=True)

    if cache.scale is None:
        return replace(cache, latents=put(cache.latents, latents))
    latents, scale = reference.quantize(latents, to)
    return LatentCache(latents=put(cache.latents, latents), scale=put(cache.scale, scale))


def attend(
    batch: Batch, q: Array, cache: LatentCache, spec: AttentionSpec, part: Part | None = None,
    *, of_one_head: Attend = reference.attend,
) -> Array:  # fmt: skip
    """Causal attention of q, [T, H, D], over the latents of each token's request.

    of_one_head: does it for keys and values. Returns [T, H, spec.value_dim]; where these blocks
    hold a part of its tokens, one more column, as `online_softmax` does.
    """
    rows, scale = cache.latents[:, None], None if cache.scale is None else cache.scale[:, None]
    one_head = LayerCache(k=rows, v=rows, k_scale=scale, v_scale=scale)
    out = of_one_head(batch, q, one_head, spec, part)
    value = out[..., : spec.value_dim]
    return value if part is None else jnp.concatenate([value, out[..., -1:]], -1)


def dense(batch_size: int, q: Array, latents: Array, spec: AttentionSpec) -> Array:
    """Does what `attend` does of `batch_size` equal sequences, latents [T, D], for training."""
    row = latents[:, None]
    out, _ = reference.dense_attention(batch_size, q, row, row, None, spec)
    return out[..., : spec.value_dim]
