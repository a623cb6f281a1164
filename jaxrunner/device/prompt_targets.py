"""Finds the prompt tokens whose logprobs a step gives."""

import jax.numpy as jnp

from jaxrunner.indexing import take
from jaxrunner.types import Batch, Requests, SamplingMetadata, Targets


def find_targets(requests: Requests, batch: Batch, rows: SamplingMetadata) -> Targets:
    """Returns the prompt tokens whose logprobs are wanted, each behind a token of this step."""
    T = batch.row.shape[0]
    slot, positions = batch.slot, batch.inputs.positions + 1
    wanted = batch.row < rows.slot.shape[0]
    wanted &= positions >= take(requests.prompt_logprobs_start, slot)
    wanted &= positions < take(requests.prompt_len, slot)
    at = jnp.where(wanted, jnp.cumsum(wanted) - 1, T)
    source = jnp.full(T, T, jnp.int32).at[at].set(jnp.arange(T, dtype=jnp.int32), mode="drop")
    slot, positions = take(slot, source), take(positions, source)
    return Targets(source, take(requests.token_ids, (slot, positions)), positions, slot)
