"""Bad words: sequences of tokens that an output may not hold. The prompt does not count."""

from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxrunner.api.sampling_params import MAX_BAD_WORDS, SamplingParams
from jaxrunner.pytree import host_value, leaf, pytree
from jaxrunner.rule import Context, Rule
from jaxrunner.types import Array


@pytree
class BadWords:
    """The tokens of all words, one after another."""

    count: Array = leaf("R")
    ids: Array = leaf("R words")
    word: Array = leaf("R words")  # which word a token belongs to
    to_end: Array = leaf("R words")  # tokens that follow it in its word


def row(params: SamplingParams, seed: int) -> BadWords:
    """Reads a request's `bad_words`, which are lists of token ids by now."""
    words: Any = params.bad_words or ()
    parts = [(t, w, len(ids) - 1 - i) for w, ids in enumerate(words) for i, t in enumerate(ids)]
    ids, word, to_end = np.array(parts, np.int32).reshape(-1, 3).T
    return host_value(BadWords, count=np.int32(len(parts)), ids=ids, word=word, to_end=to_end)


def apply(logits: Array, row: BadWords, context: Context) -> Array:
    """Drops tokens of logits, [V], that would complete a word."""
    real = jnp.arange(row.ids.size) < row.count
    last = real & (row.to_end == 0)
    at = context.position - row.to_end
    before = context.request.token_ids.at[at].get(mode="clip")
    differs = (before != row.ids) | (at < context.request.prompt_len)
    word = jnp.where(real & ~last, row.word, MAX_BAD_WORDS)
    missing = jnp.zeros(MAX_BAD_WORDS, jnp.bool).at[word].max(differs, mode="drop")
    complete = last & ~missing.at[row.word].get(mode="clip")
    return logits.at[jnp.where(complete, row.ids, logits.size)].set(-jnp.inf, mode="drop")


bad_words = Rule(
    "bad_words", BadWords, row, apply,
    is_active=lambda row, context: row.count > 0,
    is_requested=lambda params: bool(params.bad_words),
)  # fmt: skip
