"""Gumbel noise: each token has a hash of 32 bits, and each group of tokens one for what is rare.

A draw is the largest of logits plus noise -log(E), where E is exponential. Where E is small its
precision decides how often an unlikely token is drawn, so one token in 2**23 has E below 2**-23,
with 32 bits of its own, and the others have 2**-23 more than 32 bits give. Which tokens are rare
is found by one hash for a group, so that a kernel skips tokens that only a rare noise could save.

What is computed here gives the same bits in plain JAX and in a kernel: no product is summed that
is rounded, so it does not matter where a compiler fuses the two.
"""

import jax
import jax.numpy as jnp

from jaxrunner.types import Array

GROUP_BITS = 12  # a group has one rare token at most; of two independent ones in 2**23 groups
GROUP = 1 << GROUP_BITS
RARE = 2**31  # hashes of groups are counted from here: no token id comes so far
MAX_USUAL = 15.95  # -log(2**-23) is 15.9424
MIN_NOISE = -3.15  # -log(-log(2**-33)) is -3.13
_SPLIT = 2.0**-23  # of E


def gumbel(key: Array, num_tokens: int) -> Array:
    """Returns the noise of all tokens, [V], for a key of `jax.random`."""
    groups = jnp.arange(-(-num_tokens // GROUP), dtype=jnp.uint32)
    high, low = _hashes(key, groups + jnp.uint32(RARE))
    token_ids, noise = (jnp.repeat(x, GROUP)[:num_tokens] for x in rare(groups, high, low))
    bits = jax.random.bits(key, (num_tokens,), jnp.uint32)
    return jnp.where(jnp.arange(num_tokens) == token_ids, noise, usual(bits))


def gumbel_from(first: Array, key: Array, num_tokens: int) -> Array:
    """Returns what `gumbel` has of the tokens from id `first` on, [num_tokens]."""
    ids = jnp.asarray(first, jnp.int32) + jnp.arange(num_tokens)
    groups = (ids[0] >> GROUP_BITS) + jnp.arange(-(-num_tokens // GROUP) + 1)
    high, low = _hashes(key, groups.astype(jnp.uint32) + jnp.uint32(RARE))
    of_group = rare(groups.astype(jnp.uint32), high, low)
    token_ids, noise = (x[(ids >> GROUP_BITS) - groups[0]] for x in of_group)
    high, low = _hashes(key, ids)
    return jnp.where(ids == token_ids, noise, usual(high ^ low))  # as `jax.random.bits` joins them


def _hashes(key: Array, numbers: Array) -> Array:
    """Returns two words of 32 bits for each number, [2, ...]."""
    keys = jax.vmap(jax.random.fold_in, (None, 0))(key, numbers)
    return jax.random.key_data(keys).T


def usual(bits: Array) -> Array:
    """Returns the noise of tokens that are not rare, at most `MAX_USUAL`, for 32 bits of each."""
    share = _share(bits)
    small = share + _SPLIT
    # -log(1 - x) of a small x is x + x**2 / 2; ~bits is as near to 1 as bits to 0.
    small = small * (1.0 + 0.5 * small)
    return -jnp.log(jnp.where(share < 2.0**-8, small, _SPLIT - jnp.log(_share(~bits))))


def rare(groups: Array, high: Array, low: Array) -> tuple[Array, Array]:
    """Returns the rare token of each group, -1 for none, and its noise, for two hashes of it."""
    is_rare = high < jnp.uint32(2**21)  # one group in 2**11 has one: one token in 2**23
    token_ids = (groups << jnp.uint32(GROUP_BITS)) | (high & jnp.uint32(GROUP - 1))
    noise = -jnp.log(_SPLIT * _share(low))
    return jnp.where(is_rare, token_ids.astype(jnp.int32), -1), jnp.where(is_rare, noise, -jnp.inf)


def _share(bits: Array) -> Array:
    """Maps 32 bits to a number above 0 of as many bits as a float has, up to 1."""
    return (bits.astype(jnp.float32) + 0.5) * 2.0**-32
