"""Sampling parameters: what is accepted has an effect, the rest is refused by name."""

import copy
import dataclasses
import math
from typing import Any

import numpy as np
import pytest

from jaxrunner.api.sampling_params import (
    MAX_STOP_TOKEN_IDS,
    MIN_TEMPERATURE,
    RepetitionDetectionParams,
    SamplingParams,
)

FLOATS = ["temperature", "top_p", "min_p", "repetition_penalty"]
INTS = ["top_k", "seed", "max_tokens", "min_tokens"]
BOOLS = ["ignore_eos", "include_stop_str_in_output", "detokenize", "skip_special_tokens"]

BAD_VALUES = [
    *[(name, v) for name in FLOATS for v in (math.nan, math.inf, -math.inf, -0.1, 10**400)],
    *[(name, v) for name in INTS for v in (-(2**31), -2, 2**64)],
    ("temperature", 1e39),  # infinite in float32
    ("top_p", 0),
    ("top_p", 1e-300),  # 0 in float32
    ("top_p", 1.01),
    ("min_p", 1.01),
    ("top_k", 2**31),
    ("max_tokens", 0),
    ("max_tokens", 2**31),
    ("min_tokens", -1),
    ("stop_token_ids", [3, -1]),
    ("stop_token_ids", [2**63]),
]
BAD_TYPES = [
    *[(name, v) for name in FLOATS for v in ("1", None, True, np.True_, [1.0], 1j)],
    *[(name, v) for name in INTS for v in ("1", 1.0, True, np.float32(1), [1])],
    *[(name, v) for name in BOOLS for v in (1, 0, "yes", None)],
    *[(name, None) for name in ("top_k", "min_tokens")],
    ("stop", ["a", 3]),
    ("stop_token_ids", [1.0]),
    ("stop_token_ids", [True]),
]


def make(**fields: Any) -> SamplingParams:
    return SamplingParams(**fields)


def test_the_defaults_are_those_of_vllm():
    params = SamplingParams()
    assert (params.temperature, params.top_k, params.top_p, params.min_p) == (1.0, 0, 1.0, 0.0)
    assert (params.max_tokens, params.min_tokens, params.seed) == (16, 0, None)
    assert (params.stop, params.stop_token_ids) == ((), ())
    assert [getattr(params, name) for name in BOOLS] == [False, False, True, True]


@pytest.mark.parametrize("name, value", BAD_VALUES)
def test_a_value_out_of_range_is_refused_by_name(name, value):
    with pytest.raises(ValueError, match=rf"^{name}.* is out of range: take a"):
        SamplingParams(**{name: value})


@pytest.mark.parametrize("name, value", BAD_TYPES)
def test_a_value_of_the_wrong_type_is_refused_by_name(name, value):
    with pytest.raises(TypeError, match=rf"^{name}.* must be .*, got "):
        SamplingParams(**{name: value})


@pytest.mark.parametrize("value", [3, b"ab", {"a": 1}])
@pytest.mark.parametrize("name", ["stop", "stop_token_ids"])
def test_what_is_no_list_is_refused_by_name(name, value):
    with pytest.raises(TypeError, match=rf"^{name} must be a list, each element a.*, got "):
        SamplingParams(**{name: value})


@pytest.mark.parametrize("name", ["best_of", "Temperature"])
def test_a_parameter_that_does_not_exist_is_refused(name):
    message = f"no sampling parameter is called '{name}': use n, presence_penalty"
    with pytest.raises(TypeError, match=message):
        make(**{name: 1})
    with pytest.raises(TypeError, match=message):
        dataclasses.replace(SamplingParams(), **{name: 1})


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"stop": ""}, "stop has an empty string, which ends every text at once"),
        ({"stop": ["a", ""]}, "stop has an empty string, which ends every text at once"),
        ({"stop": "a", "detokenize": False}, "needs text, got detokenize=False: set it to True"),
        ({"max_tokens": 3, "min_tokens": 4}, "min_tokens=4 exceeds max_tokens=3: lower it"),
        (
            {"stop_token_ids": range(MAX_STOP_TOKEN_IDS + 1)},
            "stop_token_ids has 129 distinct elements, it may have 128: give fewer",
        ),
        ({"n": 2, "temperature": 0}, "n=2 with temperature=0 gives one text n times: take n=1"),
        ({"allowed_token_ids": []}, "allowed_token_ids is empty, which leaves no token: name some"),
        (
            {"logprobs": 3, "logprob_token_ids": [1, 2]},
            "logprobs=3 must be the number of logprob_token_ids, 2, or None",
        ),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens=0 leaves no prompt: give at least"),
        ({"bad_words": ["a", ""]}, r"bad_words\[1\] is empty, which bans nothing: leave it out"),
        ({"bad_words": [[1]] * 2 + [[i] for i in range(129)]}, "bad_words has 129 words and 129"),
        ({"bad_words": [range(1025)]}, "bad_words has 1 words and 1025 tokens, a request may"),
        ({"logit_bias": [(1, 0.5), (1, 0.25)]}, "logit_bias has 1 twice: give each key one value"),
        (
            {"allowed_token_ids": range(1025)},
            "allowed_token_ids has 1025 distinct elements, it",
        ),
        (
            {"extra_args": {str(i): 0 for i in range(65)}},
            "extra_args has 65 distinct elements, it may have 64: give fewer",
        ),
    ],
)
def test_a_contradiction_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        SamplingParams(**fields)


@pytest.mark.parametrize(
    "given, stored",
    [
        ({"temperature": 1e-9}, {"temperature": MIN_TEMPERATURE}),
        ({"temperature": -0.0, "top_k": 5, "top_p": 0.5, "min_p": 0.1}, {"temperature": 0.0}),
        ({"top_k": -1}, {"top_k": 0}),
        ({"seed": -1}, {"seed": None}),
        ({"seed": np.uint64(2**64 - 1)}, {"seed": 2**64 - 1}),
        ({"temperature": 1, "top_p": np.float32(0.5)}, {"top_p": 0.5}),
        ({"temperature": np.int32(2)}, {"temperature": 2.0}),
        ({"ignore_eos": np.True_}, {"ignore_eos": True}),
        ({"stop": "ab"}, {"stop": ("ab",)}),
        ({"stop": ["b", "a", "b"]}, {"stop": ("b", "a")}),
        ({"stop_token_ids": None}, {"stop_token_ids": ()}),
        ({"stop_token_ids": np.array([5, 3, 5])}, {"stop_token_ids": (5, 3)}),
        ({"max_tokens": None, "min_tokens": 100}, {"max_tokens": None, "min_tokens": 100}),
    ],
)
def test_what_means_the_same_is_stored_the_same(given, stored):
    params, want = SamplingParams(**given), SamplingParams(**stored)
    assert params == want
    for field in dataclasses.fields(params):
        assert type(getattr(params, field.name)) is type(getattr(want, field.name))


def test_a_field_may_be_set_and_is_checked_as_in_the_constructor():
    params = SamplingParams(stop="a", stop_token_ids=[1], temperature=0.5)
    assert copy.deepcopy(params) == dataclasses.replace(params) == params.clone() == params
    other = params.clone()
    other.max_tokens, other.stop = 5, ["b", "b"]
    assert other == dataclasses.replace(params, max_tokens=5, stop="b") != params
    before = dict(vars(other))
    for name, value, message in (
        ("max_tokens", 0, "max_tokens=0 is out of range"),
        ("min_tokens", 6, "min_tokens=6 exceeds max_tokens=5: lower it"),
        ("best_of", 2, "no sampling parameter is called 'best_of': use n"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            setattr(other, name, value)
        assert vars(other) == before
    with pytest.raises(AttributeError, match="max_tokens cannot be deleted: set it to its default"):
        del other.max_tokens


def test_only_temperature_zero_is_greedy():
    assert SamplingParams(temperature=0).is_greedy
    assert not SamplingParams(temperature=1e-9).is_greedy


@pytest.mark.parametrize("token_id", [100, 101, 2**30])
def test_a_stop_id_beyond_the_logits_is_refused(token_id):
    SamplingParams(stop_token_ids=[0, 99]).check(100)
    message = f"stop_token_ids has {token_id}, the model's ids end at 99: take ids"
    with pytest.raises(ValueError, match=message):
        SamplingParams(stop_token_ids=[0, token_id]).check(100)


@pytest.mark.parametrize("name", ["logit_bias", "extra_args"])
@pytest.mark.parametrize("value", [3, [1, 2], "ab", [(1, 2, 3)]])
def test_what_is_no_mapping_is_refused_by_name(name, value):
    with pytest.raises(TypeError, match=rf"^{name} must be a dict from a.* to a finite number"):
        make(**{name: value})


@pytest.mark.parametrize("value", ["word", 3, {"a": 1}])
def test_bad_words_are_a_list(value):
    with pytest.raises(TypeError, match=r"^bad_words must be a list, each element a string or a"):
        make(bad_words=value)


def test_mappings_and_words_are_stored_as_tuples():
    params = make(logit_bias={3: 1, np.int64(5): 0.5}, bad_words=["a", [3, 3], (3, 3)])
    assert params.logit_bias == ((3, 1.0), (5, 0.5)) and params.bad_words == ("a", (3, 3))
    assert dataclasses.replace(params, seed=3) == dataclasses.replace(params, seed=3)


@pytest.mark.parametrize(
    "field",
    [
        {"logprob_token_ids": [0, 100]},
        {"allowed_token_ids": [100]},
        {"logit_bias": {100: 1.0}},
        {"bad_words": [[1, 100]]},
    ],
)
def test_every_id_is_checked_against_the_logits(field):
    (name,) = field
    make(**field).check(101)
    with pytest.raises(ValueError, match=f"{name} has 100, the model's ids end at 99: take ids"):
        make(**field).check(100)


@pytest.mark.parametrize("name", ["logprobs", "prompt_logprobs"])
def test_more_logprobs_than_tokens_are_refused(name):
    make(**{name: 100}).check(100)
    with pytest.raises(ValueError, match=f"{name}=101 exceeds the model's 100 tokens: take -1"):
        make(**{name: 101}).check(100)


def test_repetition_of_a_pattern_is_found():
    pattern = RepetitionDetectionParams(max_pattern_size=3, min_pattern_size=2, min_count=3)
    assert pattern.found([9, 1, 2, 1, 2, 1, 2]) and pattern.found([1, 2, 3] * 3)
    assert not pattern.found([1, 2, 1, 2, 1]) and not pattern.found([1, 2, 1, 2, 2, 1])
    assert not pattern.found([]) and not pattern.found([1, 2, 3, 1, 2, 3, 1, 2])
    assert pattern.found([7, 7, 7, 7, 7, 7]) and not pattern.found([7, 7, 7, 7, 7])
    single = RepetitionDetectionParams(max_pattern_size=1, min_count=4)
    assert single.found([5, 7, 7, 7, 7]) and not single.found([7, 7, 7])
    with pytest.raises(ValueError, match=r"min_pattern_size=4 exceeds max_pattern_size=3: lower"):
        RepetitionDetectionParams(max_pattern_size=3, min_pattern_size=4)
    with pytest.raises(ValueError, match=r"repetition_detection\.min_count=1 is out of range"):
        RepetitionDetectionParams(max_pattern_size=3, min_count=1)
