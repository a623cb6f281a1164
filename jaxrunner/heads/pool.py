"""The pooling of hidden states, [T, E]: a row of each request, or of each token."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxrunner.pytree import leaf, pytree
from jaxrunner.slot_table import SlotTable
from jaxrunner.types import Array, Batch


@pytree
class Kept:
    """The pooling state of a slot, of the chunks of its prompt that are computed."""

    state: Array = leaf("R E", jnp.float32)


KEPT = SlotTable("pooled", Kept, None)


def last(hidden: Array, batch: Batch) -> Array:
    """Returns the last token's hidden state of each row, [B, E]."""
    return hidden[batch.logits_indices[:, 0]]


def cls(hidden: Array, batch: Batch, kept: Kept) -> tuple[Array, Kept]:
    """Returns the first token's of each prompt, [B, E]; kept while later chunks are computed."""
    first = jnp.clip(batch.query_start[:-1], 0, hidden.shape[0] - 1)
    new = hidden[first].astype(jnp.float32)
    state = jnp.where(_begins(batch), new, kept.state)
    return state, Kept(state)


def mean(hidden: Array, batch: Batch, kept: Kept) -> tuple[Array, Kept]:
    """Returns the mean of each prompt's hidden states, [B, E]; the sum is kept over its chunks."""
    B = batch.seq_lens.shape[0]
    total = jax.ops.segment_sum(hidden.astype(jnp.float32), batch.row, num_segments=B + 1)[:B]
    total = total + jnp.where(_begins(batch), 0.0, kept.state)
    count = jnp.maximum(batch.seq_lens, 1).astype(jnp.float32)
    return total / count[:, None], Kept(total)


def _begins(batch: Batch) -> Array:
    """Returns whether each row computes its prompt's first token, [B, 1]."""
    T = batch.row.shape[0]
    first = jnp.clip(batch.query_start[:-1], 0, T - 1)
    return (batch.inputs.positions[first] == 0)[:, None]


# By vLLM's names; "ALL" tells the states of all tokens as they are.
STATELESS: dict[str, Callable[..., Array]] = {"LAST": last, "ALL": lambda hidden, batch: hidden}
KEEPING: dict[str, Callable[..., tuple[Array, Kept]]] = {"CLS": cls, "MEAN": mean}
