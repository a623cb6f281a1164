"""What every request has: a seed, and whether it is greedy."""

import math

import jax
import jax.numpy as jnp
import numpy as np

from jaxrunner.api.sampling_params import SamplingParams
from jaxrunner.pytree import host_value, leaf, pytree
from jaxrunner.rule import Rule
from jaxrunner.sampling.gumbel import gumbel, gumbel_from
from jaxrunner.types import Array

# Streams of noise. A draft and what replaces it must not share one: the output would be biased.
# What accepts and what drafts is drawn at the position where the step begins, draft j of stream
# DRAFT + j: block verification looks at drafts that a later step draws again, and what it saw of
# them must tell nothing of those. What is emitted is drawn at its own position, once.
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


def noise(
    words: Array, position: Array, *, stream: int | Array, shape: tuple[int, ...],
    first: Array | None = None,
) -> Array:  # fmt: skip
    """Returns Gumbel noise, `shape`, of a seed's two words for the token at a position.

    first: the id from which tokens are counted; 0 where None.
    """
    key = jax.random.fold_in(jax.random.wrap_key_data(words), position)
    key, num = jax.random.fold_in(key, stream), math.prod(shape)
    return (gumbel(key, num) if first is None else gumbel_from(first, key, num)).reshape(shape)


def noises(
    words: Array, position: Array, greedy: Array, *, stream: int | Array, num: int,
    first: Array | None = None,
) -> Array:  # fmt: skip
    """Returns the noise of `num` tokens for each of B requests, [B, num]: none of greedy ones.

    words: [B, 2]; position and greedy: [B]; stream: of all, or of each, [B]; first: as of `noise`.
    Costs nothing where all are greedy.
    """

    def one(words: Array, position: Array, stream: int | Array) -> Array:
        return noise(words, position, stream=stream, shape=(num,), first=first)

    def draw() -> Array:
        axes = 0, 0, None if isinstance(stream, int) else 0
        return jnp.where(greedy[:, None], 0.0, jax.vmap(one, axes)(words, position, stream))

    return jax.lax.cond(greedy.all(), lambda: jnp.zeros((greedy.size, num)), draw)


def uniforms(words: Array, position: Array, *, stream: int, num: int) -> Array:
    """Returns numbers between 0 and 1, [num], neither among them, of 32 bits where they are small.

    So a chance of 1 always comes true and one of 0 never, where it is compared by `<`.
    """
    key = jax.random.fold_in(jax.random.wrap_key_data(words), position)
    bits = jax.random.bits(jax.random.fold_in(key, stream), (num,), jnp.uint32)
    return jnp.minimum((bits.astype(jnp.float32) + 0.5) * 2.0**-32, 1 - 2.0**-24)


seed = Rule("seed", Seed, row, lambda logits, row, context: logits, on_shards=True)
