"""What is drawn: the exact distribution, one rule for ties, noise by seed and position alone."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrunner import step
from jaxrunner.api.sampling_params import SamplingParams
from jaxrunner.program.bucket import SampleSize
from jaxrunner.types import SamplingMetadata, State
from tests.support import rules

LOGITS = np.array([3.0, 1.0, 2.5, 2.5, -1.0, 0.0, 2.0, -np.inf], np.float32)
KINDS = {
    "plain": {},
    "temperature": dict(temperature=1.7),
    "top-k": dict(top_k=3),
    "top-p": dict(top_p=0.7),
    "min-p": dict(min_p=0.3),
    "combined": dict(temperature=1.4, top_k=5, top_p=0.9, min_p=0.1),
}


def oracle(logits, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """Returns the exact probabilities, float64: one token at a time, no vector tricks."""
    x = np.array(logits, np.float64) / temperature
    keep = [t for t in range(len(x)) if x[t] > -np.inf]
    if min_p:
        keep = [t for t in keep if x[t] >= max(x) + np.log(min_p)]
    keep.sort(key=lambda t: (-x[t], t))
    keep = keep[: top_k or len(keep)]
    weights = [np.exp(x[t] - max(x)) for t in keep]
    kept, mass = [], 0.0
    for t, w in zip(keep, weights, strict=True):
        if kept and mass >= top_p * sum(weights):
            break
        kept.append(t)
        mass += w
    out = np.zeros(len(x))
    for t in kept:
        out[t] = np.exp(x[t] - max(x)) / mass
    return out


def one(logits, **settings):
    """Returns what the rules make of one row."""
    return rules.processed([logits], [SamplingParams(**settings)])[0]


@pytest.mark.parametrize("all_rules", [False, True], ids=["usual rules", "all rules"])
@pytest.mark.parametrize("kind", KINDS)
def test_draws_follow_the_exact_distribution(kind, all_rules):
    settings = KINDS[kind]
    params = SamplingParams(**settings)
    count, rounds = 1000, 40
    drawn = rules.draws(LOGITS, params, range(count), range(rounds), all_rules=all_rules).ravel()
    expected = oracle(LOGITS, **settings) * count * rounds
    seen = np.bincount(drawn, minlength=len(LOGITS))
    possible = expected > 0
    assert seen[~possible].sum() == 0
    chi_square = ((seen - expected)[possible] ** 2 / expected[possible]).sum()
    freedom = possible.sum() - 1
    assert chi_square < freedom + 4 * np.sqrt(2 * freedom) + 8  # far beyond the 0.999 quantile


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("kind", KINDS)
def test_rules_equal_their_oracle(kind, seed):
    rng = np.random.default_rng(seed)
    logits = np.round(rng.normal(size=501) * 3, 1)  # with ties
    logits[rng.integers(0, 501, 30)] = -np.inf
    out = one(logits, **KINDS[kind])
    want = oracle(logits, **KINDS[kind])
    np.testing.assert_array_equal(out > -np.inf, want > 0)
    np.testing.assert_allclose(np.asarray(jax.nn.softmax(jnp.asarray(out))), want, atol=1e-6)


@pytest.mark.parametrize("rows", [1, 33])
def test_ties_of_top_k_go_to_the_lower_id_at_every_batch_size(rows):
    params = [SamplingParams(top_k=2)] * rows
    kept = rules.processed([[3, 2, 2, 1]] * rows, params) > -np.inf
    assert kept.tolist() == [[True, True, False, False]] * rows


@pytest.mark.parametrize("p,count", [(0.6, 2), (0.5, 1), (0.81, 3), (1e-6, 1), (1.0, 3)])
def test_top_p_keeps_the_fewest_that_reach_it(p, count):
    assert (one(np.log([0.5, 0.3, 0.2]), top_p=p) > -np.inf).sum() == count


def test_top_p_acts_on_what_top_k_left():
    kept = one(np.log([0.4, 0.3, 0.2, 0.1]), top_k=2, top_p=0.57) > -np.inf
    assert kept.sum() == 1  # 0.4 / 0.7 is 0.571


def test_min_p_counts_from_the_likeliest():
    assert (one([2.0, -0.30, -0.31], min_p=0.1) > -np.inf).tolist() == [True, True, False]
    assert (one([2.0, -2.60, -2.61], min_p=0.1, temperature=2) > -np.inf).tolist() == [
        True, True, False,
    ]  # fmt: skip


@pytest.mark.parametrize("all_rules", [False, True])
def test_greedy_is_the_argmax_whatever_the_seed(all_rules):
    greedy = SamplingParams(temperature=0.0)
    drawn = rules.draw([1.0, 5.0, 5.0, 2.0], greedy, range(50), 3, all_rules=all_rules)
    assert set(drawn.tolist()) == {1}


def test_noise_depends_on_seed_and_position_alone():
    params, logits = SamplingParams(), np.zeros(8, np.float32)
    alone = [rules.draw(logits, params, [s], 5)[0] for s in range(6)]
    assert rules.draw(logits, params, list(range(6)), 5).tolist() == alone
    assert rules.draw(logits, params, [5, 4, 3, 2, 1, 0], 5).tolist() == alone[::-1]
    at_5, at_6 = (rules.draw(logits, params, range(6), p) for p in (5, 6))
    assert (at_5 != at_6).any()
    wide = [2**63 + 1, 1] * 3  # both words of a seed count
    many = np.stack([rules.draw(logits, params, wide, p) for p in range(20)])
    assert (many[:, 0] != many[:, 1]).any()


@functools.cache
def drawer() -> Any:
    """Returns the draw of a step, compiled: tokens of rows by slots and positions."""
    state = State(rules.requests(1000), (), rules.tables([SamplingParams()] * 1000))

    def draw(logits, slot, position):
        ones = jnp.ones_like(slot)
        rows = SamplingMetadata(slot, ones, ones > 0, position, jnp.zeros_like(slot))
        size = SampleSize(slot.size)
        drawn = step.draw(logits[:, None], state, rows, None, program=rules.program(), size=size)
        return drawn.token_ids[:, 0]

    return jax.jit(draw)


def test_a_step_draws_by_seed_and_position_in_any_batch():
    rng, some = np.random.default_rng(0), np.arange(20, dtype=np.int32)
    logits = jnp.asarray(rng.normal(size=(20, 61)), jnp.float32)
    at = jnp.asarray(rng.integers(1, 99, 20), jnp.int32)
    alone = np.array(drawer()(logits, jnp.asarray(some), at))
    order = rng.permutation(20)
    assert (drawer()(logits[order], jnp.asarray(some[order]), at[order]) == alone[order]).all()
    padded = jnp.concatenate([logits[:5], logits[5:] * 0])
    slots = jnp.asarray([0, 1, 2, 3, 4, *[1000] * 15], jnp.int32)
    assert (drawer()(padded, slots, at)[:5] == alone[:5]).all()
    assert (drawer()(logits, jnp.asarray(some), at + 1) != alone).any()
    assert (drawer()(logits, jnp.asarray(some + 20), at) != alone).any()


def test_a_hundred_thousand_draws_of_a_step_are_the_softmax():
    logits = np.random.default_rng(1).normal(size=61).astype(np.float32)
    rows, slots = jnp.tile(logits, (1000, 1)), jnp.arange(1000, dtype=jnp.int32)
    seen = np.zeros(61)
    for position in range(100):
        drawn = drawer()(rows, slots, jnp.full(1000, position, jnp.int32))
        seen += np.bincount(np.array(drawn), minlength=61)
    expected = oracle(logits) * 1e5
    chi_square = ((seen - expected) ** 2 / expected).sum()
    assert chi_square < 60 + 4 * np.sqrt(120) + 8  # far beyond the 0.999 quantile


def test_more_rules_in_the_program_change_no_bit():
    params = [SamplingParams(temperature=0.7, top_k=5), SamplingParams(), SamplingParams(min_p=0.2)]
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(3, 61)).astype(np.float32)
    batch = rules.batched(rules.requests(3), range(3), [4, 5, 6])
    tables = rules.tables(params)
    run = jax.jit(
        functools.partial(rules.process, program=rules.program()), static_argnames="all_rules"
    )
    few, many = (
        run(jnp.asarray(logits), batch, tables, all_rules=all_rules) for all_rules in (False, True)
    )
    np.testing.assert_array_equal(few.logits, many.logits)
    np.testing.assert_array_equal(few.kept_mass, many.kept_mass)


@pytest.mark.parametrize("num", [64, 32000])
def test_a_row_with_one_nan_is_not_finite(num):
    logits = np.tile(np.linspace(-3, 3, num, dtype=np.float32), (8, 1))
    logits[5, num // 3] = np.nan
    batch = rules.batched(rules.requests(8), range(8), [0] * 8)
    tables = rules.tables([SamplingParams(temperature=0)] * 8)
    run = rules.sampler(rules.program(), SampleSize(8, False, 0))
    assert np.flatnonzero(run(jnp.asarray(logits), batch, tables).not_finite).tolist() == [5]


def test_a_padded_row_draws_without_nan():
    batch = rules.batched(rules.requests(1), [1], [0])
    for all_rules in (False, True):
        run = rules.sampler(rules.program(), SampleSize(1, all_rules, 0))
        out = run(jnp.asarray(LOGITS)[None], batch, rules.tables([SamplingParams()]))
        assert 0 <= int(out.token_ids[0]) < len(LOGITS) and not out.not_finite[0]
