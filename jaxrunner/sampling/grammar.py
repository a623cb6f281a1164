"""Grammar mask: only tokens that the request's grammar allows next."""

import jax.numpy as jnp

from jaxrunner.api.sampling_params import SamplingParams
from jaxrunner.rule import Context, NoParams, Rule
from jaxrunner.types import Array


def row(params: SamplingParams, seed: int) -> NoParams:
    """Reads nothing: the host sends a mask with each step."""
    return NoParams()


def is_active(row: NoParams, context: Context) -> Array:
    """Whether a bit of the mask is 0."""
    return jnp.asarray(False) if context.mask is None else jnp.any(context.mask != -1)


def apply(logits: Array, row: NoParams, context: Context) -> Array:
    """Drops tokens of logits, [V], whose bit is 0: token t is bit t % 32 of word t // 32."""
    if context.mask is None:
        return logits
    bits = (context.mask[:, None] >> jnp.arange(32)[None]) & 1
    return jnp.where(bits.reshape(-1)[: logits.size] == 1, logits, -jnp.inf)


grammar = Rule(
    "grammar", NoParams, row, apply, is_active,
    is_requested=lambda params: params.structured_outputs is not None,
)  # fmt: skip
