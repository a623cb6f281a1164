"""Top-n-sigma: keeps logits at most n deviations below the best. arXiv:2411.07641."""

import jax.numpy as jnp
import numpy as np

from jaxrunner import SamplingParams
from jaxrunner.pytree import host_value, leaf, pytree
from jaxrunner.rule import Context, Rule
from jaxrunner.types import Array


@pytree
class TopNSigma:
    """The `n` of each request, 0 where it is off."""

    n: Array = leaf("R", jnp.float32)


def row(params: SamplingParams, seed: int) -> TopNSigma:
    """Reads a request's `extra_args`."""
    given = dict(params.extra_args or ())
    return host_value(TopNSigma, n=np.float32(given.get("top_n_sigma", 0.0)))


def apply(logits: Array, row: TopNSigma, context: Context) -> Array:
    """Drops tokens of logits, [V], that are too far below the best, in deviations of all."""
    real = logits > -jnp.inf
    low = logits.max() - row.n * jnp.std(logits, where=real)
    return jnp.where((row.n > 0) & (logits < low), -jnp.inf, logits)


def is_active(row: TopNSigma, context: Context) -> Array:
    """Whether the request asks for it."""
    return row.n > 0


top_n_sigma = Rule(
    "top_n_sigma", TopNSigma, row, apply, is_active, truncates=True, extra_args=("top_n_sigma",)
)
