"""The seed of each request, whether it is greedy, and the noise that follows from the seed."""

import math

import jax
import jax.numpy as jnp
import numpy as np

from jaxrunner.api.sampling_params import SamplingParams
from jaxrunner.pytree import host_value, leaf, pytree
from jaxrunner.rule import Rule
from jaxrunner.sampling.gumbel import gumbel
from jaxrunner.types import Array

# Streams of noise. A draft and the token that replaces it must not share a stream, which would bias
# the output. Noise of acceptance and of drafts is keyed by the position where the step begins, and
# draft j has stream DRAFT + j: block verification looks at drafts that a later step samples again,
# which must be independent. Noise of an emitted token is keyed by its own position.
TARGET, ACCEPT, RECOVER, DRAFT = range(4)


@pytree
class Seed:
    """A Threefry key and a flag."""

    words: Array = leaf("R key", jnp.uint32)  # high, low
    greedy: Array = leaf("R", jnp.bool)


def row(params: SamplingParams, seed: int) -> Seed:
    """Reads a request's seed, 64 bits."""
    return host_value(
        Seed, words=np.array([seed >> 32, seed & 0xFFFFFFFF], np.uint32), greedy=params.is_greedy
    )


def noise(words: Array, position: Array, *, stream: int | Array, shape: tuple[int, ...]) -> Array:
    """Returns Gumbel noise, `shape`, of a seed's two words for the token at a position."""
    key = jax.random.fold_in(jax.random.wrap_key_data(words), position)
    return gumbel(jax.random.fold_in(key, stream), math.prod(shape)).reshape(shape)


def noises(words: Array, position: Array, greedy: Array, *, stream: int | Array, num: int) -> Array:
    """Returns the noise of `num` tokens for each of B requests, [B, num]: zeros for greedy ones.

    words: [B, 2]; position and greedy: [B]; stream: one, or [B]. Skipped on the device where all
    requests are greedy.
    """

    def one(words: Array, position: Array, stream: int | Array) -> Array:
        return noise(words, position, stream=stream, shape=(num,))

    def draw() -> Array:
        axes = 0, 0, None if isinstance(stream, int) else 0
        return jnp.where(greedy[:, None], 0.0, jax.vmap(one, axes)(words, position, stream))

    return jax.lax.cond(greedy.all(), lambda: jnp.zeros((greedy.size, num)), draw)


def uniforms(words: Array, position: Array, *, stream: int, num: int) -> Array:
    """Returns uniform numbers, [num], above 0 and below 1; small ones have 32 bits of precision.

    So `uniform < chance` is always true for a chance of 1, and never for one of 0.
    """
    key = jax.random.fold_in(jax.random.wrap_key_data(words), position)
    bits = jax.random.bits(jax.random.fold_in(key, stream), (num,), jnp.uint32)
    return jnp.minimum((bits.astype(jnp.float32) + 0.5) * 2.0**-32, 1 - 2.0**-24)


seed = Rule("seed", Seed, row, lambda logits, row, context: logits)
