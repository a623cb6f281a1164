"""Min-tokens: no stop id and no EOS is sampled while the output is too short."""

import jax.numpy as jnp

from jaxrunner.api.sampling_params import SamplingParams
from jaxrunner.rule import Context, NoParams, Rule
from jaxrunner.types import Array


def row(params: SamplingParams, seed: int) -> NoParams:
    """Reads nothing: the request's table row has its stop ids and least length."""
    return NoParams()


def is_active(row: NoParams, context: Context) -> Array:
    """Whether the token is in the output, and the output is still too short."""
    request, position = context.request, context.position
    return (position >= request.prompt_len) & (position < request.min_len)


def apply(logits: Array, row: NoParams, context: Context) -> Array:
    """Drops stop ids from logits, [V], ignored EOS ids too."""
    ids = context.request.stop_ids
    banned = logits.at[jnp.maximum(ids, ~ids)].set(-jnp.inf, mode="drop")
    return jnp.where(is_active(row, context), banned, logits)


min_tokens = Rule(
    "min_tokens", NoParams, row, apply, is_active,
    is_requested=lambda params: params.min_tokens > 0,
)  # fmt: skip
