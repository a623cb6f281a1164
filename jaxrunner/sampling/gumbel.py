"""Gumbel noise by a hash of 32 bits for each token, and another for each group of tokens.

A sample is the argmax of logits plus noise -log(E), where E is exponential. The precision of a
small E decides how often an unlikely token is sampled. So one token in 2**23 is rare: its E is
below 2**-23, with 32 bits of its own. E of all other tokens is 2**-23 more than their 32 bits give.
One hash for a group says which of its tokens is rare, so that a kernel can skip tokens that only
rare noise would select.

Plain JAX and kernels get the same bits: no rounded product is part of a sum, so it does not matter
whether a compiler fuses multiplication and addition.
"""

import jax
import jax.numpy as jnp

from jaxrunner.types import Array

GROUP_BITS = 12  # a group has at most one rare token; independent ones: two in 2**23 groups
GROUP = 1 << GROUP_BITS
RARE = 2**31  # first number that hashes a group; all token ids are below
MAX_USUAL = 15.95  # -log(2**-23) is 15.9424
MIN_NOISE = -3.15  # -log(-log(2**-33)) is -3.13
_SPLIT = 2.0**-23  # of E


def gumbel(key: Array, num_tokens: int) -> Array:
    """Returns the noise of all tokens, [V], for a key of `jax.random`."""
    groups = jnp.arange(-(-num_tokens // GROUP), dtype=jnp.uint32)
    keys = jax.vmap(jax.random.fold_in, (None, 0))(key, groups + jnp.uint32(RARE))
    high, low = jax.random.key_data(keys).T
    token_ids, noise = (jnp.repeat(x, GROUP)[:num_tokens] for x in rare(groups, high, low))
    bits = jax.random.bits(key, (num_tokens,), jnp.uint32)
    return jnp.where(jnp.arange(num_tokens) == token_ids, noise, usual(bits))


def usual(bits: Array) -> Array:
    """Returns the noise, at most `MAX_USUAL`, of tokens that are not rare; bits: 32 of each."""
    share = _share(bits)
    small = share + _SPLIT
    # -log(1 - x) of a small x is x + x**2 / 2; ~bits is as near to 1 as bits to 0.
    small = small * (1.0 + 0.5 * small)
    return -jnp.log(jnp.where(share < 2.0**-8, small, _SPLIT - jnp.log(_share(~bits))))


def rare(groups: Array, high: Array, low: Array) -> tuple[Array, Array]:
    """Returns the rare token of each group, -1 for none, and its noise; high, low: its hashes."""
    is_rare = high < jnp.uint32(2**21)  # one group in 2**11 has one: one token in 2**23
    token_ids = (groups << jnp.uint32(GROUP_BITS)) | (high & jnp.uint32(GROUP - 1))
    noise = -jnp.log(_SPLIT * _share(low))
    return jnp.where(is_rare, token_ids.astype(jnp.int32), -1), jnp.where(is_rare, noise, -jnp.inf)


def _share(bits: Array) -> Array:
    """Maps 32 bits to a number above 0 of as many bits as a float has, up to 1."""
    return (bits.astype(jnp.float32) + 0.5) * 2.0**-32
