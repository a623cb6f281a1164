"""Top-k and top-p by search, where no device has the whole row: no token is told to another.

What is kept are all tokens above a cut, and the first of those at the cut. Each round tries a few
cuts between two bounds, for which devices tell how many tokens reach them and with what mass. It
ends where one token is left between the bounds, or tokens that are all equal.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxrunner.parallel.vocabulary import Vocabulary
from jaxrunner.types import Array

PARTS = 16  # that a round cuts a bracket into: 4 bits of 32; each is told of, so more cost more
_TINY = 2.0**-126  # the smallest that is not flushed to 0


class Bracket(NamedTuple):
    """Two keys of logits, with how many tokens reach them and their mass: scalars."""

    low: Array  # what is sought or below
    low_num: Array
    low_mass: Array
    high: Array  # above what is sought
    high_num: Array
    high_mass: Array

    @property
    def each_mass(self) -> Array:
        """The mass of a token between the keys, all of which are equal."""
        return (self.low_mass - self.high_mass) / jnp.maximum(self.low_num - self.high_num, 1)


def keeps(logits: Array, k: Array, p: Array, vocabulary: Vocabulary) -> Array:
    """Returns which tokens of logits, [S], top-k and top-p of what it leaves keep; k of 0 is off.

    Counts are exact. Masses are sums of float32, those of each device first, then of devices in
    their order, so a cut of top-p may be another than a sorted row's within their rounding.
    """
    size = logits.size * vocabulary.num_shards
    keys, best = _order(logits), vocabulary.max(logits)
    mass = jnp.exp(logits - jnp.where(best == -jnp.inf, 0.0, best))

    def measure(tried: Array) -> tuple[Array, Array]:
        reaches = keys[None] >= tried[:, None]
        num, part = reaches.sum(-1, dtype=jnp.float32), jnp.where(reaches, mass[None], 0.0).sum(-1)
        num, part = vocabulary.each(jnp.stack([num, part])).sum(0)
        return num, part

    zero, bottom = jnp.float32(0), jnp.zeros(1, jnp.uint32)
    num, total = measure(bottom)
    whole = Bracket(bottom[0], num[0], total[0], _order(best) + 1, zero, zero)
    k = jnp.where(k > 0, jnp.minimum(k, size), size).astype(jnp.float32)
    top_k = _search(whole, k < size, measure, lambda num, _: num >= k)
    goal = p * (top_k.high_mass + (k - top_k.high_num) * top_k.each_mass)
    start = top_k._replace(high=whole.high, high_num=zero, high_mass=zero)
    top_p = _search(start, p < 1, measure, lambda _, mass: mass >= goal)
    due = jnp.ceil((goal - top_p.high_mass) / jnp.maximum(top_p.each_mass, _TINY))
    due = jnp.clip(due, 1, jnp.minimum(top_p.low_num, k) - top_p.high_num)
    cut, due = jax.tree.map(
        lambda one, other: jnp.where(p < 1, one, other), (top_p, due), (top_k, k - top_k.high_num)
    )
    above = keys >= cut.high
    at_cut = (keys >= cut.low) & ~above
    return above | (at_cut & (vocabulary.cumsum(at_cut) <= due.astype(jnp.int32)))


def _order(x: Array) -> Array:
    """Returns keys, uint32, in the order of float32; both zeros have one, and NaN that of -inf."""
    x = jnp.where(x == 0, 0.0, jnp.where(jnp.isnan(x), -jnp.inf, x))
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    return jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(1 << 31))


def _search(
    bracket: Bracket, wanted: Array, measure: Callable, enough: Callable[[Array, Array], Array]
) -> Bracket:
    """Narrows a bracket to the largest key that enough tokens reach, if that is wanted."""

    def goes_on(b: Bracket) -> Array:
        return wanted & (b.high - b.low > 1) & (b.low_num - b.high_num > 1)

    def body(b: Bracket) -> Bracket:
        width = b.high - b.low
        step = (width - 1) // PARTS + 1
        tried = b.low + jnp.minimum(jnp.arange(1, PARTS, dtype=jnp.uint32) * step, width)
        num, mass = measure(tried)
        last = (enough(num, mass) & (tried < b.high)).sum()

        def bounds(low: Array, between: Array, high: Array) -> tuple[Array, Array]:
            all_ = jnp.concatenate([low[None], between, high[None]])
            return all_[last], all_[last + 1]

        key = bounds(b.low, tried, b.high)
        num = bounds(b.low_num, num, b.high_num)
        mass = bounds(b.low_mass, mass, b.high_mass)
        return Bracket(key[0], num[0], mass[0], key[1], num[1], mass[1])

    return jax.lax.while_loop(goes_on, body, bracket)
