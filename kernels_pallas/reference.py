"""Every kernel in plain JAX: what runs on a CPU, and what the kernels are tested against.

Queries are cut into tiles of one request's tokens, and each tile passes over its request's keys a
chunk at a time (online softmax, arXiv:2205.14135), so nothing of size [T, L] is made. The work
follows the longest request of the batch, not the largest possible one.
"""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from jaxrunner.caches.interleave import Part
from jaxrunner.indexing import find_rows, take
from jaxrunner.linear import precision_of
from jaxrunner.model import AttentionSpec
from jaxrunner.types import Array, Batch, LayerCache

CHUNK = 128  # keys a tile reads at a time, rounded to whole blocks
TILE = 16  # queries of a tile where requests compute several tokens


def paged_attention(
    batch: Batch, q: Array, k: Array, v: Array, cache: LayerCache, spec: AttentionSpec
) -> tuple[Array, LayerCache]:
    """Writes k and v, [T, K, D], then attends q, [T, H, D], to each token's request.

    Returns the attended values, [T, H, D], and the cache, which is consumed.
    """
    cache = write_kv(batch, k, v, cache, spec.group)
    return attend(batch, q, cache, spec), cache


def write_kv(batch: Batch, k: Array, v: Array, cache: LayerCache, group: int) -> LayerCache:
    """Writes k and v, [T, K, D], into the blocks of their requests; padding writes nothing."""
    S = cache.k.shape[2]
    at = (batch.cache_index[group] // S, slice(None), batch.cache_index[group] % S)

    def put(blocks: Array, new: Array) -> Array:
        # Without unique_indices XLA writes through compare-and-swap loops.
        new = new.astype(blocks.dtype)
        return blocks.at[at].set(new, mode="drop", unique_indices=True)

    if cache.k_scale is None or cache.v_scale is None:
        return replace(cache, k=put(cache.k, k), v=put(cache.v, v))
    (k, k_scale), (v, v_scale) = (quantize(x, cache.k.dtype) for x in (k, v))
    return LayerCache(
        k=put(cache.k, k),
        v=put(cache.v, v),
        k_scale=put(cache.k_scale, k_scale),
        v_scale=put(cache.v_scale, v_scale),
    )


def quantize(x: Array, dtype: Any) -> tuple[Array, Array]:
    """Returns x, [..., D], as multiples of 8 bits of a scale, [...], and the scale, float32.

    The largest of a row becomes the largest of `dtype`; NaN and infinity make the scale NaN or
    infinite, so that they show.
    """
    whole = jnp.issubdtype(dtype, jnp.integer)
    most = float(jnp.iinfo(dtype).max if whole else jnp.finfo(dtype).max)
    x = x.astype(jnp.float32)
    top = jnp.abs(x).max(-1)
    # Rows so small that their scale could be flushed to zero count as zero. A kernel multiplies
    # in bfloat16, so the scale is a number of that.
    scale = jax.lax.reduce_precision(jnp.where(top < 1e-30, 1.0, top / most), 8, 7)
    x = jnp.clip(x / scale[..., None], -most, most)
    return (jnp.round(x) if whole else x).astype(dtype), scale


def attend(
    batch: Batch, q: Array, cache: LayerCache, spec: AttentionSpec, part: Part | None = None
) -> Array:
    """Causal attention of q, [T, H, D], over the blocks of each token's request.

    Returns [T, H, D]; where these blocks hold a part of its tokens, what `online_softmax` does.
    """
    T, H, D = q.shape
    K = cache.k.shape[1]
    tokens, rows = cut_tiles(batch, T)
    q_IKGQD = jnp.moveaxis(take(q, tokens).reshape(*tokens.shape, K, H // K, D), 1, 3)
    pos_IQ = take(batch.inputs.positions, tokens)
    blocks_IM = take(batch.blocks[spec.group], rows)
    lens_I = take(batch.seq_lens, rows)
    out_IKGQD = online_softmax(q_IKGQD, pos_IQ, blocks_IM, lens_I, cache, spec, part)
    out_IQKGD = jnp.moveaxis(out_IKGQD, 3, 1)
    out = jnp.zeros((T, H, out_IQKGD.shape[-1]), q.dtype if part is None else out_IQKGD.dtype)
    out_IQHD = out_IQKGD.reshape(*tokens.shape, *out.shape[1:])
    return out.at[tokens].set(out_IQHD.astype(out.dtype), mode="drop")


def cut_tiles(batch: Batch, num_tokens: int, size: int = TILE) -> tuple[Array, Array]:
    """Cuts the batch into tiles of one request's tokens.

    Returns the tokens of each tile, [I, Q], padded with T, and its row, [I], padded with B.
    """
    B, T = batch.seq_lens.shape[0], num_tokens
    start, end = batch.query_start[:-1], batch.query_start[1:]
    if Q := batch.query_len:
        num, tiles, row = jnp.ones(B, jnp.int32), B, jnp.arange(B, dtype=jnp.int32)
    else:
        Q, tiles = size, T // size + B
        num = (end - start + Q - 1) // Q
        row = find_rows(jnp.cumsum(num), jnp.arange(tiles))
    first = take(start, row) + Q * (jnp.arange(tiles) - take(jnp.cumsum(num) - num, row))
    tokens = first[:, None] + jnp.arange(Q)[None]
    return jnp.where(tokens < take(end, row)[:, None], tokens, T).astype(jnp.int32), row


def online_softmax(
    q: Array, pos: Array, blocks: Array, lens: Array, cache: LayerCache, spec: AttentionSpec,
    part: Part | None = None, *, chunk: int = CHUNK,
) -> Array:  # fmt: skip
    """Attends tiles of queries, [I, K, G, Q, D], to their rows' keys; returns float32.

    pos: the queries' positions, [I, Q]; blocks: of a tile's row, [I, M]; lens: the tokens of a
    tile's row, [I]; chunk: how many keys are read at a time.

    part: of the rows' tokens, those whose keys the blocks hold; all if None. Then a last column
    behind D says how much they weigh: the logarithm of the sum of exp(score), -inf for no keys.
    """
    K, G, Q, D = q.shape[1:]
    tiles, M = blocks.shape
    S = cache.k.shape[2]
    per_chunk = max(1, chunk // S)
    C = per_chunk * S
    blocks = jnp.pad(blocks, ((0, 0), (0, -M % per_chunk)), mode="edge")
    precision = precision_of(q)

    def read(kv: Array, scale: Array | None, i: Array) -> Array:
        ids = jax.lax.dynamic_slice_in_dim(blocks, i * per_chunk, per_chunk, axis=1)
        chunk = kv.at[ids].get(mode="clip")
        if scale is not None:
            chunk = chunk.astype(jnp.float32) * scale.at[ids].get(mode="clip")[..., None]
        return jnp.moveaxis(chunk.astype(q.dtype), 2, 1).reshape(tiles, K, C, D)

    def body(i: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        best, total, acc = carry
        key_pos = i * C + jnp.arange(C)
        if part is not None:
            key_pos = part.position(key_pos)
        seen = spec.sees(pos[:, :, None], key_pos[None, None])
        k, v = read(cache.k, cache.k_scale, i), read(cache.v, cache.v_scale, i)
        # A weight of zero does not silence a NaN: what no query sees may hold another's junk.
        v = jnp.where(seen.any(1)[:, None, :, None], v, jnp.zeros((), v.dtype))
        scores = jnp.einsum("ikgqd,ikcd->ikgqc", q, k, precision=precision)
        scores = capped(scores.astype(jnp.float32) * spec.scale, spec.soft_cap)
        scores = jnp.where(seen[:, None, None], scores, -jnp.inf)
        new_best = jnp.maximum(best, scores.max(-1))
        shift = jnp.where(new_best == -jnp.inf, 0.0, new_best)
        p = jnp.exp(scores - shift[..., None])
        kept = jnp.exp(best - shift)
        weighted = jnp.einsum("ikgqc,ikcd->ikgqd", p.astype(q.dtype), v, precision=precision)
        acc = acc * kept[..., None] + weighted.astype(jnp.float32)
        return new_best, total * kept + p.sum(-1), acc

    shape = (tiles, K, G, Q)
    start = jnp.full(shape, -jnp.inf), jnp.zeros(shape), jnp.zeros((*shape, D))
    last = lens.max()
    first = spec.first_seen(jnp.where(lens > 0, pos[:, 0], last).min())
    if part is not None:
        first, last = part.num_local(first), part.num_local(last)
    best, total, acc = jax.lax.fori_loop(first // C, (last + C - 1) // C, body, start)
    if spec.sinks is not None:
        sink = spec.sinks.astype(jnp.float32).reshape(1, K, G, 1)
        top = jnp.maximum(best, sink)
        kept = jnp.exp(best - top)
        total, acc = total * kept + jnp.exp(sink - top), acc * kept[..., None]
    total = jnp.where(total == 0, 1.0, total)
    out = acc / total[..., None]
    if part is None:
        return out
    return jnp.concatenate([out, (best + jnp.log(total))[..., None]], -1)


def capped(x: Array, soft_cap: float | None) -> Array:
    """Returns x, float32, bent towards a cap that it never passes. arXiv:2408.00118."""
    return x if soft_cap is None else soft_cap * jnp.tanh(x / soft_cap)


def dense_attention(
    batch_size: int, q: Array, k: Array, v: Array, cache: None, spec: AttentionSpec
) -> tuple[Array, None]:
    """Causal attention of q, [T, H, D], to k and v, [T, K, D], of `batch_size` equal sequences.

    Without a cache, for training.
    """
    split = [x.reshape(batch_size, -1, *x.shape[1:]) for x in (q, k, v)]
    if spec.sinks is not None:
        return _dense_with_sinks(split, spec).reshape(q.shape), None
    window = None if spec.window is None else (spec.window - 1, 0)
    chunks = None if spec.chunk_size is None else _seen(split[0].shape[1], spec)[None, None]
    with jax.default_matmul_precision("highest" if q.dtype == jnp.float32 else "default"):
        if spec.soft_cap is not None:
            return _capped_attention(split[0], split[1], split[2], spec).reshape(q.shape), None
        out = jax.nn.dot_product_attention(
            *split, scale=spec.scale, mask=chunks, is_causal=True, local_window_size=window
        )
    return out.reshape(q.shape), None


def _dense_with_sinks(qkv: list[Array], spec: AttentionSpec) -> Array:
    """Does what `dense_attention` does of q, [N, L, H, D], where sinks take weight, too."""
    q, k, v = qkv
    N, L, H, D = q.shape
    precision = precision_of(q)
    grouped = q.reshape(N, L, k.shape[2], -1, D)
    scores = jnp.einsum("nlkgd,nskd->nkgls", grouped, k, precision=precision)
    scores = scores.astype(jnp.float32).reshape(N, H, L, L) * spec.scale
    assert spec.sinks is not None
    sinks = spec.sinks.astype(jnp.float32)[None, :, None, None]
    scores = jnp.concatenate(
        [
            jnp.where(_seen(L, spec)[None, None], scores, -jnp.inf),
            jnp.broadcast_to(sinks, (N, H, L, 1)),
        ],
        -1,
    )
    weights = jax.nn.softmax(scores, -1)[..., :-1].reshape(N, k.shape[2], -1, L, L)
    out = jnp.einsum("nkgls,nskd->nlkgd", weights.astype(q.dtype), v, precision=precision)
    return out.reshape(q.shape)


def _capped_attention(q: Array, k: Array, v: Array, spec: AttentionSpec) -> Array:
    """Attends q, [N, L, H, D], of N sequences causally, with a cap of scores, to k and v."""
    N, L, H, D = q.shape
    q_NLKGD = q.reshape(N, L, k.shape[2], -1, D)
    scores_NKGLM = jnp.einsum("nlkgd,nmkd->nkglm", q_NLKGD, k).astype(jnp.float32)
    scores_NKGLM = capped(scores_NKGLM * spec.scale, spec.soft_cap)
    scores_NKGLM = jnp.where(_seen(L, spec)[None, None, None], scores_NKGLM, -jnp.inf)
    weights_NKGLM = jax.nn.softmax(scores_NKGLM, axis=-1).astype(v.dtype)
    return jnp.einsum("nkglm,nmkd->nlkgd", weights_NKGLM, v).reshape(N, L, H, D)


def _seen(length: int, spec: AttentionSpec) -> Array:
    """Returns which tokens of a sequence each of them sees, [L, L]."""
    place = jnp.arange(length)
    return spec.sees(place[:, None], place[None])
