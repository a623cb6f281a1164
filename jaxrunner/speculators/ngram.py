"""Prompt lookup: drafts the tokens that followed an earlier occurrence of a request's last tokens.

arXiv:2304.04487 drafts from a reference text in this way. As in vLLM, the longest occurrence
counts, and of equally long ones the first.
"""

import jax.numpy as jnp

from jaxrunner.api.lookups import MAX_NGRAM
from jaxrunner.api.speculative_config import MAX_DRAFTS
from jaxrunner.api.validation import Bound, validate
from jaxrunner.indexing import take
from jaxrunner.speculators.speculator import DraftInputs, Proposal, Speculator, with_sizes
from jaxrunner.types import Array


def ngram(num_drafts: int, *, min_n: int = 1, max_n: int = 5) -> Speculator:
    """Returns a speculator that looks up n-grams of `min_n` to `max_n` tokens.

    It drafts token 0 where there is none. A model needs no weights for it.

    Raises:
      TypeError, ValueError: a number is of the wrong type or out of range; names it.
    """
    validate("num_drafts", num_drafts, Bound(int, 1, MAX_DRAFTS))
    for name, value in dict(min_n=min_n, max_n=max_n).items():
        validate(name, value, Bound(int, 1, MAX_NGRAM))
    if min_n > max_n:
        raise ValueError(f"min_n={min_n} exceeds max_n={max_n}, no n-gram is as long: lower it")

    propose = with_sizes(_propose, num_drafts=num_drafts, min_n=min_n, max_n=max_n)
    return Speculator("ngram", num_drafts, propose)


def _propose(sizes: dict[str, int], inputs: DraftInputs) -> Proposal:
    requests, slot = inputs.requests, inputs.rows.slot
    ids, total_len = take(requests.token_ids, slot), take(requests.total_len, slot)
    return Proposal(lookup(ids, total_len, **sizes)[0])


def lookup(
    token_ids: Array, total_len: Array, *, num_drafts: int, min_n: int, max_n: int
) -> tuple[Array, Array]:
    """Returns drafts, [B, K], and whether an n-gram was found, [B]; drafts are -1 where not.

    token_ids: [B, L], of which the first `total_len`, [B], count. An occurrence may overlap the
    last tokens. Where its continuation reaches the end of the tokens it goes on with the drafts, as
    if these had been accepted; vLLM drafts nothing there.
    """
    (_, L), at = token_ids.shape, jnp.arange(token_ids.shape[1])[None]
    last = total_len[:, None] - 1
    # How many tokens up to each one are those up to the last: all are compared at once, one shift
    # after the other, so that a compiler fuses the passes into one and keeps nothing of [B, L].
    runs = jnp.ones(token_ids.shape, jnp.bool)
    length = jnp.zeros(token_ids.shape, jnp.int32)
    for i in range(min(max_n, L)):
        wanted = jnp.take_along_axis(token_ids, jnp.maximum(last - i, 0), 1)
        shifted = jnp.pad(token_ids[:, : L - i], ((0, 0), (i, 0)))
        runs &= (shifted == wanted) & (at >= i)
        length += runs.astype(jnp.int32)
    # One maximum finds the longest and of those the first: a length outweighs all positions.
    rank = jnp.where((length >= min_n) & (at < last), length * L + (L - 1 - at), -1).max(1)
    found = rank >= 0
    start = jnp.where(found, L - rank % L, 0)[:, None]
    period = jnp.maximum(last + 1 - start, 1)
    drafts = jnp.take_along_axis(token_ids, start + jnp.arange(num_drafts)[None] % period, 1)
    return jnp.where(found[:, None], drafts, -1), found
