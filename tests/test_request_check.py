"""What a host asks of an engine: wrong arguments are named, and change nothing."""

from concurrent.futures import Future
from dataclasses import replace
import itertools
from typing import Any

import numpy as np
import pytest

from jaxrunner.api.sampling_params import SamplingParams
from jaxrunner.engine.engine import Engine
from jaxrunner.engine.request_check import new_request
from jaxrunner.models.llama import llama
from jaxrunner.scheduling.request import Request
from jaxrunner.slot_table import SlotTable
from tests.support import features, tiny
from tests.support.tiny_engine import PROMPTS, drain, engine

FREE = SamplingParams(max_tokens=4)  # the engine draws its seed
NOTHING: Any = None
RULED = SamplingParams(max_tokens=4, structured_outputs=features.GRAMMAR)


class Slow(features.ParityCompiler):
    """Grammars that are ready when the test says so."""

    def __init__(self):
        self.futures: list[Future] = []

    def submit(self, params):
        self.futures.append(Future())
        return self.futures[-1]


def slow_engine() -> tuple[Engine, Slow]:
    (config, params), slow = tiny.model_and_params(), Slow()
    return Engine(llama, config, tiny.engine_config(), params, make_compiler=lambda: slow), slow


class Unreadable(list):
    def __iter__(self):
        raise ArithmeticError("hostile")


class Endless(list):
    """A list whose length is a lie."""

    def __len__(self):
        return 3

    def __iter__(self):
        return itertools.repeat(1, 1000)


BAD: list[tuple[dict[str, Any], str]] = [
    (dict(request_id=3), "request_id must be a string, got 3"),
    (dict(request_id=None), "request_id must be a string"),
    (dict(request_id=["a"]), "request_id must be a string"),
    (dict(request_id="\ud800"), "request_id has half a surrogate pair"),
    (dict(prompt_token_ids=None), "prompt_token_ids must be a list of integers"),
    (dict(prompt_token_ids="abc"), "prompt_token_ids must be a list of integers"),
    (dict(prompt_token_ids={1: 2}), "prompt_token_ids must be a list of integers"),
    (dict(prompt_token_ids=itertools.count()), "prompt_token_ids must be a list of integers"),
    (dict(prompt_token_ids=[1.5]), r"prompt_token_ids\[0\] must be an integer"),
    (dict(prompt_token_ids=Endless()), "prompt has 1000 tokens, max_model_len=48 leaves room"),
    (dict(params=None), "params must be a SamplingParams, got None"),
    (dict(params=SamplingParams), "params must be a SamplingParams"),
    (dict(eos_token_ids=3), "eos_token_ids must be a list"),
    (dict(eos_token_ids=None), "eos_token_ids must be a list"),
    (dict(eos_token_ids=[2**31]), r"eos_token_ids\[0\]=2147483648 is out of range"),
    (dict(eos_token_ids=[7, -1]), r"eos_token_ids\[1\]=-1 is out of range"),
    (dict(eos_token_ids=[None]), r"eos_token_ids\[0\] must be an integer"),
    (dict(eos_token_ids=itertools.repeat(5)), "over 1048576 elements: give fewer"),
    (dict(eos_token_ids=Unreadable()), "eos_token_ids cannot be read as a list: Arithmetic"),
    (dict(priority=None), "priority must be an integer"),
    (dict(priority=float("nan")), "priority must be an integer"),
    (dict(priority=2**63), "priority=9223372036854775808 is out of range"),
    (dict(prompt_logprobs_start=-1), "prompt_logprobs_start=-1 is out of range"),
    (dict(prompt_logprobs_start="2"), "prompt_logprobs_start must be an integer"),
    (
        dict(prefix_from="kept"),
        "prefix_from must be what `add` returned, or None, got 'kept'",
    ),
    (dict(prefix_from=True), "prefix_from must be what `add` returned"),
    (
        dict(prefix_from=Request("kept", [3, 1], FREE, seed=0, max_len=9)),
        "prefix_from='kept' is not at work",
    ),
]


def test_bad_arguments_are_named_and_change_nothing():
    calm, e = engine(policy="priority"), engine(policy="priority")
    want, kept = (each.add("kept", PROMPTS[0], FREE) for each in (calm, e))
    e.step()
    good: dict[str, Any] = dict(request_id="bad", prompt_token_ids=[3, 1], params=FREE)
    for changes, message in BAD:
        with pytest.raises((TypeError, ValueError), match=message):
            e.add(**good | changes)
    with pytest.raises(
        ValueError, match="prefix_from='kept' has another prompt than request 'bad'"
    ):
        e.add(**good, prefix_from=kept)
    with pytest.raises(ValueError, match="request 'kept' is unfinished: give each live request"):
        e.add("kept", [3, 1], FREE)
    assert list(e.unfinished) == ["kept"] and not kept.publishes_prefix
    # The engine has drawn no seed for what it refused.
    wanted = calm.add("next", [3, 1], FREE)
    of_numpy: Any = np.array([3, 1])
    following = e.add("next", of_numpy, FREE, eos_token_ids=[2**31 - 1])
    drain(calm)
    drain(e)
    assert kept.output_token_ids == want.output_token_ids
    assert following.output_token_ids == wanted.output_token_ids


def test_ids_to_end_are_named_and_others_go_on():
    e = engine()
    requests = [e.add(name, PROMPTS[i], FREE) for i, name in enumerate("abc")]
    for ids, message in [
        ("abc", "request_ids must be a list, each element a string, got 'abc'"),
        (None, "request_ids must be a list"),
        ({"a": 1}, "request_ids must be a list"),
        (["a", 3], r"request_ids\[1\] must be a string, got 3"),
        ([["a"]], r"request_ids\[0\] must be a string"),
    ]:
        with pytest.raises((TypeError, ValueError), match=message):
            e.abort(ids)
    with pytest.raises(TypeError, match="reason must be a string, got None"):
        e.finish(["a"], NOTHING)
    with pytest.raises(ValueError, match=r"reason must be one of \('stop', .*, got 'done'"):
        e.finish(["a"], "done")
    with pytest.raises(TypeError, match="stop_reason must be a token id, a text or None"):
        e.finish(["a"], "stop", 1.5)
    assert not any(request.finish_reason for request in requests)
    drain(e)
    assert {request.finish_reason for request in requests} == {"length"}


def test_an_id_is_one_requests_while_its_grammar_is_compiled():
    e, slow = slow_engine()
    ruled = e.add("a", [1], RULED)
    for params in (FREE, RULED):
        with pytest.raises(ValueError, match="request 'a' is unfinished: give each live request"):
            e.add("a", [2], params)
    free = e.add("b", [1], FREE)
    with pytest.raises(ValueError, match="request 'b' is unfinished"):
        e.add("b", [1], RULED)
    assert len(slow.futures) == 1
    slow.futures[0].set_result(features.Parity())
    drain(e)
    assert len(ruled.output_token_ids) == len(free.output_token_ids) == 4


@pytest.mark.parametrize("end", ["abort", "fail", "serve"])
def test_a_follower_outlives_a_leader_whose_grammar_is_compiled(end):
    e, slow = slow_engine()
    first = e.add("a", PROMPTS[0], RULED)
    followers = [e.add("b", PROMPTS[0], FREE, prefix_from=first)]
    followers.append(e.add("c", PROMPTS[0], FREE, prefix_from=followers[0]))
    for _ in range(3):
        assert e.step() == []
    if end == "abort":
        e.finish(["a"], "abort", "tired")
        assert first.stop_reason == "tired"
    elif end == "fail":
        slow.futures[0].set_exception(ValueError("no such rule"))
    else:
        slow.futures[0].set_result(features.Parity())
    for _ in range(20):
        e.step()
    assert not e.has_unfinished
    reasons = dict(abort="abort", fail="error", serve="length")
    assert first.finish_reason == reasons[end]
    assert [len(request.output_token_ids) for request in followers] == [4, 4]
    with pytest.raises(
        ValueError, match="prefix_from='a' is not at work in this engine: leave it out"
    ):
        e.add("d", PROMPTS[0], FREE, prefix_from=first)


def test_weights_are_not_given_to_an_engine_that_has_ended():
    e = engine()
    weights = e.runner.params
    with pytest.raises(ValueError, match="params must have the leaves of those they replace"):
        e.update_params([1, 2])
    assert e.weights_version == 0 and e.runner.params is weights
    e.close()
    with pytest.raises(RuntimeError, match="this engine is closed: build another one"):
        e.update_params(weights)


def test_no_text_of_a_salt_passes_for_an_adapter_or_a_value():
    """Requests share cached blocks only with equal salts."""
    program, heat = engine().runner.program, SlotTable("heat", object, None, ("heat",))
    of = replace(program, model=program.model._replace(tables=(heat,)))
    warm = SamplingParams(max_tokens=4, extra_args={"heat": 1.0})
    asked: list[dict[str, Any]] = [
        dict(), dict(lora_id=5), dict(params=warm), dict(cache_salt="lora 5 "),
        dict(cache_salt="[('heat', 1.0)]"), dict(cache_salt="5"), dict(lora_id=5, cache_salt="5"),
    ]  # fmt: skip
    salts = [
        new_request("a", PROMPTS[0], how.pop("params", FREE), of=of, **how).cache_salt
        for how in asked
    ]
    assert salts[0] == b"" and len(set(salts)) == len(salts)
