"""Attention of steps with prompts on a CPU: tile by tile, each over its own keys alone.

`reference.attend` has all tiles pass together over the keys of the longest request, as suits a
device of many cores. Here a tile has as many queries as keep a product busy on a few cores, and
it stops at its last query's key.
"""

import jax
import jax.numpy as jnp

from jaxrunner.kernels_pallas import reference
from jaxrunner.model import AttentionSpec
from jaxrunner.types import Array, Batch, LayerCache

TILE, CHUNK = 128, 256  # queries, and keys that they read at a time


def paged_attention(
    batch: Batch, q: Array, k: Array, v: Array, cache: LayerCache, spec: AttentionSpec,
    *, tile: int = TILE, chunk: int = CHUNK,
) -> tuple[Array, LayerCache]:  # fmt: skip
    """Does what `reference.paged_attention` does, for buckets whose rows stand side by side."""
    cache = reference.write_kv(batch, k, v, cache, spec.group)
    return _attend(batch, q, cache, spec, tile, chunk), cache


def _attend(
    batch: Batch, q: Array, cache: LayerCache, spec: AttentionSpec, tile: int, chunk: int
) -> Array:
    """Causal attention of q, [T, H, D], over the blocks of each token's request."""
    T, H, D = q.shape
    K, Q = cache.k.shape[1], min(tile, T)
    start, end = batch.query_start[:-1], batch.query_start[1:]
    num_tiles = (end - start + Q - 1) // Q
    last_tile = jnp.cumsum(num_tiles)
    # A tile that reaches beyond its request writes zeros there, and the next tile its own.
    queries = jnp.pad(q.reshape(T, K, H // K, D), ((0, Q), (0, 0), (0, 0), (0, 0)))
    positions = jnp.pad(batch.inputs.positions, (0, Q))

    def attend_tile(i: Array, out: Array) -> Array:
        row = (last_tile <= i).sum(dtype=jnp.int32)
        first = start[row] + Q * (i - last_tile[row] + num_tiles[row])
        q_QKGD = jax.lax.dynamic_slice_in_dim(queries, first, Q)
        q_1KGQD = jnp.moveaxis(q_QKGD, 0, 2)[None]
        pos_Q = jax.lax.dynamic_slice_in_dim(positions, first, Q)
        pos_1Q = jnp.where(first + jnp.arange(Q) < end[row], pos_Q, -1)[None]
        blocks_1M, num_keys = batch.blocks[spec.group][row][None], pos_1Q.max(1) + 1
        out_1KGQD = reference.online_softmax(
            q_1KGQD, pos_1Q, blocks_1M, num_keys, cache, spec, chunk=chunk
        )
        out_QKGD = jnp.moveaxis(out_1KGQD[0], 2, 0).astype(q.dtype)
        return jax.lax.dynamic_update_slice_in_dim(out, out_QKGD, first, 0)

    out = jax.lax.fori_loop(0, last_tile[-1], attend_tile, jnp.zeros_like(queries))
    return out[:T].reshape(T, H, D)
