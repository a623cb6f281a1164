"""Bidirectional attention: every token sees all of its text. Plain JAX, on any device.

A text is computed in one step, so keys and values are those of the step: nothing is cached. Tiles
of queries pass over the keys of their texts a chunk at a time (online softmax, arXiv:2205.14135).
"""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from jaxrunner.indexing import take
from jaxrunner.kernels_pallas.reference import capped
from jaxrunner.linear import precision_of
from jaxrunner.model import AttentionSpec, Ops, RopeAndNorm
from jaxrunner.ops.plain import split_heads
from jaxrunner.types import Array, Batch

TILE, CHUNK = 64, 128  # queries of a tile, and keys that they read at a time


def bidirectional(ops: Ops) -> Ops:
    """Returns operations whose attention looks both ways, within a text of the same step.

    A window of w lets a token see those less than w positions away, on both sides.
    """
    batch = ops.batch
    assert batch is not None, "a trainer has no texts side by side"

    def attend(q: Array, k: Array, v: Array, cache: Any, spec: AttentionSpec) -> tuple[Array, Any]:
        return attention(batch, q, k, v, spec), cache

    def rotate_attend(
        qkv: Array, heads: RopeAndNorm, cache: Any, spec: AttentionSpec
    ) -> tuple[Array, Any]:
        return attend(*split_heads(qkv, heads), cache, spec)

    return replace(ops, attend=attend, rotate_attend=rotate_attend)


def attention(
    batch: Batch, q: Array, k: Array, v: Array, spec: AttentionSpec,
    *, tile: int = TILE, chunk: int = CHUNK,
) -> Array:  # fmt: skip
    """Attends q, [T, H, D], to k and v, [T, K, D], of each token's text. Returns [T, H, D]."""
    T, H, D = q.shape
    K, B, Q = k.shape[1], batch.seq_lens.shape[0], min(tile, T)
    assert spec.chunk_size is None, "chunks look back alone"
    precision = precision_of(q)
    tokens_IQ = jnp.arange(-(-T // Q) * Q).reshape(-1, Q)
    row_IQ = batch.row.at[tokens_IQ].get(mode="fill", fill_value=B)
    pos_IQ = take(batch.inputs.positions, tokens_IQ)
    q_IKGQD = jnp.moveaxis(take(q, tokens_IQ).reshape(-1, Q, K, H // K, D), 1, 3)
    # A tile reads from the start of its first text to the end of its last one; padding is last.
    first_I = take(batch.query_start, row_IQ[:, 0])
    rows = jnp.where(row_IQ < B, row_IQ, -1).max(1)
    end_I = jnp.where(rows >= 0, take(batch.query_start, rows + 1), first_I)

    def body(i: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        best, total, acc = carry
        keys_IC = first_I[:, None] + i * chunk + jnp.arange(chunk)[None]
        row_IC = batch.row.at[keys_IC].get(mode="fill", fill_value=B)
        far_IQC = jnp.abs(pos_IQ[:, :, None] - take(batch.inputs.positions, keys_IC)[:, None])
        seen_IQC = (row_IQ[:, :, None] == row_IC[:, None]) & (row_IC < B)[:, None]
        if spec.window is not None:
            seen_IQC &= far_IQC < spec.window
        k_ICKD, v_ICKD = take(k, keys_IC), take(v, keys_IC)
        scores = jnp.einsum("ikgqd,ickd->ikgqc", q_IKGQD, k_ICKD, precision=precision)
        scores = capped(scores.astype(jnp.float32) * spec.scale, spec.soft_cap)
        scores = jnp.where(seen_IQC[:, None, None], scores, -jnp.inf)
        new = jnp.maximum(best, scores.max(-1))
        shift = jnp.where(new == -jnp.inf, 0.0, new)
        p, kept = jnp.exp(scores - shift[..., None]), jnp.exp(best - shift)
        # A weight of zero does not silence a NaN: another text must not be read at all.
        v_ICKD = jnp.where(seen_IQC.any(1)[:, :, None, None], v_ICKD, jnp.zeros((), v.dtype))
        out = jnp.einsum("ikgqc,ickd->ikgqd", p.astype(q.dtype), v_ICKD, precision=precision)
        return new, total * kept + p.sum(-1), acc * kept[..., None] + out.astype(jnp.float32)

    shape = q_IKGQD.shape
    start = jnp.full(shape[:-1], -jnp.inf), jnp.zeros(shape[:-1]), jnp.zeros(shape)
    num = ((end_I - first_I).max() + chunk - 1) // chunk
    _, total, acc = jax.lax.fori_loop(jnp.zeros_like(num), num, body, start)
    out_IKGQD = acc / jnp.where(total == 0, 1.0, total)[..., None]
    return jnp.moveaxis(out_IKGQD, 3, 1).reshape(-1, H, D)[:T].astype(q.dtype)
