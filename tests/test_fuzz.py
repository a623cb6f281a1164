"""Thousands of bad inputs: each is refused by name, before the device, and alone."""

from collections.abc import Callable, Iterator
from decimal import Decimal
import itertools
import math
import re
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest

from jaxrunner import LLM, SamplingParams, embedded
from jaxrunner.beam import BeamSearchParams
from jaxrunner.params import RepetitionDetectionParams
from jaxrunner.structured_outputs import StructuredOutputsParams

V = 4096
NUM_BAD = 3000  # at least
SIZES: dict[str, Any] = dict(
    dtype="float32", max_model_len=128, max_num_seqs=4, max_num_batched_tokens=64,
    token_buckets=(64,), decode_buckets=(4,), block_size=16, num_blocks=64, use_tqdm=False,
    warm_up=False,
)  # fmt: skip

NAN, INF, HUGE = math.nan, math.inf, (10**400, -(10**400), 10**5000, -(10**5000))
# Neither a number, nor a list of them.
JUNK = (
    "", "1", "nan", "-1", b"1", b"", bytearray(b"1"), 1j, 0j, np.complex64(1), Decimal(1), object(),
    object, len, ..., NotImplemented, np.array(1), np.array(1.0), np.str_("1"), np.bytes_(b"1"),
    np.datetime64("2020-01-01"), np.timedelta64(1, "s"), np.float32, slice(1), {"a": 1}, {},
)  # fmt: skip
LISTS = ([], [1], (), (1,), [[1]], [1.0], {1}, [None], range(2), np.array([1]), np.array([[1.5]]))
BOOLS = (True, False, np.True_, np.False_)
FLOATS = (
    1.0, 0.0, -1.0, 1.5, NAN, INF, -INF, 1e38, 1e308, np.float16(1), np.float32(1), np.float64(1),
    np.float32(NAN), np.float64(INF), np.longdouble(1),
)  # fmt: skip
NOT_FINITE = (
    NAN, INF, -INF, *(kind(v) for kind in (np.float16, np.float32, np.float64)
    for v in (NAN, INF, -INF)), np.longdouble(1), 1e39, -1e39, 1e308, -1e308, *HUGE,
)  # fmt: skip
NOT_INTS = (*JUNK, *LISTS, *BOOLS, *FLOATS, *HUGE, jnp.int32(1))
NOT_FLOATS = (*JUNK, *LISTS, *BOOLS, *NOT_FINITE, jnp.float32(1))
EDGES = (0, -1, -2, -(2**31), -(2**31) - 1, -(2**63), 2**30 + 1, 2**31 - 1, 2**31, 2**32, 2**63)
NOT_IDS = (*NOT_INTS, None, *EDGES[1:], 2**64, np.int8(-1), np.int64(-1), np.uint64(2**63))
NOT_BOOLS = (*JUNK, *LISTS, *FLOATS, 0, 1, -1, 2, np.int32(1), "True", "yes", *HUGE)

COUNT = 2**30
INT_FIELDS = {  # least, most, whether None is good
    "n": (1, 16384, False), "top_k": (-1, COUNT, False), "seed": (-1, 2**64 - 1, True),
    "max_tokens": (1, COUNT, True), "min_tokens": (0, COUNT, False), "logprobs": (-1, COUNT, True),
    "prompt_logprobs": (-1, COUNT, True),
}  # fmt: skip
FLOAT_FIELDS = {
    "presence_penalty": (-2, 2), "frequency_penalty": (-2, 2), "repetition_penalty": (0.001, 1000),
    "temperature": (0, 3e38), "top_p": (1e-37, 1), "min_p": (0, 1),
}  # fmt: skip
BOOL_FIELDS = (
    "ignore_eos", "flat_logprobs", "detokenize", "skip_special_tokens",
    "spaces_between_special_tokens", "include_stop_str_in_output",
)  # fmt: skip
ID_FIELDS = {"stop_token_ids": 16, "logprob_token_ids": 128, "allowed_token_ids": 1024}  # most
TEXT = "structured_outputs."
PATTERN = "repetition_detection."


class Bad(NamedTuple):
    """An input, and the word that its refusal must have."""

    name: str
    make: Callable[..., Any]
    fields: dict[str, Any]


def out_of_range(low: Any, high: Any, optional: bool) -> Iterator[Any]:
    yield from (v for v in (*EDGES, low - 1, low - 2, high + 1, 2 * high) if not low <= v <= high)
    yield from (np.int64(v) for v in (low - 1, high + 1) if abs(v) < 2**63)
    yield from () if optional else (None,)


def numbers() -> Iterator[Bad]:
    for name, bounds in INT_FIELDS.items():
        for value in (*NOT_INTS, *out_of_range(*bounds)):
            yield Bad(name, SamplingParams, {name: value})
    for name, (low, high) in FLOAT_FIELDS.items():
        beyond = (low - 1e-6 - abs(low) * 1e-6, np.float64(-1e38), -5e-324, 0)
        least = [v for v in beyond if not low <= v]
        above = [high * 1.000001, np.float64(high * 2), np.int64(2**62)] * (name != "temperature")
        for value in (*NOT_FLOATS, None, *least, *above):
            yield Bad(name, SamplingParams, {name: value})
    for name in BOOL_FIELDS:
        for value in (*NOT_BOOLS, None):
            yield Bad(name, SamplingParams, {name: value})
    for value in NOT_BOOLS:
        yield Bad(
            "skip_reading_prefix_cache", SamplingParams, dict(skip_reading_prefix_cache=value)
        )
    for name in ("output_kind", "structured_outputs", "repetition_detection"):
        for value in (*NOT_INTS, 0, 1, 2, "DELTA", {"regex": "a"}, {"max_pattern_size": 2}):
            yield Bad(name, SamplingParams, {name: value})


def lists() -> Iterator[Bad]:
    places = (lambda x: [x], lambda x: (3, x), lambda x: [x, 3, 5], lambda x: iter([5, x]))
    no_list = (0, 1.5, NAN, True, "ab", b"ab", {"a": 1}, {3: 4}, object(), len, np.array(3))
    for name, most in ID_FIELDS.items():
        for place, value in itertools.product(places, NOT_IDS):
            yield Bad(name, SamplingParams, {name: place(value)})
        for value in (*no_list, range(most + 1), list(range(most + 99)), np.arange(most + 1)):
            yield Bad(name, SamplingParams, {name: value})
    for place, value in itertools.product(places[:3], NOT_IDS):
        yield Bad("bad_words", SamplingParams, dict(bad_words=[[7], place(value)]))
    words = (*no_list, [""], [[]], [()], ["a", ""], [None], [3], [1.5], [b"a"], [{}], [{1: 2}],
             [{1, 2}], [["a"]], [[1], None], [[[1]]], [object()], [[i] for i in range(129)],
             [range(1025)], [range(600), range(601)], [np.array(3)], [np.array([1.5])],
             [str(i) for i in range(129)], HUGE)  # fmt: skip
    for value in words:
        yield Bad("bad_words", SamplingParams, dict(bad_words=value))
    texts = (v for v in (*NOT_INTS, 0, 3, None) if not isinstance(v, str))
    for value in (*((["a", v]) for v in texts), *no_list[:4], *no_list[5:], "", [""], ["a", ""]):
        yield Bad("stop", SamplingParams, dict(stop=value))


def mappings() -> Iterator[Bad]:
    def hashable(value: Any) -> bool:
        try:
            return isinstance(hash(value), int)
        except TypeError:
            return False

    values = (*NOT_FLOATS, None)
    for value in values:
        yield Bad("logit_bias", SamplingParams, dict(logit_bias={3: 1.0, 5: value}))
        yield Bad("extra_args", SamplingParams, dict(extra_args={"heat": value}))
    for value in (-10001, 10001, 1e5, -1e38, 2**31, 2**63, np.float32(2e4)):
        yield Bad("logit_bias", SamplingParams, dict(logit_bias={5: value}))
    for value in filter(hashable, NOT_IDS):
        yield Bad("logit_bias", SamplingParams, dict(logit_bias={value: 1.0}))
        yield Bad("logit_bias", SamplingParams, dict(logit_bias=[(3, 1.0), (value, 1.0)]))
    for value in (*(v for v in NOT_IDS if hashable(v) and not isinstance(v, str)), 3):
        yield Bad("extra_args", SamplingParams, dict(extra_args={value: 1.0}))
    no_pairs = (0, 1.5, NAN, True, "ab", b"ab", object(), len, np.array(3), [1, 2], [(1, 2, 3)],
                [(1,)], [None], [[[1, 2]]], [(1, 2), 3], HUGE)  # fmt: skip
    for name, key, most in (("logit_bias", int, 1024), ("extra_args", str, 64)):
        twice = [(key(1), 0.5), (key(2), 0.5), (key(1), 0.5)]
        for value in (*no_pairs, twice, {key(i): 0.0 for i in range(most + 1)}):
            yield Bad(name, SamplingParams, {name: value})
    yield Bad("logit_bias", SamplingParams, dict(logit_bias=[(np.int64(1), 0.5), (1, 0.5)]))


def nested() -> Iterator[Bad]:
    make: Callable[..., Any] = RepetitionDetectionParams
    for name, low in dict(max_pattern_size=1, min_pattern_size=1, min_count=2).items():
        for value in (*NOT_INTS, *out_of_range(low, 4096, False)):
            yield Bad(PATTERN + name, make, dict(max_pattern_size=4) | {name: value})
    yield Bad("min_pattern_size", make, dict(max_pattern_size=3, min_pattern_size=4))
    make = BeamSearchParams
    good = dict(beam_width=2, max_tokens=2)
    for name, high in dict(beam_width=1024, max_tokens=COUNT).items():
        for value in (*NOT_INTS, *out_of_range(1, high, False)):
            yield Bad(name, make, good | {name: value})
    for name in ("ignore_eos", "include_stop_str_in_output"):
        yield from (Bad(name, make, good | {name: value}) for value in (*NOT_BOOLS, None))
    for value in (*NOT_FLOATS, None, -101, 101, 1e38):
        yield Bad("length_penalty", make, good | dict(length_penalty=value))
    for value in (*NOT_FLOATS, None, 1, 0.5, -1):
        yield Bad("temperature", make, good | dict(temperature=value))
    make = StructuredOutputsParams
    for name in ("regex", "grammar", "whitespace_pattern"):
        texts = [v for v in (*NOT_INTS, 3, ["a"]) if not isinstance(v, str)]
        for value in (*texts, "", "\ud800", "x" * 2**16 + "x", "é" * 2**15 + "é"):
            rest = dict(json_object=True) if name == "whitespace_pattern" else {}
            yield Bad(TEXT + name, make, rest | {name: value})
    for value in (*filter(lambda v: not isinstance(v, dict), NOT_INTS), 3, "[", "3", "[]", "{", '{"a": NaN}', '{"a": 1e999}', '{"a":' * 2000,
                  {(1,): 2}, {"a": NAN}, {"a": {1}}, {"a": "\ud800"}, {"a": 10**5000},
                  '{"a": ' + "9" * 5000 + "}", {"a": b"x"}, {"a": "x" * 2**16}):  # fmt: skip
        yield Bad(TEXT + "json", make, dict(json=value))
    for value in (*JUNK, 3, 1.5, True, *HUGE, [], [""], ["a", 3], [None], [["a"]], [b"a"], ["\ud800"],
                  ["x" * 2**16], [str(i) for i in range(2**15)]):  # fmt: skip
        yield Bad(TEXT + "choice", make, dict(choice=value))
    for name in ("disable_any_whitespace", "disable_additional_properties", "disable_fallback"):
        for value in (*NOT_BOOLS, None):
            yield Bad(TEXT + name, make, dict(json_object=True) | {name: value})
    for value in NOT_BOOLS:
        yield Bad(TEXT + "json_object", make, dict(json_object=value))
    for value in (*JUNK, *BOOLS, 3):
        yield Bad(TEXT + "structural_tag", make, dict(structural_tag=value))


def contradictions() -> Iterator[Bad]:
    make: Callable[..., Any] = SamplingParams
    for n, zero in itertools.product((2, 3, 16384), (0, 0.0, -0.0, np.float32(0))):
        yield Bad("n", make, dict(n=n, temperature=zero))
    for most, least in ((1, 2), (16, 17), (16, COUNT), (np.int8(3), np.int64(4))):
        yield Bad("min_tokens", make, dict(max_tokens=most, min_tokens=least))
    for stop in ("a", ["a", "b"], ("\n",)):
        yield Bad("stop", make, dict(stop=stop, detokenize=False))
    for ids, count in itertools.product(([], [1], [1, 2]), (-1, 3, COUNT)):
        yield Bad("logprobs", make, dict(logprob_token_ids=ids, logprobs=count))
    yield Bad("allowed_token_ids", make, dict(allowed_token_ids=[]))
    yield Bad("flat_logprobs", make, dict(flat_logprobs=True))
    yield Bad("spaces_between_special_tokens", make, dict(spaces_between_special_tokens=False))
    for name in ("best_of", "Temperature", "logits_processors", "use_beam_search", "top-p", ""):
        for kind in (SamplingParams, StructuredOutputsParams, RepetitionDetectionParams):
            yield Bad(name, kind, {name: 1})
    given = dict(json="{}", regex="a", choice=["a"], grammar='start: "a"', json_object=True)
    for pair in itertools.combinations(given, 2):
        yield Bad(pair[1], StructuredOutputsParams, {name: given[name] for name in pair})
    for name in ("regex", "choice", "grammar"):
        for rest in (dict(disable_any_whitespace=True), dict(whitespace_pattern=" ")):
            fields = {name: given[name]} | rest
            yield Bad(TEXT + next(iter(rest)), StructuredOutputsParams, fields)
    for text in ("a", r"\s", ".", "[^a]", "é", r"\x20", "[a ]", " {1,2}x"):
        fields = dict(json_object=True, whitespace_pattern=text)
        yield Bad(TEXT + "whitespace_pattern", StructuredOutputsParams, fields)
    for text in ("start: <eos>", "start: <|a|>", 'start[temperature=0.5]: "a"', "start: <[3]>"):
        yield Bad(TEXT + "grammar", StructuredOutputsParams, dict(grammar=text))


def made() -> list[Bad]:
    return [*numbers(), *lists(), *mappings(), *nested(), *contradictions()]


def fault(name: str, error: Exception | str | None) -> str | None:
    """Says what is wrong with a refusal."""
    if not isinstance(error, TypeError | ValueError | str):
        return "accepted" if error is None else f"{type(error).__name__}: {str(error)[:80]}"
    if not re.search(rf"(?<![a-z_]){re.escape(name)}(?![a-z_])", str(error)):
        return f"{name} is not named: {str(error)[:80]}"
    return "told at length" if len(str(error)) > 2000 else None


def caught(make: Callable[..., Any], *args: Any, **fields: Any) -> Exception | None:
    try:
        make(*args, **fields)
    except Exception as error:
        return error
    return None


def short(value: Any) -> str:
    return (
        f"{type(value).__name__} of {value.bit_length()} bits"
        if value in HUGE
        else f"{value!r:.60}"
    )


def test_bad_parameters_are_refused_by_name():
    found = [(bad, fault(bad.name, caught(bad.make, **bad.fields))) for bad in made()]
    wrong = [(bad.make.__name__, bad.name, why) for bad, why in found if why]
    assert not wrong, f"{len(wrong)} of {len(found)}: {wrong[:40]}"
    assert len(found) >= NUM_BAD


GOOD = "def fibonacci(n):\n"
NEIGHBOURS = (
    (GOOD, SamplingParams(temperature=0, max_tokens=9)),
    ("class Stack:\n", SamplingParams(seed=3, max_tokens=12, logprobs=2, prompt_logprobs=2)),
    ("import os\n", SamplingParams(seed=4, presence_penalty=1.5, top_k=9, logprobs=3)),
    ({"prompt_token_ids": [0, V - 1, 7]}, SamplingParams(seed=5, n=2, min_tokens=16, logprobs=0)),
    ("with open(", SamplingParams(seed=6, logit_bias={0: -1e4, V - 1: 4.0}, top_p=0.8)),
    ("x = ", SamplingParams(seed=7, structured_outputs=StructuredOutputsParams(regex="[a-e]{7}"))),
)


def prompts() -> Iterator[tuple[Any, str]]:
    """Yields bad prompts, each with what its refusal names."""
    good_text = (v for v in (*JUNK, *LISTS, *BOOLS, *FLOATS, 0, 3, None))
    for value in good_text:
        if not isinstance(value, str):
            yield value, "prompt"
            yield {"prompt": value}, "prompt"
    no_ids = (
        *JUNK,
        *BOOLS,
        *FLOATS,
        3,
        {3},
        iter([3]),
        [],
        (),
        np.array([]),
        np.array([[3]]),
        *HUGE,
    )
    for value in no_ids:
        yield {"prompt_token_ids": value}, "prompt(_token_ids)?"
    for value in (*NOT_IDS, V, V + 1, np.int32(V), np.uint64(V)):
        for ids in ([value], [3, value], (value, 3), [3] * 120 + [value]):
            yield {"prompt_token_ids": ids}, "prompt_token_ids"
    yield from (({key: "x"}, "prompt") for key in ("promt", "", 3, None, "multi_modal_data"))
    yield from ((text, "prompt") for text in ("", "\ud83d", "a\udcff", "x " * 200, "é" * 10**5))
    yield from (({"prompt_token_ids": [3] * n}, "prompt") for n in (128, 129, 10**5))


def requests() -> Iterator[tuple[Any, SamplingParams, str]]:
    """Yields bad requests whose parameters may be good, of other models."""
    for prompt, name in prompts():
        yield prompt, SamplingParams(), name
    for token_id in (V, V + 1, 2**16, COUNT, np.int64(V)):
        for ids in ([token_id], [3, token_id], [token_id, 3], [*range(9), token_id]):
            for name in ID_FIELDS:
                yield GOOD, SamplingParams(**{name: ids}), name
            yield GOOD, SamplingParams(logit_bias=dict.fromkeys(ids, 1.0)), "logit_bias"
            yield GOOD, SamplingParams(bad_words=["a", ids]), "bad_words"
        for name in ("logprobs", "prompt_logprobs"):
            yield GOOD, SamplingParams(**{name: min(token_id + 1, COUNT)}), name
    for word in ("\ud800", "a\udfff"):
        yield GOOD, SamplingParams(bad_words=[word]), "bad_words"
        yield GOOD, SamplingParams(stop=[word]), "stop"
    for args in ({"heat": 1.0}, {"": 1.0}, {"temperature": 1}):
        yield GOOD, SamplingParams(extra_args=args), "extra_args"
    for kind, texts in dict(
        regex=("(a", "a{2,1}", "[", "*", "(?=a)b", r"\1"),
        json=('{"type": "strange"}', '{"$ref": "#/nowhere"}', '{"minimum": "a"}'),
        grammar=("start: nothing", "a", 'start: "a', 'start: a\na: "b" +* "c"'),
    ).items():
        for text in texts:
            wanted = StructuredOutputsParams(**{kind: text})
            yield GOOD, SamplingParams(structured_outputs=wanted), TEXT + kind


@pytest.fixture(scope="module")
def llm():
    with LLM(str(embedded.PATH), **SIZES) as llm:
        yield llm


@pytest.fixture
def launched(llm, monkeypatch):
    """Returns the ids of all requests that reach the runner."""
    seen: set[str] = set()
    for name in ("step", "execute_model"):
        real = getattr(llm.engine.runner, name)

        def record(scheduled, real=real):
            seen.update(scheduled.num_scheduled_tokens, scheduled.requests)
            seen.update(new.request_id for new in scheduled.scheduled_new_reqs)
            return real(scheduled)

        monkeypatch.setattr(llm.engine.runner, name, record)
    yield seen
    assert not llm.completions._states and not llm.engine.has_unfinished
    assert [pool.num_free for pool in llm.engine.pools] == [64]


def answers(llm, requests) -> list[Any]:
    """Returns outputs of requests, from an empty cache."""
    assert llm.reset_prefix_cache()
    prompts, params = zip(*requests, strict=True)
    return llm.generate(list(prompts), list(params), use_tqdm=False)


def interleaved(bad: list[Any]) -> Iterator[tuple[int, Any]]:
    """Yields bad requests and the good neighbours among them, each with its number."""
    share = -(-len(bad) // len(NEIGHBOURS))
    for i, good in enumerate(NEIGHBOURS):
        yield from ((-1, one) for one in bad[i * share : (i + 1) * share])
        yield i, good


def test_bad_requests_are_refused_alone_and_reach_no_device(llm, launched):
    bad = list(requests())
    want = [output.outputs for output in answers(llm, NEIGHBOURS)]
    launched.clear()
    order = list(interleaved(bad))
    outputs = answers(llm, [one[:2] for _, one in order])
    good = {i: o for (i, _), o in zip(order, outputs, strict=True) if i >= 0}
    assert [good[i].outputs for i in range(len(want))] == want  # bit for bit
    wrong = []
    for (i, one), output in zip(order, outputs, strict=True):
        if i < 0:
            reasons = {c.finish_reason for c in output.outputs}
            why = fault(one[2], output.error) or (reasons != {"error"} and str(reasons))
            wrong += [(one[2], short(one[0]), why)] if why else []
            wrong += [(one[2], short(one[0]), "launched")] if output.request_id in launched else []
    assert not wrong, f"{len(wrong)} of {len(bad)}: {wrong[:40]}"
    assert len(bad) >= NUM_BAD // 6
    names = {o.request_id for o in good.values()}
    assert {name.split(".")[0] for name in launched} == names


def calls(llm) -> Iterator[tuple[str, Callable[..., Any], tuple[Any, ...], dict[str, Any]]]:
    """Yields calls that are bad as a whole, each with what its refusal names."""
    one = SamplingParams(max_tokens=1)
    two = BeamSearchParams(beam_width=2, max_tokens=2)
    for value in (*JUNK, *BOOLS, *FLOATS, 0, 3, [3], [1, 2], (3,), {3}, range(2)):
        if not isinstance(value, str | list | tuple | dict):
            yield "prompts", llm.generate, (value, one), {}
            yield "prompts", llm.score_tokens, (value,), {}
            yield "prompts", llm.beam_search, (value, two), {}
        yield "on_error", llm.generate, (GOOD, one), dict(on_error=value)
        yield "sampling_params", llm.generate, (GOOD, value), {}
        yield "sampling_params", llm.generate, ([GOOD, GOOD], [one, value]), {}
        yield "params", llm.beam_search, (GOOD, value), {}
        yield "pair 1", llm.loglikelihood, ([("a", "b"), value],), {}
        yield "pair 1", llm.loglikelihood, ([("a", "b"), ("a", value)],), {}
    for value in (*NOT_INTS, None):
        yield "priority", llm.generate, (GOOD, one), dict(priority=[value])
        yield "priority", llm.generate, ([GOOD, GOOD], one), dict(priority=[1, value])
        yield "start", llm.score_tokens, (GOOD,), dict(start=value)
    for value in (-1, -(2**31), 2**31, 2**63, 100):
        yield "start", llm.score_tokens, (GOOD,), dict(start=value)
    for value in ([], [1], [1, 2, 3], "ab", "abc"):
        yield "priority", llm.generate, ([GOOD, GOOD], one), dict(priority=value)


def test_bad_calls_are_refused_and_reach_no_device(llm, launched):
    wrong, count = [], 0
    for name, method, args, fields in calls(llm):
        why = fault(name, caught(method, *args, **fields, use_tqdm=False))
        why = why or ("launched" if launched else None)
        launched.clear()
        wrong += [(method.__name__, name, why, short((args, fields)))] if why else []
        count += 1
    assert not wrong, f"{len(wrong)} of {count}: {wrong[:40]}"
