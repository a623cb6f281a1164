"""Min-tokens: no stop id is sampled while the output is too short."""

import jax.numpy as jnp

from jaxrunner.params import SamplingParams
from jaxrunner.pytree import pytree
from jaxrunner.sampling.rule import Context, Rule
from jaxrunner.types import Array


@pytree
class MinTokens:
    """Nothing of its own: the request's table row has its stop ids and least length."""


def row(params: SamplingParams, seed: int) -> MinTokens:
    """Reads nothing."""
    return MinTokens()


def apply(logits: Array, row: MinTokens, context: Context) -> Array:
    """Drops stop ids from logits, [V], where the token would end the request too early."""
    early = context.position < context.request.min_len
    banned = logits.at[context.request.stop_ids].set(-jnp.inf, mode="drop")
    return jnp.where(early, banned, logits)


min_tokens = Rule(MinTokens, row, apply)
