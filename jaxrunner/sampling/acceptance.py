"""Rejection sampling: which drafts are accepted, and the token that follows them.

`standard` and `block` keep the target's distribution, whatever the drafter. Drafts that come with
logits must be sampled from these, with noise of a stream of its own (`seed.DRAFT`); drafts without
logits may come from anywhere. `synthetic` accepts at given rates. "exact" verification, which
accepts a draft if the target samples the same token, is in `step.advance`.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxrunner.sampling.seed import ACCEPT, RECOVER, TARGET, noises, uniforms
from jaxrunner.types import Array

_TINY = 2.0**-126  # the smallest normal float32


class Unverified(NamedTuple):
    """K drafts of each of B requests, with J = K + 1 rows of logits."""

    # [B, J, V], float32, the target's after the rules: row j is of the position of draft j, and the
    # row behind a request's last draft of the token that follows.
    logits: Array
    drafts: Array  # [B, K]; a number that is no token id is never accepted
    num_drafts: Array  # [B], drafts of each request, 0 to K
    draft_logits: Array | None  # [B, K, V], float32, that the drafts were sampled from
    greedy: Array  # [B], whether the request takes the likeliest token
    words: Array  # [B, 2], its seed
    next_pos: Array  # [B], position of its first draft


class Verified(NamedTuple):
    """Tokens of a verified step."""

    token_ids: Array  # [B, J], the accepted drafts, then one token of the target; 0 behind it
    num_accepted: Array  # [B]


def standard(given: Unverified) -> Verified:
    """Accepts drafts one by one, each with probability min(1, p / q).

    p and q are the probabilities of the draft by target and drafter. arXiv:2211.17192, algorithm 1.
    """
    p, q = _probabilities(given)
    stands = _uniforms(given) * q < p
    return _emit(given, _in_a_row(given, _or_greedy(given, stands)))


def synthetic(
    num_drafts: Array, words: Array, next_pos: Array, *, rates: tuple[float, ...]
) -> Array:
    """Returns how many drafts of each request are accepted, [B], whatever they are.

    Measures speed. num_drafts, words and next_pos: as in `Unverified`. rates: the probability that
    each of K drafts is accepted if all before it are.
    """
    one = functools.partial(uniforms, stream=ACCEPT, num=len(rates))
    stands = jax.vmap(one)(words, next_pos) < jnp.asarray(rates, jnp.float32)[None]
    stands &= jnp.arange(len(rates))[None] < num_drafts[:, None]
    return jnp.cumprod(stands, axis=1, dtype=jnp.int32).sum(1)


def block(given: Unverified) -> Verified:
    """Accepts the longest run of drafts that passes as a block. arXiv:2403.10444, algorithm 2.

    On average it accepts at least as many drafts as `standard`.
    """
    p, q = _probabilities(given)
    share = _joint_share(p, q)
    left = _left_over(given, share, p)
    K = p.shape[1]
    is_last = jnp.arange(K)[None] == given.num_drafts[:, None] - 1
    # Where the sum is 0, target and drafter have one distribution: the next draft is accepted too.
    chance = jnp.where(is_last, share, left / jnp.maximum(left + (1 - share), _TINY))
    stands = (_uniforms(given) < chance) & _are_real(given)
    longest = jnp.where(stands, jnp.arange(1, K + 1)[None], 0).max(1)
    num = jnp.where(given.greedy, _in_a_row(given, _or_greedy(given, stands)), longest)
    before = jnp.concatenate([jnp.ones_like(share[:, :1]), share], 1)
    return _emit(given, num, jnp.take_along_axis(before, num[:, None], 1)[:, 0])


def _probabilities(given: Unverified) -> tuple[Array, Array]:
    """Returns the probability of each draft by the target, and by the drafter: [B, K] each."""
    V = given.logits.shape[2]
    is_token = (given.drafts >= 0) & (given.drafts < V)

    def of_drafts(logits: Array) -> Array:
        at = jnp.clip(given.drafts, 0, V - 1)[..., None]
        score = jnp.take_along_axis(logits, at, 2)[..., 0]
        return jnp.exp(score - jax.nn.logsumexp(logits, axis=2))

    p = jnp.where(is_token, of_drafts(given.logits[:, :-1]), 0.0)
    return p, jnp.ones_like(p) if given.draft_logits is None else of_drafts(given.draft_logits)


def _uniforms(given: Unverified) -> Array:
    """Returns a uniform number between 0 and 1 for each draft, [B, K]."""
    one = functools.partial(uniforms, stream=ACCEPT, num=given.drafts.shape[1])
    return jax.vmap(one)(given.words, given.next_pos)


def _are_real(given: Unverified) -> Array:
    """Returns whether each draft is one of its request's, and a token id, [B, K]."""
    K, V = given.drafts.shape[1], given.logits.shape[2]
    is_own = jnp.arange(K)[None] < given.num_drafts[:, None]
    return is_own & (given.drafts >= 0) & (given.drafts < V)


def _or_greedy(given: Unverified, stands: Array) -> Array:
    """Returns `stands`, [B, K]; for greedy requests whether drafts are the likeliest tokens."""
    likeliest = given.drafts == jnp.argmax(given.logits[:, :-1], axis=2)
    return jnp.where(given.greedy[:, None], likeliest, stands)


def _in_a_row(given: Unverified, stands: Array) -> Array:
    """Counts the drafts of each request before the first that is rejected, [B]."""
    return jnp.cumprod(stands & _are_real(given), axis=1, dtype=jnp.int32).sum(1)


def _joint_share(p: Array, q: Array) -> Array:
    """Returns p_i of the paper for the drafts up to each one, [B, K]: never over 1."""
    share, found = jnp.ones_like(p[:, 0]), []
    for ratio in (p / jnp.maximum(q, _TINY)).T:
        share = jnp.minimum(share * ratio, 1.0)
        found.append(share)
    return jnp.stack(found, 1)


def _left_over(given: Unverified, share: Array, p: Array) -> Array:
    """Returns by what mass the target exceeds the drafter for the token after each draft, [B, K].

    share: [B, K], scales the target's probabilities. p: [B, K], the target's of the drafts.
    """
    last = jnp.zeros_like(share[:, :1])  # after which nothing is drafted
    if given.draft_logits is None:
        return jnp.concatenate([share[:, :-1] * (1 - p[:, 1:]), last], 1)
    target, draft = (jax.nn.softmax(x[:, 1:]) for x in (given.logits[:, :-1], given.draft_logits))
    left = jnp.maximum(share[:, :-1, None] * target - draft, 0.0).sum(2)
    return jnp.concatenate([left, last], 1)


def _emit(given: Unverified, num: Array, share: Array | None = None) -> Verified:
    """Samples the token after `num`, [B], accepted drafts.

    share: [B], scales the target's probabilities before the drafter's are subtracted; None is 1.
    """
    (B, J, V), at = given.logits.shape, num[:, None]
    logits = jnp.take_along_axis(given.logits, at[..., None], 1)[:, 0]
    is_bonus = num == given.num_drafts
    rest = _residual(given, logits, at, jnp.ones(B) if share is None else share)
    # Where rounding left an empty residual, the token is sampled from the target's distribution.
    plain = is_bonus | given.greedy | (rest.max(1) == -jnp.inf)
    scores = jnp.where(plain[:, None], logits, rest)
    stream = jnp.where(is_bonus, TARGET, RECOVER)
    scores += noises(given.words, given.next_pos + num, given.greedy, stream=stream, num=V)
    token = jnp.argmax(scores, axis=1).astype(jnp.int32)[:, None]
    j = jnp.arange(J)[None]
    drafts = jnp.pad(given.drafts, ((0, 0), (0, 1)))
    return Verified(jnp.where(j < at, drafts, jnp.where(j == at, token, 0)), num)


def _residual(given: Unverified, logits: Array, at: Array, share: Array) -> Array:
    """Returns the logits, [B, V], of what replaces the rejected draft at `at`, [B, 1]."""
    at = jnp.minimum(at, given.drafts.shape[1] - 1)
    if given.draft_logits is None:
        draft = jnp.take_along_axis(given.drafts, at, 1)
        return jnp.where(jnp.arange(logits.shape[1])[None] == draft, -jnp.inf, logits)
    scale = jnp.log(share)[:, None]
    target = jax.nn.log_softmax(logits) + scale
    draft = jax.nn.log_softmax(jnp.take_along_axis(given.draft_logits, at[..., None], 1)[:, 0])
    # log(exp(target) - exp(draft)), where the difference is positive.
    more = target + jnp.log1p(-jnp.exp(jnp.minimum(draft - target, 0.0)))
    return jnp.where(draft < target, more, -jnp.inf)
