"""Chooses implementations of attention over the paged cache, by the rows of a batch."""

from dataclasses import replace
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrunner.caches.interleave import interleave_of
from jaxrunner.indexing import find_rows, take
from jaxrunner.kernels_pallas import reference
from jaxrunner.kernels_pallas.attention import decode_attention as decode
from jaxrunner.kernels_pallas.attention import prefill_attention as prefill
from jaxrunner.kernels_pallas.attention import rope_write
from jaxrunner.kernels_pallas.attention.decode_plan import (
    BATCH_INVARIANT,
    DEFAULT,
    TuningConfig,
    cluster_of,
)
from jaxrunner.kernels_pallas.mosaic import Shaped
from jaxrunner.model import AttentionSpec, RopeAndNorm
from jaxrunner.operation import Operation
from jaxrunner.ops.packed_parts import PackedParts, Qkv, packed
from jaxrunner.ops.plain import split_heads
from jaxrunner.parallel.mesh import TENSOR
from jaxrunner.parallel.stages import num_stages
from jaxrunner.program.bucket import SHORT_LEN, Bucket
from jaxrunner.program.program import Program
from jaxrunner.types import Array, Batch, LayerCache


def _decode(
    config: TuningConfig, batch: Batch, q: Array, cache: LayerCache, spec: AttentionSpec
) -> Array:
    Q, num = batch.query_len, None
    if Q > 1:  # a row's tokens are its last; its first place has one if any has, and else 0
        num = batch.seq_lens - batch.inputs.positions[::Q]
    rows = rows_of(batch, spec, cache.k.shape[2])
    args = q, cache.k, cache.v, rows.blocks, rows.seq_lens
    sizes = _sizes(cache, spec) | dict[str, Any](query_len=Q, num_tokens=num, config=config)
    return decode.decode_attention(*args, **sizes)


def _refuses_decode(batch: Batch, q: Array, cache: LayerCache, spec: AttentionSpec) -> str | None:
    if not batch.query_len:
        return "wants as many tokens of every row"
    if batch.query_len > 1 and has_chunks(batch, spec, cache.k.shape[2]):
        return f"wants one token of every row where there are chunks, got {batch.query_len}"
    return _refuses_chunks(batch, cache, spec) or decode.refuses(
        q, cache.k, query_len=batch.query_len
    )


def _mixed(
    config: TuningConfig, batch: Batch, q: Array, cache: LayerCache, spec: AttentionSpec
) -> Array:
    """Runs decodes through their kernel, other rows through the other.

    The runner lays decodes out first: row b of them is token b.
    """
    start, lens, table = rows_of(batch, spec, cache.k.shape[2])
    (T, *_), B, sizes = q.shape, lens.shape[0], _sizes(cache, spec)
    one = (start[1:] - start[:-1] == 1) & (start[:-1] == jnp.arange(B))
    # A row of one kernel has no tokens for the other.
    out = prefill.into(q, cache.k, cache.v, table, start, jnp.where(one, 0, lens), **sizes)
    n = min(T, B)
    own = q[:n], cache.k, cache.v, table[:n], jnp.where(one, lens, 0)[:n]
    decode.decode_attention(*own, skip_empty=True, into=out, config=config, **sizes)
    return jax.freeze(out)[:T].reshape(q.shape)


def _refuses_mixed(batch: Batch, q: Array, cache: LayerCache, spec: AttentionSpec) -> str | None:
    # Rows of a uniform batch stand apart by more tokens than they may have.
    if apart := batch.query_len:
        return f"wants rows side by side, not {apart} tokens apart"
    return _refuses_chunks(batch, cache, spec) or refuses_kernels(q, cache.k)


def gains_short(program: Program, bucket: Bucket) -> bool:
    """Whether decode attention of a bucket is faster if no request is longer than `SHORT_LEN`."""
    model, engine, mesh = program.config, program.engine, program.mesh
    rows, longest = bucket.num_rows, engine.max_model_len
    if (
        longest <= SHORT_LEN
        or engine.scaled
        or engine.batch_invariant
        or interleave_of(model).parts > 1
    ):
        return False
    if program.num_ranks > 1 or num_stages(model) > 1:
        return False
    gains = False
    for group in program.cache_groups:
        if group.kind.leaves is not LayerCache:
            return False
        H, K, D = ((model.dims | group.kind.dims)[axis] for axis in "HKD")
        num = 1 if mesh is None else mesh.shape[TENSOR]
        q, kv = (bucket.num_tokens, H // num, D), (1, K // num, group.block_size, D)
        clusters = [
            cluster_of(q, kv, (rows, group.table_len(length)), None, bucket.query_len, DEFAULT)
            for length in (SHORT_LEN, longest)
        ]
        gains |= clusters[0] != clusters[1]
    return gains


def refuses_kernels(q: Shaped, k: Shaped) -> str | None:
    """Says why kernels do not attend q, [T, H, D], to k, [N, K, S, D], in all steps, or None."""
    return decode.refuses(q, k) or prefill.refuses(q, k)


def _refuses_chunks(batch: Batch, cache: LayerCache, spec: AttentionSpec) -> str | None:
    size, C = cache.k.shape[2], spec.chunk_size
    if C is None or not C % size or not has_chunks(batch, spec, size):
        return None
    return f"wants chunks of whole blocks, of {size} tokens, got chunks of {C}"


def _sizes(cache: LayerCache, spec: AttentionSpec) -> dict[str, Any]:
    scales = dict(k_scale=cache.k_scale, v_scale=cache.v_scale)
    own = dict(scale=spec.scale, window=spec.window, soft_cap=spec.soft_cap, sinks=spec.sinks)
    return own | scales


def _candidates(config: TuningConfig) -> tuple[Operation, ...]:
    return (
        Operation("decode_attention", functools.partial(_decode, config), _refuses_decode),
        Operation("prefill_attention", functools.partial(_mixed, config), _refuses_mixed),
        Operation("plain JAX", reference.attend),
    )


# (batch, q [T, H, D], cache, spec) -> causal attention over each token's request, [T, H, D]; and
# the same, where the order of a request's sums does not depend on the others of a step.
ATTENTION, BATCH_INVARIANT_ATTENTION = map(_candidates, (DEFAULT, BATCH_INVARIANT))


def _fused_write(
    batch: Batch, qkv: Qkv, heads: RopeAndNorm, cache: LayerCache, group: int
) -> tuple[Array, LayerCache]:
    args = _write_args(batch, qkv, heads, cache, group)
    how: Any = dict(eps=heads.eps, one_more=heads.one_more, dtype=qkv.dtype)
    q, k, v = rope_write.rope_write(*args, **how)
    return q, replace(cache, k=k, v=v)


def _refuses_write(
    batch: Batch, qkv: Qkv, heads: RopeAndNorm, cache: LayerCache, group: int
) -> str | None:
    if cache.k_scale is not None:
        return "wants a cache without scales"
    return rope_write.refuses(*_write_args(batch, qkv, heads, cache, group), dtype=qkv.dtype)


def _write_args(
    batch: Batch, qkv: Qkv, heads: RopeAndNorm, cache: LayerCache, group: int
) -> tuple[Any, ...]:
    cos, sin, q_norm, k_norm, *_ = heads
    numbers = qkv.parts if isinstance(qkv, PackedParts) else qkv
    return numbers, cos, sin, cache.k, cache.v, batch.cache_index[group], q_norm, k_norm


def _plain_write(
    batch: Batch, qkv: Qkv, heads: RopeAndNorm, cache: LayerCache, group: int
) -> tuple[Array, LayerCache]:
    q, k, v = split_heads(packed(qkv), heads)
    return q, reference.write_kv(batch, k, v, cache, group)


# (batch, qkv [T, K, P, D], heads, cache, group) -> rotated queries, [T, H, D], and the cache with
# the new keys and values.
ROTATE_WRITE = (
    Operation("rope_write", _fused_write, _refuses_write),
    Operation("plain JAX", _plain_write),
)


class Rows(NamedTuple):
    """Runs of tokens that see the keys of their row up to themselves, and no others."""

    query_start: Array  # [B + 1], where each row's tokens start
    seq_lens: Array  # [B], keys of each row once its tokens are there
    blocks: Array  # [B, M]


def has_chunks(batch: Batch, spec: AttentionSpec, block_size: int) -> bool:
    """Whether requests may have more than one chunk."""
    C = spec.chunk_size
    return C is not None and batch.blocks[spec.group].shape[1] * block_size > C


def rows_of(batch: Batch, spec: AttentionSpec, block_size: int) -> Rows:
    """Returns the rows of a step in one layer; where requests have chunks, those of one each.

    Chunks are whole blocks, and rows of a uniform batch have one token.
    """
    blocks, start, lens = batch.blocks[spec.group], batch.query_start, batch.seq_lens
    C = spec.chunk_size
    if C is None or not has_chunks(batch, spec, block_size):
        return Rows(start, lens, blocks)
    (B, _), T = blocks.shape, batch.row.shape[0]
    if batch.query_len:
        row, chunk = jnp.arange(B), jnp.maximum(lens - 1, 0) // C
        return Rows(start, lens - chunk * C, _tables(blocks, row, chunk, C // block_size))
    num = jnp.where(lens > 0, start[1:] - start[:-1], 0)
    first = lens - num  # the position of each row's first token
    parts = jnp.where(num > 0, (lens - 1) // C - first // C + 1, 0)
    ends, index = jnp.cumsum(parts), jnp.arange(2 * B + T // C)  # as many parts at most
    row = find_rows(ends, index)
    first, chunk = take(first, row), index - take(ends - parts, row)
    chunk = jnp.where(row < B, first // C + chunk, 0)
    starts = jnp.where(row < B, take(start, row) + jnp.maximum(chunk * C - first, 0), start[-1])
    seen = jnp.minimum(take(lens, row), (chunk + 1) * C) - chunk * C  # 0 behind all rows
    starts = jnp.concatenate([starts, start[-1:]])
    return Rows(starts, seen, _tables(blocks, row, chunk, C // block_size))


def _tables(blocks: Array, row: Array, chunk: Array, size: int) -> Array:
    """Returns the `size` blocks of a chunk of each row."""
    return take(blocks, (row[:, None], chunk[:, None] * size + jnp.arange(size)[None]))
