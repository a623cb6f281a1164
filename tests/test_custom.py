"""Logits functions of the user, and logits that are not numbers: what fails, fails alone."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrunner import SamplingParams
from jaxrunner.engine.engine import Engine
from jaxrunner.models.llama import llama
from jaxrunner.rule import NoParams, Rule
from jaxrunner.sampling import RULES
from jaxrunner.sampling.custom import host_logits_fn, logits_fn, with_logits_fn
from tests.support import rules as given
from tests.support import tiny
from tests.support.tiny import poisoned

NO_FN: Any = 3


def engine(rules=RULES, params=None, **changes) -> Engine:
    config, default = tiny.model_and_params()
    sizes = tiny.engine_config(**changes)
    return Engine(llama, config, sizes, params or default, rules=rules)


def answer(e: Engine, **params: Any) -> list[int]:
    params = {"max_tokens": 8} | params
    request = e.add("a", [3, 1, 4, 1, 5], SamplingParams(**params))
    while e.has_unfinished:
        e.step()
    assert request.error is None, request.error
    return request.output_token_ids


def only_successors(logits, row):
    """Allows the token after the last one alone, `step` further."""
    last = row.token_ids[row.position - 1]
    wanted = (last + row.args["step"].astype(jnp.int32)) % logits.size
    return jnp.where(jnp.arange(logits.size) == wanted, logits, -jnp.inf)


def host_successors(logits, token_ids, args):
    out = np.full_like(logits, -np.inf)
    wanted = (token_ids[-1] + int(args["step"])) % len(logits)
    out[wanted] = logits[wanted]
    return out


@pytest.mark.parametrize("make,fn", [(logits_fn, only_successors),
                                     (host_logits_fn, host_successors)])  # fmt: skip
def test_a_logits_function_decides(make, fn):
    e = engine(with_logits_fn(RULES, make(fn, extra_args={"step": 1})))
    for heat in (0.0, 1.0):
        assert answer(e, temperature=heat) == [6, 7, 8, 9, 10, 11, 12, 13]
        twos = answer(e, temperature=heat, extra_args={"step": 2}, logit_bias={7: 100.0})
        assert twos == [7, 9, 11, 13, 15, 17, 19, 21]


@pytest.mark.parametrize("heat", [0.5, 1.0, 2.0])
def test_a_logits_function_sees_logits_before_the_temperature(heat):
    logits = np.random.default_rng(0).normal(size=(1, 61)).astype(np.float32)
    squared = with_logits_fn(RULES, logits_fn(lambda logits, row: logits * logits))
    got = given.processed(logits, [SamplingParams(temperature=heat)], rules=squared)
    np.testing.assert_allclose(got, logits**2 / heat, rtol=1e-6)


def test_a_rule_that_truncates_runs_behind_the_temperature():
    """`kept_mass` is the share that is left at the temperature, whatever that is."""
    best = Rule(
        "best", NoParams, lambda params, seed: NoParams(),
        lambda logits, row, context: jnp.where(logits < logits.max(), -jnp.inf, logits),
        truncates=True,
    )  # fmt: skip
    rules = with_logits_fn(RULES, best)
    logits = np.random.default_rng(0).normal(size=(1, 61)).astype(np.float32)
    params = [SamplingParams(temperature=0.5)]
    batch = given.batched(given.requests(1), [0], [0])
    run = given.processor(given.program(rules=rules))
    got = run(jnp.asarray(logits), batch, given.tables(params, rules=rules)).kept_mass[0]
    weights = np.exp(logits[0].astype(np.float64) / 0.5)
    assert got == pytest.approx(weights.max() / weights.sum(), rel=1e-5)


def test_a_rule_that_refuses_a_number_ends_its_request_alone():
    def row(params, seed):
        if dict(params.extra_args or ()).get("n", 0) < 0:
            raise ValueError("n must be at least 0")
        return NoParams()

    rule = Rule("picky", NoParams, row, lambda logits, row, context: logits, extra_args=("n",))
    e = engine(with_logits_fn(RULES, rule))
    good = e.add("a", [3, 1, 4], SamplingParams(max_tokens=5))
    with pytest.raises(ValueError, match="n must be at least 0"):
        e.add("b", [3, 1, 4], SamplingParams(extra_args={"n": -1.0}))
    while e.has_unfinished:
        e.step()
    assert good.error is None and len(good.output_token_ids) == 5


def test_a_logits_function_that_changes_nothing_changes_nothing():
    rules = with_logits_fn(RULES, lambda logits, row: logits)
    for params in (dict(temperature=0.0), dict(seed=3), dict(seed=3, top_k=5)):
        assert answer(engine(rules), **params) == answer(engine(), **params)


def test_a_host_function_that_raises_ends_its_request_alone(caplog):
    def picky(logits, token_ids, args):
        if token_ids[0] == 9:
            raise KeyError("no")
        return logits

    e = engine(with_logits_fn(RULES, host_logits_fn(picky)))
    good = e.add("a", [3, 1, 4], SamplingParams(max_tokens=5, seed=1))
    bad = e.add("b", [9, 1, 4], SamplingParams(max_tokens=5, seed=1))
    while e.has_unfinished:
        e.step()
    assert bad.finish_reason == "error" and bad.output_token_ids == []
    assert len(good.output_token_ids) == 5
    assert "a host logits function failed" in caplog.text
    assert "IndexError" not in caplog.text  # of padding, which has no tokens, it is not asked


@pytest.mark.parametrize(
    "make,error,message",
    [
        (lambda: logits_fn(NO_FN), TypeError, "logits_fn must be a function, got int: pass one"),
        (lambda: host_logits_fn(NO_FN), TypeError, "host_logits_fn must be a function, got int"),
        (
            lambda: logits_fn(only_successors, extra_args=dict.fromkeys(map(str, range(17)), 0)),
            ValueError, "extra_args of a logits_fn are 17, it may have 16",
        ),
        (
            lambda: answer(engine(with_logits_fn(RULES, lambda logits, row: logits[:5]))),
            AssertionError,  # of `answer`: it is the request's error
            r"logits_fn must return float32\[61\], got float32\[5\]: return one logit",
        ),
        (
            lambda: answer(engine(), extra_args={"heat": 1.0}),
            ValueError, r"extra_args has 'heat', this engine's rules read \[\]: name it",
        ),
        (
            lambda: answer(engine(), bad_words=["word"]),
            ValueError, "bad_words has the text 'word', an engine takes token ids",
        ),
    ],
)  # fmt: skip
def test_a_bad_function_is_refused(make, error, message):
    with pytest.raises(error, match=message):
        make()


@pytest.mark.parametrize("value", [jnp.nan, jnp.inf])
@pytest.mark.parametrize("params", [dict(temperature=0.0), dict(seed=1), dict(seed=1, logprobs=2)])
def test_logits_that_are_no_numbers_end_their_request_alone(value, params):
    asked = SamplingParams(max_tokens=6, **params)
    prompts = [[3, 1, 4, 1], [5, 9, 2, 6, 5], [7, 33, 8], [2, 2]]  # the third has the token 33
    want = [answer_of(engine(), p, asked).output_token_ids for p in prompts]
    e = engine(params=poisoned(33, value), async_depth=2)
    requests = [e.add(str(i), p, asked) for i, p in enumerate(prompts)]
    while e.has_unfinished:
        e.step()
    assert requests[2].finish_reason == "error" and requests[2].output_token_ids == []
    assert "the model gave NaN or infinite logits" in str(requests[2].error)
    for i in (0, 1, 3):
        if 33 not in want[i]:
            assert requests[i].output_token_ids == want[i]
    # The blocks that held NaN serve others.
    for i in range(12):
        again = answer_of(e, prompts[0], asked, name=f"again {i}")
        assert again.output_token_ids == requests[0].output_token_ids


def answer_of(e: Engine, prompt, params, name="a"):
    request = e.add(name, prompt, params)
    while e.has_unfinished:
        e.step()
    return request


def test_nan_may_raise_and_then_the_engine_goes_on():
    e = engine(params=poisoned(33, jnp.nan), nan_policy="raise")
    bad = e.add("bad", [33, 1], SamplingParams(max_tokens=3))
    good = e.add("good", [3, 1], SamplingParams(max_tokens=3, temperature=0))
    with pytest.raises(FloatingPointError, match="request 'bad': the model gave NaN or infinite"):
        for _ in range(9):
            e.step()
    while e.has_unfinished:
        e.step()
    assert bad.finish_reason == "error" and len(good.output_token_ids) == 3


def test_nan_may_be_ignored():
    e = engine(params=poisoned(33, jnp.nan), nan_policy="ignore")
    request = answer_of(e, [33, 1], SamplingParams(max_tokens=3))
    assert request.finish_reason == "length" and len(request.output_token_ids) == 3
    with pytest.raises(ValueError, match=r"nan_policy must be one of .*, got 'hope'"):
        tiny.engine_config(nan_policy="hope")


def test_no_step_holds_a_table_of_slots_by_vocabulary():
    e = engine()
    sizes = [x.shape for x in jax.tree.leaves((e.runner.state.tables, e.runner.state.requests))]
    assert not [s for s in sizes if 61 in s]
