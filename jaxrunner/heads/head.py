"""The interface of a head: an array for each request of a step, made of hidden states."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp

from jaxrunner.slot_table import SlotTable
from jaxrunner.types import Array


class Head(NamedTuple):
    """A head beside logits. A model names its own in `Model.heads`.

    Each step that gives a request tokens gives it the head's array too: `CompletionOutput.heads`.
    For an embedding of a prompt ask for one token, and take the first.
    """

    name: str  # in `CompletionOutput.heads`
    # Of what `run` returns, letters of `dims` from B or T on: "B E". What begins with T is of each
    # token, and a request has those of all of its chunks.
    axes: str
    # (config, params, hidden [T, E], batch) -> an array of these axes. The last token of row b, but
    # for drafts, is `batch.logits_indices[b, 0]`.
    run: Callable[..., Array | tuple[Array, Any]]
    dtype: Any = jnp.float32  # of 32 bits
    # The state that a request keeps from one chunk of its prompt to the next. `run` is then given
    # its rows, `params` of the table with B in place of R, behind the batch, and returns new ones.
    table: SlotTable | None = None
