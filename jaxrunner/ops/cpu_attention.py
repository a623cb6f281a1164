"""Attention of steps with prompts on a CPU: tile by tile, each over its own keys only.

In `reference.attend` all tiles pass together over the keys of the longest request, which suits a
device of many cores. Here tiles run one by one, large enough for efficient products on a few cores,
and a tile stops at the key of its last query.
"""

import jax
import jax.numpy as jnp

from jaxrunner.caches.interleave import Part
from jaxrunner.kernels_pallas import reference
from jaxrunner.model import AttentionSpec
from jaxrunner.types import Array, Batch, LayerCache

TILE, CHUNK = 128, 256  # queries, and keys that they read at a time


def refuses(batch: Batch, *_: object) -> str | None:
    """Returns why a batch is not served on this device, None if it is."""
    if jax.default_backend() != "cpu":
        return "is for CPUs"
    return "wants rows side by side" if batch.query_len else None


def paged_attention(
    batch: Batch, q: Array, k: Array, v: Array, cache: LayerCache, spec: AttentionSpec,
    *, tile: int = TILE, chunk: int = CHUNK,
) -> tuple[Array, LayerCache]:  # fmt: skip
    """Does what `reference.paged_attention` does, for buckets whose rows stand side by side."""
    cache = reference.write_kv(batch, k, v, cache, spec.group)
    return attend(batch, q, cache, spec, tile=tile, chunk=chunk), cache


def attend(
    batch: Batch, q: Array, cache: LayerCache, spec: AttentionSpec, part: Part | None = None,
    *, tile: int = TILE, chunk: int = CHUNK,
) -> Array:  # fmt: skip
    """Does what `reference.attend` does, for such buckets."""
    T, H, D = q.shape
    B, K = batch.seq_lens.shape[0], cache.k.shape[1]
    tokens, rows = reference.cut_tiles(batch, T, min(tile, T))
    Q = tokens.shape[1]
    # A tile that reaches beyond its request writes zeros there, and the next tile its own.
    queries = jnp.pad(q.reshape(T, K, H // K, D), ((0, Q), (0, 0), (0, 0), (0, 0)))

    def attend_tile(i: Array, out: Array) -> Array:
        first = tokens[i, 0]
        q_QKGD = jax.lax.dynamic_slice_in_dim(queries, first, Q)
        q_1KGQD = jnp.moveaxis(q_QKGD, 0, 2)[None]
        pos_1Q = batch.inputs.positions.at[tokens[i]].get(mode="fill", fill_value=-1)[None]
        blocks_1M, num_keys = batch.blocks[spec.group][rows[i]][None], pos_1Q.max(1) + 1
        out_1KGQD = reference.online_softmax(
            q_1KGQD, pos_1Q, blocks_1M, num_keys, cache, spec, part, chunk=chunk
        )
        out_QKGD = jnp.moveaxis(out_1KGQD[0], 2, 0).astype(out.dtype)
        return jax.lax.dynamic_update_slice_in_dim(out, out_QKGD, first, 0)

    out = jnp.zeros_like(queries)
    if part is not None:
        out = jnp.zeros((*queries.shape[:-1], D + 1), jnp.float32)
    out = jax.lax.fori_loop(0, (rows < B).sum(), attend_tile, out)
    return out[:T].reshape(T, H, -1)
