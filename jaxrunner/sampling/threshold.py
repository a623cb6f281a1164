"""Top-k and top-p by search over a row of logits that lies on several devices.

Kept are all tokens above a cut, and the first of those at the cut. Each round tries several cuts
between two bounds: devices exchange the number of tokens that reach each cut, and their mass. The
search ends when the tokens between the bounds are one, or all equal.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxrunner.parallel.vocabulary import Vocabulary
from jaxrunner.types import Array

PARTS = 16  # of a bracket in each round: finds 4 of 32 bits; devices exchange numbers for each
_TINY = 2.0**-126  # the smallest normal float32


class Bracket(NamedTuple):
    """Two keys of logits, with how many tokens reach them and their mass: scalars."""

    low: Array  # at or below the cut
    low_num: Array
    low_mass: Array
    high: Array  # above the cut
    high_num: Array
    high_mass: Array

    @property
    def each_mass(self) -> Array:
        """The mass of each token between the keys, once all of them are equal."""
        return (self.low_mass - self.high_mass) / jnp.maximum(self.low_num - self.high_num, 1)


def keeps(logits: Array, k: Array, p: Array, vocabulary: Vocabulary) -> Array:
    """Returns whether top-k, then top-p, keeps each token of a device's logits, [S].

    k of 0 and p of 1 are off. Counts are exact. Masses are summed in float32, on each device first,
    then over devices in their order: within rounding, top-p may cut elsewhere than in a sorted row.
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
    """Returns uint32 keys in the order of float32; 0 equals -0, and NaN equals -inf."""
    x = jnp.where(x == 0, 0.0, jnp.where(jnp.isnan(x), -jnp.inf, x))
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    return jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(1 << 31))


def _search(
    bracket: Bracket, wanted: Array, measure: Callable, enough: Callable[[Array, Array], Array]
) -> Bracket:
    """Narrows a bracket to the largest key that enough tokens reach; unchanged if not `wanted`."""

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
