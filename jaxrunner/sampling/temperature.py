"""Temperature: flattens (over 1) or sharpens (under 1) the distribution."""

import jax.numpy as jnp
import numpy as np

from jaxrunner.api.sampling_params import SamplingParams
from jaxrunner.pytree import host_value, leaf, pytree
from jaxrunner.rule import Context, Rule
from jaxrunner.types import Array


@pytree
class Temperature:
    """1 for greedy requests, whose argmax it cannot change."""

    value: Array = leaf("R", jnp.float32)


def row(params: SamplingParams, seed: int) -> Temperature:
    """Reads a request's temperature."""
    return host_value(Temperature, value=np.float32(params.temperature or 1.0))


def apply(logits: Array, row: Temperature, context: Context) -> Array:
    """Divides logits, [V], by the temperature. A padded row, whose value is 0, stays finite."""
    return logits / jnp.where(row.value > 0, row.value, 1.0)


temperature = Rule("temperature", Temperature, row, apply)
