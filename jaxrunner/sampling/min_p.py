"""Min-p: keeps tokens at least `min_p` times as likely as the likeliest. arXiv:2407.01082."""

import jax.numpy as jnp
import numpy as np

from jaxrunner.api.sampling_params import SamplingParams
from jaxrunner.pytree import host_value, leaf, pytree
from jaxrunner.rule import Context, Rule, largest
from jaxrunner.types import Array


@pytree
class MinP:
    """Logarithm of `min_p`, -inf where it is off."""

    log: Array = leaf("R", jnp.float32)


def row(params: SamplingParams, seed: int) -> MinP:
    """Reads a request's `min_p`."""
    return host_value(MinP, log=np.float32(np.log(params.min_p) if params.min_p else -np.inf))


def apply(logits: Array, row: MinP, context: Context) -> Array:
    """Drops tokens of logits, [V], that are too far below the best."""
    return jnp.where(logits < largest(logits) + row.log, -jnp.inf, logits)


min_p = Rule("min_p", MinP, row, apply, truncates=True)
