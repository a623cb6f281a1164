"""Allowed ids: only the tokens that a request names."""

import jax.numpy as jnp
import numpy as np

from jaxrunner.api.sampling_params import SamplingParams
from jaxrunner.pytree import host_value, leaf, pytree
from jaxrunner.rule import Context, Rule
from jaxrunner.types import Array


@pytree
class AllowedIds:
    """A list of ids; an empty one allows all."""

    count: Array = leaf("R")
    ids: Array = leaf("R allowed")


def row(params: SamplingParams, seed: int) -> AllowedIds:
    """Reads a request's `allowed_token_ids`."""
    ids = np.array(params.allowed_token_ids or (), np.int32)
    return host_value(AllowedIds, count=np.int32(ids.size), ids=ids)


def apply(logits: Array, row: AllowedIds, context: Context) -> Array:
    """Drops tokens of logits, [V], that are not listed."""
    V = logits.size
    ids = jnp.where(jnp.arange(row.ids.size) < row.count, row.ids, V)
    kept = jnp.zeros(V, jnp.bool).at[ids].set(True, mode="drop") | (row.count == 0)
    return jnp.where(kept, logits, -jnp.inf)


allowed_ids = Rule(
    "allowed_ids", AllowedIds, row, apply,
    is_active=lambda row, context: row.count > 0,
    is_requested=lambda params: params.allowed_token_ids is not None,
)  # fmt: skip
