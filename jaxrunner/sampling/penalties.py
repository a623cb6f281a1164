"""Penalties for tokens that occurred: repetition (arXiv:1909.05858), frequency, presence.

No counts are kept between steps: each step counts the request's tokens anew, drafts included.
"""

import jax.numpy as jnp
import numpy as np

from jaxrunner.api.sampling_params import SamplingParams
from jaxrunner.pytree import host_value, leaf, pytree
from jaxrunner.rule import Context, Rule
from jaxrunner.types import Array


@pytree
class Penalties:
    """Neutral values are 1, 0 and 0; `on` is False where all three are neutral."""

    on: Array = leaf("R", jnp.bool)
    repetition: Array = leaf("R", jnp.float32)
    frequency: Array = leaf("R", jnp.float32)
    presence: Array = leaf("R", jnp.float32)


def row(params: SamplingParams, seed: int) -> Penalties:
    """Reads a request's three penalties."""
    return host_value(
        Penalties,
        on=is_requested(params),
        repetition=np.float32(params.repetition_penalty),
        frequency=np.float32(params.frequency_penalty),
        presence=np.float32(params.presence_penalty),
    )


def is_requested(params: SamplingParams) -> bool:
    """Whether any of the three is not neutral."""
    one = params.repetition_penalty, 1 + params.frequency_penalty, 1 + params.presence_penalty
    return one != (1, 1, 1)


def apply(logits: Array, row: Penalties, context: Context) -> Array:
    """Lowers logits, [V], of tokens in prompt and output (repetition) or in the output (others)."""
    V, request = logits.size, context.request
    at = jnp.arange(request.token_ids.size)
    before, in_prompt = at < context.position, at < request.prompt_len
    outputs = jnp.where(before & ~in_prompt, request.token_ids, V)
    counts = jnp.zeros(V, jnp.int32).at[outputs].add(1, mode="drop")
    prompt = jnp.where(before & in_prompt, request.token_ids, V)
    seen = (counts > 0).at[prompt].set(True, mode="drop")
    scaled = jnp.where(logits > 0, logits / row.repetition, logits * row.repetition)
    scaled = jnp.where(seen, scaled, logits)
    scaled -= row.frequency * counts.astype(jnp.float32)
    scaled -= row.presence * (counts > 0).astype(jnp.float32)
    return jnp.where(row.on, scaled, logits)


penalties = Rule(
    "penalties", Penalties, row, apply,
    is_active=lambda row, context: row.on,
    is_requested=is_requested,
)  # fmt: skip
