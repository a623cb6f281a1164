"""Samples text from a model in training: the whole sequence again for each token, no cache."""

from collections.abc import Sequence
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tokenizers import Tokenizer

from jaxrunner.config import ModelConfig
from jaxrunner.models.llama import llama
from jaxrunner.ops.backends import dense
from jaxrunner.sampling.gumbel import gumbel
from jaxrunner.types import Array, Inputs


def complete(
    config: ModelConfig,
    params: Any,
    tokenizer: Tokenizer,
    prompts: Sequence[str],
    *,
    num_tokens: int = 160,
    temperature: float = 0.7,
    seed: int = 0,
) -> list[str]:
    """Returns each prompt with `num_tokens` more tokens, or as many as the end token leaves."""
    encoded = [e.ids for e in tokenizer.encode_batch(list(prompts))]
    length = max(map(len, encoded)) + num_tokens
    tokens = np.zeros((len(encoded), length), np.int32)
    for row, ids in zip(tokens, encoded, strict=True):
        row[: len(ids)] = ids
    lens = np.asarray([len(ids) for ids in encoded], np.int32)
    out = np.asarray(_sample(config, params, tokens, lens, (num_tokens, temperature, seed)))
    texts = []
    for row, n in zip(out.tolist(), lens.tolist(), strict=True):
        new = row[n : n + num_tokens]
        stop = min((new.index(e) for e in config.eos_token_ids if e in new), default=len(new))
        texts.append(tokenizer.decode(row[: n + stop]))
    return texts


@functools.partial(jax.jit, static_argnums=(0, 4))
def _sample(config: ModelConfig, params: Any, tokens: Array, lens: Array, how: tuple) -> Array:
    """Fills tokens, [B, L], from `lens`, [B], on; how: (tokens to add, temperature, seed)."""
    num_tokens, temperature, seed = how
    B, L = tokens.shape
    positions = jnp.broadcast_to(jnp.arange(L, dtype=jnp.int32)[None], (B, L)).reshape(-1)
    ops, rows = dense(B), jnp.arange(B)

    def body(i: Array, tokens: Array) -> Array:
        inputs = Inputs(tokens.reshape(-1), positions, jnp.full_like(positions, L))
        caches = (None,) * config.num_hidden_layers
        hidden, _ = llama.forward(config, params, caches, inputs, ops)
        scores = llama.logits(config, params, hidden.reshape(B, L, -1)[rows, lens + i - 1])
        keys = jax.random.split(jax.random.fold_in(jax.random.key(seed), i), B)
        # The Gumbel trick; at temperature 0 the likeliest.
        noise = temperature * jax.vmap(functools.partial(gumbel, num_tokens=scores.shape[1]))(keys)
        return tokens.at[rows, lens + i].set(jnp.argmax(scores + noise, -1).astype(jnp.int32))

    return jax.lax.fori_loop(0, num_tokens, body, tokens)
