"""Min-tokens: no stop id is sampled while the output is too short."""

import jax.numpy as jnp

from jaxrunner.params import SamplingParams
from jaxrunner.sampling.rule import Context, NoParams, Rule
from jaxrunner.types import Array


def row(params: SamplingParams, seed: int) -> NoParams:
    """Reads nothing: the request's table row has its stop ids and least length."""
    return NoParams()


def asks(row: NoParams, context: Context) -> Array:
    """Whether the token would end the request too early."""
    return context.position < context.request.min_len


def apply(logits: Array, row: NoParams, context: Context) -> Array:
    """Drops stop ids from logits, [V]."""
    banned = logits.at[context.request.stop_ids].set(-jnp.inf, mode="drop")
    return jnp.where(asks(row, context), banned, logits)


min_tokens = Rule(NoParams, row, apply, asks, lambda params: params.min_tokens > 0)
