"""Rejection sampling keeps the target's distribution, over several tokens and several steps.

Each test draws many requests at once, of seeds of their own; the target's probabilities of a token
depend on the token before it.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrunner.sampling.acceptance import Unverified, Verified, _emit, block, standard, synthetic
from jaxrunner.sampling.seed import ACCEPT, DRAFT, TARGET, noise, uniforms
from tests.support.chi_square import excess

slow = pytest.mark.slow
B, V, N = 50_000, 3, 3
NUM_SEQUENCES = 70_000  # of N tokens: over 200,000 draws
P = np.array([[0.2, 0.5, 0.3], [0.55, 0.05, 0.4], [0.3, 0.3, 0.4]], np.float32)
Q = np.array([[0.6, 0.3, 0.1], [0.2, 0.5, 0.3], [0.05, 0.15, 0.8]], np.float32)
LOG_P, LOG_Q = np.log(P), np.log(Q)


def run_jitted(f: Any, *args: Any) -> Any:
    return jax.tree.map(np.asarray, jax.jit(f)(*args))


def seeds(num: int = B) -> jax.Array:
    return jnp.stack([jnp.full(num, 7, jnp.uint32), jnp.arange(num, dtype=jnp.uint32)], 1)


def draw(words: jax.Array, position: jax.Array, stream: int) -> jax.Array:
    """Returns noise, [B, V]."""
    return jax.vmap(functools.partial(noise, stream=stream, shape=(V,)))(words, position)


def draft(last: jax.Array, words: jax.Array, next_pos: jax.Array, K: int, how: str) -> Unverified:
    """Drafts K tokens after `last`, [B], and computes the logits of target and drafts."""
    log_p, log_q, ids = jnp.asarray(LOG_P), jnp.asarray(LOG_Q), [last]
    for j in range(K):
        scores = log_q[ids[-1]]
        if how == "sampled":
            scores += draw(words, next_pos, DRAFT + j)
        elif how == "coupled":
            scores += draw(words, next_pos + j, TARGET)
        elif how == "any":
            scores = jnp.roll(jnp.eye(V)[last], j, 1)
        ids.append(jnp.argmax(scores, 1).astype(jnp.int32))
    before, full = jnp.stack(ids, 1), jnp.full(last.shape, K)
    logits = log_q[before[:, :-1]] if how == "sampled" else None
    return Unverified(log_p[before], before[:, 1:], full, logits, full < 0, words, next_pos)


def first_tokens(verify: Any, K: int, how: str, *, few: bool) -> np.ndarray:
    """Returns the first N tokens that steps of K drafts give each request, [NUM_SEQUENCES, N]."""

    def step(i: jax.Array, carry: Any, words: jax.Array) -> Any:
        ids, total = carry
        given = draft(ids[rows, total - 1], words, total, K, how)
        if few:
            num = (words[:, 1].astype(jnp.int32) // V + i) % (K + 1)
            given = given._replace(num_drafts=num)
        out = verify(given)
        at = total[:, None] + jnp.arange(K + 1)[None]
        return ids.at[rows[:, None], at].set(out.token_ids), total + out.num_accepted + 1

    def run(words: jax.Array, total: jax.Array) -> jax.Array:
        ids = jnp.zeros((NUM_SEQUENCES, 1 + (K + 1) * N), jnp.int32)
        ids, _ = jax.lax.fori_loop(0, N, functools.partial(step, words=words), (ids, total))
        return ids[:, 1 : 1 + N]

    rows = jnp.arange(NUM_SEQUENCES)
    return run_jitted(run, seeds(NUM_SEQUENCES), jnp.ones(NUM_SEQUENCES, jnp.int32))


def one_step(verify: Any, p: Any, q: Any, K: int, how: str, **changes: Any) -> Any:
    """Returns drafts, [B, K], and what became of them; p and q, [V], hold after any token."""
    given = np.array([p, q], np.float32), seeds(), np.full(B, 5, np.int32), changes
    return jax.tree.map(np.asarray, _one_step(*given, verify=verify, K=K, how=how))


@functools.partial(jax.jit, static_argnames=("verify", "K", "how"))
def _one_step(both: Any, words: Any, next_pos: Any, changes: Any, *, verify: Any, K: int, how: str):
    log_p, log_q = jnp.log(both)
    scores = jnp.broadcast_to(log_q, (B, K, log_q.size))
    drafts = jnp.full((B, K), jnp.argmax(log_q))
    if how == "sampled":
        one = functools.partial(noise, stream=DRAFT, shape=(K, log_q.size))
        drafts = jnp.argmax(scores + jax.vmap(one)(words, next_pos), 2).astype(jnp.int32)
    full, logits = jnp.full(B, K), jnp.broadcast_to(log_p, (B, K + 1, log_p.size))
    of_drafts = scores if how == "sampled" else None
    given = Unverified(logits, drafts, full, of_drafts, full < 0, words, next_pos)
    return drafts, verify(given._replace(**changes))


def is_share(seen: np.ndarray, expected: float) -> bool:
    """Whether a share of draws is what is expected, up to four standard deviations."""
    return abs(seen.mean() - expected) < 4 * np.sqrt(expected * (1 - expected) / seen.size) + 1e-9


@pytest.mark.parametrize(
    ("verify", "how", "few"),
    [
        (standard, "coupled", True), (standard, "sampled", True), (block, "sampled", True),
        (block, "likeliest", False), pytest.param(standard, "likeliest", False, marks=slow),
        pytest.param(standard, "any", True, marks=slow),
        pytest.param(block, "any", True, marks=slow),
    ],
)  # fmt: skip
def test_sequences_are_distributed_as_the_target_says(verify: Any, how: str, few: bool):
    """Where `few`, a request may have fewer drafts than others, or none."""
    tokens = first_tokens(verify, 2 if how == "likeliest" else 3, how, few=few)
    seen = np.bincount(tokens @ V ** np.arange(N)[::-1], minlength=V**N)
    expected = NUM_SEQUENCES * P[0][:, None, None] * P[:, :, None] * P[None]
    assert excess(seen, expected.reshape(-1)) < 4


@pytest.mark.parametrize("verify", [standard, block])
@pytest.mark.parametrize(
    ("how", "accepts", "recovers"),
    [("sampled", 0.6, [0, 0.5, 0.5]), ("likeliest", 0.2, [0, 0.625, 0.375])],
)
def test_one_draft_is_accepted_and_replaced_as_often_as_it_should(
    verify: Any, how: str, accepts: float, recovers: list[float]
):
    drafts, out = one_step(verify, P[0], Q[0], 1, how)
    stood = out.num_accepted == 1
    assert is_share(stood, accepts) and (out.token_ids[stood, 0] == drafts[stood, 0]).all()
    seen = np.bincount(out.token_ids[~stood, 0], minlength=V)
    assert seen[0] == 0 and excess(seen[1:], (~stood).sum() * np.array(recovers[1:])) < 4
    assert (out.token_ids[~stood, 1] == 0).all()
    bonus = np.bincount(out.token_ids[stood, 1], minlength=V)
    assert excess(bonus, stood.sum() * P[0]) < 4


def test_a_block_is_accepted_more_often_than_its_tokens_one_by_one():
    """The example of arXiv:2403.10444: of two drafts, 10/9 against 11/9 are accepted."""
    p, q = [1 / 3, 2 / 3], [2 / 3, 1 / 3]
    means = [one_step(verify, p, q, 2, "sampled")[1].num_accepted for verify in (standard, block)]
    assert [x.mean() for x in means] == pytest.approx([10 / 9, 11 / 9], abs=0.008)
    one, other = (one_step(verify, P[0], Q[0], 1, "sampled")[1] for verify in (standard, block))
    np.testing.assert_array_equal(one.token_ids, other.token_ids)


@pytest.mark.parametrize("verify", [standard, block])
def test_what_follows_the_last_draft_is_the_target_s_own_sample(verify: Any):
    """Bit for bit, and of requests without drafts too."""

    def run(words: jax.Array, last: jax.Array) -> Any:
        given = draft(last, words, last + 9, 3, "sampled")
        given = given._replace(num_drafts=words[:, 1].astype(jnp.int32) % 4)
        out = verify(given)
        logits = jnp.take_along_axis(given.logits, given.num_drafts[:, None, None], 1)[:, 0]
        plain = jnp.argmax(logits + draw(words, given.next_pos + given.num_drafts, TARGET), 1)
        return given.num_drafts, given.drafts, out, plain

    num, drafts, out, plain = run_jitted(run, seeds(4000), jnp.arange(4000) % V)
    all_stood = out.num_accepted == num
    assert (num[all_stood] == [[0], [1], [2], [3]]).any(1).all() and all_stood[num == 0].all()
    own = out.token_ids[np.arange(4000), out.num_accepted]
    np.testing.assert_array_equal(own[all_stood], plain[all_stood])
    for i in range(3):
        stood = out.num_accepted > i
        np.testing.assert_array_equal(out.token_ids[stood, i], drafts[stood, i])
    assert (out.token_ids[np.arange(4)[None] > out.num_accepted[:, None]] == 0).all()
    assert (all_stood | (verify in (standard, block))).all()


@pytest.mark.parametrize(
    ("verify", "how"),
    [
        (standard, "any"),
        (block, "sampled"),
        pytest.param(standard, "sampled", marks=slow),
        pytest.param(block, "any", marks=slow),
    ],
)
def test_greedy_requests_get_the_likeliest_tokens_whatever_is_drafted(verify: Any, how: str):
    def run(words: jax.Array, last: jax.Array) -> Any:
        given = draft(last, words, last + 9, 3, how)
        greedy = jnp.arange(3000) % 2 == 0
        return verify(given._replace(greedy=greedy)), given, verify(given)

    out, given, sampled = run_jitted(run, seeds(3000), jnp.arange(3000) // 2 % V)
    best = given.logits.argmax(2)
    for i in range(0, 3000, 2):
        want = [*given.drafts[i], -1] == best[i]
        n = int(np.argmin(want))  # of the first that is not the likeliest
        assert out.num_accepted[i] == n
        assert out.token_ids[i].tolist() == [*best[i, : n + 1], *[0] * (3 - n)]
    assert len(set(out.num_accepted[::2])) > 1
    np.testing.assert_array_equal(out.token_ids[1::2], sampled.token_ids[1::2])


def test_synthetic_rates_are_met():
    count = functools.partial(synthetic, rates=(0.9, 0.5, 1.0))
    num = run_jitted(count, jnp.full(B, 3), seeds(), jnp.arange(B))
    for i, rate in enumerate([0.9, 0.45, 0.45]):
        assert is_share(num > i, rate)
    few = run_jitted(count, jnp.arange(B) % 3, seeds(), jnp.arange(B))
    np.testing.assert_array_equal(few, np.minimum(num, np.arange(B) % 3))


@pytest.mark.parametrize("verify", [standard, block])
def test_a_draft_that_is_no_token_never_stands(verify: Any):
    bad = jnp.array([-1, V, 2**30], jnp.int32)[jnp.arange(B) % 3]
    drafts = jnp.ones((B, 3), jnp.int32).at[:, 1].set(bad)
    _, out = one_step(verify, P[0], Q[0], 3, "given", drafts=drafts)
    assert out.num_accepted.max() == 1 and out.token_ids.max() < V and out.token_ids.min() >= 0
    stood = out.num_accepted == 1
    assert excess(np.bincount(out.token_ids[stood, 1]), stood.sum() * P[0]) < 4
    assert is_share(stood, 0.5)


def test_where_nothing_is_left_to_replace_a_draft_the_target_draws():
    """As rounding may have it: the draft is all that the target would say, and does not stand."""

    def reject(given: Unverified) -> Verified:
        return _emit(given, jnp.zeros_like(given.num_drafts))

    for how in ("likeliest", "sampled"):
        _, out = one_step(reject, [0, 1, 0], [0, 1, 0], 1, how)
        assert (out.num_accepted == 0).all() and (out.token_ids[:, 0] == 1).all()


@pytest.mark.parametrize("verify", [standard, block])
def test_all_drafts_of_the_target_itself_stand(verify: Any):
    _, out = one_step(verify, P[1], P[1], 3, "sampled")
    assert (out.num_accepted < 3).mean() < 1e-4  # rounding


def test_chances_of_0_and_1_are_certain():
    one = functools.partial(uniforms, stream=ACCEPT, num=8)
    drawn = run_jitted(jax.vmap(one), seeds(), jnp.arange(B))
    assert 0 < drawn.min() < 1e-5 and 1 - 1e-5 < drawn.max() < 1
    assert excess(np.histogram(drawn, 64, (0, 1))[0], np.full(64, 8 * B / 64)) < 4
    assert abs(np.corrcoef(drawn, rowvar=False) - np.eye(8)).max() < 0.02
