"""Sampling rules against float64 oracles, and draws against the exact distribution."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrunner import pytree
from jaxrunner.params import SamplingParams
from jaxrunner.sampling import RULES
from jaxrunner.sampling.min_p import min_p
from jaxrunner.sampling.min_tokens import min_tokens
from jaxrunner.sampling.rule import Context, sample
from jaxrunner.sampling.temperature import temperature
from jaxrunner.sampling.top_k_top_p import top_k_top_p
from jaxrunner.types import Requests

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


def tables(params, seeds):
    """Returns the rules' tables for one request a row."""
    rows = [[rule.row(p, s) for rule in RULES] for p, s in zip(params, seeds, strict=True)]
    return tuple(
        jax.tree.map(lambda *leaves: jnp.asarray(np.stack(leaves)), *column)
        for column in zip(*rows, strict=True)
    )


def requests(count, stop_ids=(), min_len=0):
    zeros = pytree.zeros(Requests, dict(R=count, L=1, X=2, M=1, G=1))
    stops = np.full((count, 2), len(LOGITS), np.int32)
    stops[:, : len(stop_ids)] = stop_ids
    changes = dict(stop_ids=jnp.asarray(stops), min_len=jnp.full(count, min_len))
    return replace(zeros, **changes)


draw_jit = jax.jit(lambda *args: sample(RULES, *args))


def draw(logits, params, seeds, position, **kwargs):
    """Draws one token for each seed at `position`."""
    count = len(seeds)
    logits = jnp.broadcast_to(jnp.asarray(logits, jnp.float32), (count, 1, len(logits)))
    slots, positions = jnp.arange(count), jnp.full(count, position)
    table = tables([params] * count, seeds)
    return np.asarray(draw_jit(logits, requests(count, **kwargs), table, slots, positions))[:, 0]


@pytest.mark.parametrize("kind", KINDS)
def test_draws_follow_the_exact_distribution(kind):  # 34
    settings = KINDS[kind]
    params = SamplingParams(**settings)
    count, rounds = 1000, 100
    drawn = np.concatenate([draw(LOGITS, params, range(count), p) for p in range(rounds)])
    expected = oracle(LOGITS, **settings) * count * rounds
    seen = np.bincount(drawn, minlength=len(LOGITS))
    possible = expected > 0
    assert seen[~possible].sum() == 0
    chi_square = ((seen - expected)[possible] ** 2 / expected[possible]).sum()
    freedom = possible.sum() - 1
    assert chi_square < freedom + 4 * np.sqrt(2 * freedom) + 8  # far beyond the 0.999 quantile


def apply(rule, logits, params, **context):
    request: Any = SimpleNamespace(**context)
    context = Context(jnp.int32(context.get("position", 0)), request)
    return np.asarray(rule.apply(jnp.asarray(logits, jnp.float32), rule.row(params, 0), context))


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("kind", KINDS)
def test_rules_equal_their_oracle(kind, seed):
    rng = np.random.default_rng(seed)
    logits = np.round(rng.normal(size=501) * 3, 1)  # with ties
    logits[rng.integers(0, 501, 30)] = -np.inf
    params = SamplingParams(**KINDS[kind])
    out = logits
    for rule in (temperature, min_p, top_k_top_p):
        out = apply(rule, out, params)
    want = oracle(logits, **KINDS[kind])
    np.testing.assert_array_equal(out > -np.inf, want > 0)
    np.testing.assert_allclose(np.asarray(jax.nn.softmax(jnp.asarray(out))), want, atol=1e-6)


def test_ties_of_top_k_go_to_the_lower_id():  # 32
    kept = apply(top_k_top_p, [3, 2, 2, 1], SamplingParams(top_k=2)) > -np.inf
    assert kept.tolist() == [True, True, False, False]


@pytest.mark.parametrize("p,count", [(0.6, 2), (0.5, 1), (0.81, 3), (1e-6, 1), (1.0, 3)])
def test_top_p_keeps_the_fewest_that_reach_it(p, count):  # 32
    logits = np.log([0.5, 0.3, 0.2])
    assert (apply(top_k_top_p, logits, SamplingParams(top_p=p)) > -np.inf).sum() == count


def test_top_p_acts_on_what_top_k_left():  # 32
    kept = apply(top_k_top_p, np.log([0.4, 0.3, 0.2, 0.1]), SamplingParams(top_k=2, top_p=0.57))
    assert (kept > -np.inf).sum() == 1  # 0.4 / 0.7 is 0.571


def test_min_p_counts_from_the_likeliest():  # 31
    kept = apply(min_p, [2.0, -0.30, -0.31], SamplingParams(min_p=0.1)) > -np.inf
    assert kept.tolist() == [True, True, False]


def test_greedy_is_the_argmax_whatever_the_seed():  # 33
    logits = [1.0, 5.0, 5.0, 2.0]
    drawn = draw(logits, SamplingParams(temperature=0.0), range(50), 3)
    assert set(drawn.tolist()) == {1}


def test_noise_depends_on_seed_and_position_alone():  # 34
    params, logits = SamplingParams(), np.zeros(8, np.float32)
    alone = [draw(logits, params, [s], 5)[0] for s in range(6)]
    assert draw(logits, params, list(range(6)), 5).tolist() == alone
    assert draw(logits, params, [5, 4, 3, 2, 1, 0], 5).tolist() == alone[::-1]
    at_5, at_6 = (draw(logits, params, range(40), p) for p in (5, 6))
    assert (at_5 != at_6).any()
    wide = [2**63 + 1, 1]  # both words of a seed count
    many = np.stack([draw(logits, params, wide, p) for p in range(20)])
    assert (many[:, 0] != many[:, 1]).any()


def test_the_noise_of_a_draft_is_that_of_its_position():
    logits = jnp.zeros((1, 3, 8))
    table = tables([SamplingParams()], [9])
    three = draw_jit(logits, requests(1), table, jnp.array([0]), jnp.array([4]))[0].tolist()
    one = [draw(np.zeros(8), SamplingParams(), [9], p)[0] for p in (4, 5, 6)]
    assert three == one


def test_min_tokens_keeps_stop_ids_out_until_then():
    params = SamplingParams(min_tokens=4, max_tokens=9)
    banned = [
        apply(min_tokens, LOGITS, params, position=p, min_len=jnp.int32(7),
              stop_ids=jnp.array([0, len(LOGITS)]))[0] == -np.inf
        for p in range(3, 9)
    ]  # fmt: skip
    assert banned == [True, True, True, True, False, False]  # prompt 3: outputs 1 to 4


def test_a_padded_row_draws_without_nan():
    zeros = jax.tree.map(jnp.zeros_like, tables([SamplingParams()], [0]))
    logits = jnp.asarray(LOGITS)[None, None]
    out = draw_jit(logits, requests(1), zeros, jnp.array([1]), jnp.array([0]))
    assert 0 <= int(out[0, 0]) < len(LOGITS)
