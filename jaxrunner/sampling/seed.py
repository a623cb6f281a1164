"""What every request has: a seed, and whether it is greedy."""

import jax.numpy as jnp
import numpy as np

from jaxrunner.params import SamplingParams
from jaxrunner.pytree import leaf, of, pytree
from jaxrunner.sampling.rule import Rule
from jaxrunner.types import Array


@pytree
class Seed:
    """A Threefry key and a flag."""

    words: Array = leaf("R key", jnp.uint32)  # high, low
    greedy: Array = leaf("R", jnp.bool)


def row(params: SamplingParams, seed: int) -> Seed:
    """Reads a request's seed, 64 bits."""
    return of(
        Seed, words=np.array([seed >> 32, seed & 0xFFFFFFFF], np.uint32), greedy=params.is_greedy
    )


seed = Rule(Seed, row, lambda logits, row, context: logits)
