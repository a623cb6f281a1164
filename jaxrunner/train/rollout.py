"""Text that a model writes, to train what drafts for it: many rows at once, over dense caches."""

from collections.abc import Sequence
from dataclasses import replace
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrunner.config import ModelConfig
from jaxrunner.linear import precision_of
from jaxrunner.model import AttentionSpec, Ops, RopeAndNorm
from jaxrunner.models.llama import llama
from jaxrunner.ops.backends import dense
from jaxrunner.ops.plain import split_heads
from jaxrunner.types import Array, Inputs

TEMPERATURES = (1.0, 1.0, 0.7, 1.0, 1.0, 0.7, 1.0, 0.0)  # of the rows, in turn
OPENING = 8, 128  # tokens of the corpus that a row begins with, at least and below


def rollouts(
    config: ModelConfig, params: Any, stream: np.ndarray, openings: np.ndarray,
    *, shape: tuple[int, int], seed: int,
) -> np.ndarray:  # fmt: skip
    """Returns texts, int32 of `shape`, that begin as passages of a stream, [N], and go on sampled.

    openings: places of the stream where a passage begins. A row begins with token 0, as a prompt
    does; token 0 inside it ends a text and begins another.
    """
    rng, (rows, length) = np.random.default_rng(seed), shape
    lens = np.minimum(rng.integers(*OPENING, rows), length).astype(np.int32)
    begins = rng.choice(openings[openings < len(stream) - OPENING[1]], rows)
    tokens = np.zeros((rows, length), np.int32)
    for row, begin, n in zip(tokens, begins, lens, strict=True):
        row[1:n] = stream[begin : begin + n - 1]
    temperatures = np.resize(np.asarray(TEMPERATURES, np.float32), rows)
    return np.asarray(_write(config, params, tokens, (lens, temperatures), jax.random.key(seed)))


@functools.partial(jax.jit, static_argnums=0)
def _write(
    config: ModelConfig, params: Any, tokens: Array, rows: tuple[Array, Array], key: Array
) -> Array:
    """Fills tokens, [B, L]; rows: how many of each are given, [B], and temperatures, [B]."""
    lens, temperatures = rows
    (B, L), dims = tokens.shape, config.dims
    empty = jnp.zeros((B, dims["K"], L, dims["D"]), params.embed.dtype)
    caches = ((empty, empty),) * config.num_hidden_layers

    def body(i: Array, carry: tuple[Array, Any]) -> tuple[Array, Any]:
        tokens, caches = carry
        inputs = Inputs(tokens[:, i], jnp.broadcast_to(i, B), jnp.full(B, L, jnp.int32))
        hidden, caches = llama.forward(config, params, caches, inputs, stepwise(i))
        scores = llama.logits(config, params, hidden).astype(jnp.float32)
        noise = jax.random.gumbel(jax.random.fold_in(key, i), scores.shape)
        drawn = jnp.argmax(scores + temperatures[:, None] * noise, -1).astype(jnp.int32)
        drawn = jnp.where(i + 1 < lens, tokens[:, i + 1], drawn)
        return tokens.at[:, i + 1].set(drawn), caches

    return jax.lax.fori_loop(0, L - 1, body, (tokens, caches))[0]


def stepwise(step: Array) -> Ops:
    """Returns operations of one token a row, all at position `step`.

    The cache of a layer is its keys and values, [B, K, L, D], of L positions.
    """

    def attend(
        q: Array, k: Array, v: Array, cache: tuple[Array, Array], spec: AttentionSpec
    ) -> tuple[Array, tuple[Array, Array]]:
        write = functools.partial(jax.lax.dynamic_update_slice_in_dim, start_index=step, axis=2)
        keys, values = (write(c, x[:, :, None]) for c, x in zip(cache, (k, v), strict=True))
        (B, H, D), K = q.shape, k.shape[1]
        seen = spec.sees(step[None], jnp.arange(keys.shape[2]))
        precision = precision_of(q)
        q_BKGD = q.reshape(B, K, H // K, D)
        scores = jnp.einsum("bkgd,bksd->bkgs", q_BKGD, keys, precision=precision)
        scores = scores.astype(jnp.float32) * spec.scale
        p = jax.nn.softmax(jnp.where(seen[None, None, None], scores, -jnp.inf), -1).astype(q.dtype)
        out = jnp.einsum("bkgs,bksd->bkgd", p, values, precision=precision)
        return out.reshape(B, H, D), (keys, values)

    def rotate_attend(
        qkv: Array, heads: RopeAndNorm, cache: Any, spec: AttentionSpec
    ) -> tuple[Array, Any]:
        return attend(*split_heads(qkv, heads), cache, spec)

    return replace(dense(1), attend=attend, rotate_attend=rotate_attend)


def rows_of(parts: Sequence[np.ndarray], length: int) -> np.ndarray:
    """Returns arrays of tokens, each cut into rows of `length`, as one, [N, length]; rests go."""
    whole = [part.reshape(-1)[: part.size // length * length] for part in parts]
    return np.concatenate([part.reshape(-1, length) for part in whole])
