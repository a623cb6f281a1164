"""Top-k, then top-p of the rest (nucleus sampling, arXiv:1904.09751), in one sort.

Of equal logits the lower id comes first, at every batch size.
"""

import jax
import jax.numpy as jnp
import numpy as np

from jaxrunner.api.sampling_params import SamplingParams
from jaxrunner.pytree import host_value, leaf, pytree
from jaxrunner.rule import Context, Rule
from jaxrunner.types import Array


@pytree
class TopKTopP:
    """The most tokens to keep, and the mass to keep; 0 and 1 are off."""

    k: Array = leaf("R")
    p: Array = leaf("R", jnp.float32)


def row(params: SamplingParams, seed: int) -> TopKTopP:
    """Reads a request's `top_k` and `top_p`."""
    return host_value(TopKTopP, k=np.int32(params.top_k), p=np.float32(params.top_p))


def is_active(row: TopKTopP, context: Context) -> Array:
    """Whether a token may be dropped. A padded row has a p of 0."""
    return (row.k > 0) | ((row.p > 0) & (row.p < 1))


def apply(logits: Array, row: TopKTopP, context: Context) -> Array:
    """Keeps the k best of logits, [V], and of those the fewest whose mass reaches p."""
    order = jnp.argsort(-logits, stable=True)
    best = logits[order]
    kept = (jnp.arange(best.size) < row.k) | (row.k == 0)
    mass = jax.nn.softmax(jnp.where(kept, best, -jnp.inf))
    kept &= (jnp.cumsum(mass) - mass < row.p) | (row.p >= 1)
    kept = kept.at[0].set(True)  # even where p is 0
    kept = jnp.zeros_like(kept).at[order].set(kept, unique_indices=True)
    return jnp.where(kept, logits, -jnp.inf)


top_k_top_p = Rule("top_k_top_p", TopKTopP, row, apply, is_active, truncates=True)
