"""What a head is to the rest: an array for each request of a step, made of hidden states."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp

from jaxrunner.types import Array


class Head(NamedTuple):
    """A head beside logits. A model names its own in `Model.heads`.

    Each step that gives a request tokens gives it the head's array too: `CompletionOutput.heads`.
    For an embedding of a prompt ask for one token, and take the first.
    """

    name: str  # in `CompletionOutput.heads`
    axes: str  # of what `run` returns, letters of `dims` from B on: "B E"
    # (config, params, hidden [T, E], batch) -> an array of these axes. The last token of row b, but
    # for drafts, is `batch.logits_indices[b, 0]`.
    run: Callable[..., Array]
    dtype: Any = jnp.float32  # of 32 bits
