"""Thousands of bad inputs: each is refused by name, before the device, and alone."""

from collections.abc import Callable, Iterator
import dataclasses
import itertools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrunner import LLM, SamplingParams, embedded
from jaxrunner.api.sampling_params import RepetitionDetectionParams
from jaxrunner.api.structured_outputs import FLAGS, StructuredOutputsParams
from jaxrunner.engine.beam import BeamSearchParams
from tests.attack.values import BOOLS, FLOATS, HUGE, INF, JUNK, LISTS, NAN

V, COUNT = 4096, 2**30
NOT_FINITE = (
    *(v for v in FLOATS if not abs(float(v)) <= 1e38),
    np.float16(-INF),
    1e39,
    -1e39,
    *HUGE,
)
EDGES = (-1, -2, -(2**31), -(2**31) - 1, -(2**63), COUNT + 1, 2**31 - 1, 2**31, 2**32, 2**63)
NOT_INTS = (*JUNK, *LISTS, *BOOLS, *FLOATS, *HUGE, jnp.int32(1))
NOT_FLOATS = (*JUNK, *LISTS, *BOOLS, *NOT_FINITE, jnp.float32(1))
NOT_BOOLS = (*JUNK, *LISTS, *FLOATS, 0, 1, -1, 2, np.int32(1), "True", "yes", *HUGE)
NOT_TEXTS = tuple(value for value in (*NOT_INTS, 0, 3) if not isinstance(value, str))
NOT_IDS: Any = (*NOT_INTS, None, *EDGES, 2**64, np.int8(-1), np.int64(-1), np.uint64(2**63))
NO_LISTS = (0, 1.5, NAN, True, b"ab", object(), len, np.array(3), HUGE[2])
NO_PAIRS = (*NO_LISTS, "ab", [1, 2], [(1, 2, 3)], [(1,)], [None], [[[1, 2]]], [(1, 2), 3])
ID_FIELDS = {"stop_token_ids": 128, "logprob_token_ids": 128, "allowed_token_ids": 1024}  # most

Row = tuple[Any, str, dict[str, Any], Any]  # a class, a field, the fields beside it, bad values


def numbers() -> Iterator[Row]:
    def beyond(low, high) -> list[Any]:
        values = (*EDGES, 0, low - 1, low - 2, high + 1, np.int64(low - 1), np.uint64(2**64 - 1))
        return [v for v in values if not low <= v <= high]

    ints = dict(n=(1, 16384), max_tokens=(1, COUNT), min_tokens=(0, COUNT), seed=(-1, 2**64 - 1))
    ints |= dict.fromkeys(("top_k", "logprobs", "prompt_logprobs"), (-1, COUNT))
    for name, bounds in ints.items():
        none = (None,) * (name in ("n", "top_k", "min_tokens"))
        yield SamplingParams, name, {}, (*NOT_INTS, *beyond(*bounds), *none)
    floats = dict(presence_penalty=(-2, 2), frequency_penalty=(-2, 2), temperature=(0, 3e38),
                  repetition_penalty=(0.001, 1000), top_p=(1e-37, 1), min_p=(0, 1))  # fmt: skip
    for name, (low, high) in floats.items():
        values = (-1e38, -2.001, low - 1e-9, -5e-324, 0, high * 1.001, np.float64(3.1e38))
        outside = [v for v in values if not low <= v <= high]
        yield SamplingParams, name, {}, (*NOT_FLOATS, None, *outside)
    flags = [f.name for f in dataclasses.fields(SamplingParams) if isinstance(f.default, bool)]
    yield from ((SamplingParams, name, {}, (*NOT_BOOLS, None)) for name in flags)
    yield SamplingParams, "skip_reading_prefix_cache", {}, NOT_BOOLS
    for name in ("output_kind", "structured_outputs", "repetition_detection"):
        yield SamplingParams, name, {}, (*NOT_INTS, 0, 1, "DELTA", {"regex": "a"})
    make: Any = RepetitionDetectionParams
    for name, low in dict(max_pattern_size=1, min_pattern_size=1, min_count=2).items():
        yield make, name, dict(max_pattern_size=4), (*NOT_INTS, *beyond(low, 4096), None)
    make, good = BeamSearchParams, dict(beam_width=2, max_tokens=2)
    for name, high in dict(beam_width=1024, max_tokens=COUNT).items():
        yield make, name, good, (*NOT_INTS, *beyond(1, high), None)
    yield make, "ignore_eos", good, (*NOT_BOOLS, None)
    yield make, "include_stop_str_in_output", good, (*NOT_BOOLS, None)
    yield make, "length_penalty", good, (*NOT_FLOATS, None, -101, 101, 1e38)
    yield make, "temperature", good, (*NOT_FLOATS, None, 1, 0.5, -1)


def several() -> Iterator[Row]:
    places = (lambda x: [x], lambda x: (3, x), lambda x: [x, 3, 5], lambda x: iter([5, x]))
    for name, most in ID_FIELDS.items():
        yield SamplingParams, name, {}, (place(x) for place in places for x in NOT_IDS)
        many = (range(most + 1), list(range(most + 99)), np.arange(most + 1))
        yield SamplingParams, name, {}, (*NO_LISTS, "ab", {3: 4}, *many)
    words = (
        "ab", {3: 4}, [""], [[]], [()], ["a", ""], [None], [3], [b"a"], [{}], [{1: 2}], [{1, 2}],
        [["a"]], [[[1]]], [[i] for i in range(129)], [range(1025)], [range(600), range(601)],
        [np.array(3)], [np.array([1.5])], [str(i) for i in range(129)],
    )  # fmt: skip
    inside = ([[7], place(x)] for place in places[:3] for x in NOT_IDS)
    yield SamplingParams, "bad_words", {}, (*NO_LISTS, *words, *inside)
    texts = (["a", value] for value in (*NOT_TEXTS, None))
    yield SamplingParams, "stop", {}, (*NO_LISTS, *texts, {3: 4}, "", [""], ["a", ""])
    keys = [k for k in NOT_IDS if type(k).__hash__ and not isinstance(k, jax.Array)]
    values = ({3: 1.0, 5: value} for value in (*NOT_FLOATS, None, -10001, 10001, 1e38, 2**63))
    pairs = ([(3, 1.0), (k, 1.0)] for k in keys)
    twice = ([(1, 0.5), (2, 0.5), (1, 0.5)], [(np.int64(1), 0.5), (1, 0.5)])
    names = ({k: 1.0} for k in keys)
    for bad in (NO_PAIRS, values, pairs, twice, names, [dict.fromkeys(range(1025), 0)]):
        yield SamplingParams, "logit_bias", {}, bad
    values = ({"heat": value} for value in (*NOT_FLOATS, None))
    names = ({k: 1.0} for k in keys if not isinstance(k, str))
    twice = [[("a", 0.5), ("b", 0.5), ("a", 0.5)]]
    for bad in (NO_PAIRS, values, names, twice, [{str(i): 0 for i in range(65)}]):
        yield SamplingParams, "extra_args", {}, bad


def structures() -> Iterator[Row]:
    make, some = StructuredOutputsParams, dict(json_object=True)
    long = ("", "\ud800", "x" * 2**16 + "x", "é" * 2**15 + "é")
    yield from ((make, name, {}, (*NOT_TEXTS, *long)) for name in ("regex", "grammar"))
    spaces = (*long, "a", r"\s", ".", "[^a]", "é", r"\x20", "[a ]", " {1,2}x")
    yield make, "whitespace_pattern", some, (*NOT_TEXTS, *spaces)
    schemas = ("[", "3", "[]", "{", '{"a": NaN}', '{"a": 1e999}', '{"a":' * 2000, {(1,): 2},
               {"a": NAN}, {"a": {1}}, {"a": "\ud800"}, {"a": HUGE[2]}, {"a": b"x"},
               '{"a": ' + "9" * 5000 + "}", {"a": "x" * 2**16})  # fmt: skip
    yield make, "json", {}, (*(v for v in NOT_INTS if not isinstance(v, dict)), *schemas)
    choices = ([], [""], ["a", 3], [None], [["a"]], [b"a"], ["\ud800"], ["x" * 2**16])
    yield make, "choice", {}, (*JUNK, *NO_LISTS, *choices, [str(i) for i in range(2**15)])
    yield from ((make, name, some, (*NOT_BOOLS, None)) for name in FLAGS)
    yield make, "json_object", {}, NOT_BOOLS
    yield make, "structural_tag", {}, (*JUNK, *BOOLS, *HUGE, 3)
    yield make, "grammar", {}, ("start: <eos>", "start: <|a|>", 'start[temperature=0.5]: "a"')
    given = dict(json="{}", regex="a", choice=["a"], grammar='start: "a"', json_object=True)
    yield from ((make, a, {b: given[b]}, [given[a]]) for a, b in itertools.permutations(given, 2))
    for name in ("regex", "choice", "grammar"):
        yield make, "disable_any_whitespace", {name: given[name]}, [True]
        yield make, "whitespace_pattern", {name: given[name]}, [" "]


def contradictions() -> Iterator[Row]:
    pairs: Any = [
        *(("n", dict(temperature=zero), (2, 3, 16384)) for zero in (0, -0.0, np.float32(0))),
        *(("min_tokens", dict(max_tokens=most), (17, COUNT)) for most in (1, 16, np.int8(3))),
        *(("logprobs", dict(logprob_token_ids=ids), (-1, 3)) for ids in ([], [1], [1, 2])),
        ("stop", dict(detokenize=False), ("a", ["a", "b"], ("\n",))),
        ("allowed_token_ids", {}, ([], (), np.array([], int))),
        ("truncate_prompt_tokens", {}, (0, -2, 2**31, "3", 1.5, True, [3])),
    ]  # fmt: skip
    yield from ((SamplingParams, *pair) for pair in pairs)
    yield RepetitionDetectionParams, "min_pattern_size", dict(max_pattern_size=3), (4, 4096)
    kinds = SamplingParams, StructuredOutputsParams, RepetitionDetectionParams
    yield from ((kind, name, {}, [1]) for kind in kinds for name in ("best_of", "top-p", "Seed"))


def made() -> Iterator[tuple[Any, str, dict[str, Any]]]:
    """Yields bad parameters: a class, the name that its refusal must have, and the fields."""
    for make, name, rest, values in (*numbers(), *several(), *structures(), *contradictions()):
        yield from ((make, name, rest | {name: value}) for value in values)
    yield from ((SamplingParams, name, {name: ["\ud800"]}) for name in ("bad_words", "stop"))


def fault(name: str, message: str) -> str | None:
    """Says what is wrong with a refusal."""
    named = re.search(rf"(?<![a-z_])({name})(?![a-z_])", message)
    return None if named and len(message) < 2000 else f"{name}: {message:.90}"


def caught(name: str, make: Callable[..., Any], *args: Any, **fields: Any) -> str | None:
    """Says what is wrong with how an input is refused."""
    try:
        make(*args, **fields)
    except (TypeError, ValueError) as error:
        return fault(name, str(error))
    except Exception as error:
        return f"{name}: {error!r:.90}"
    return f"{name}: accepted {fields or args!r:.90}"


def test_bad_parameters_are_refused_by_name():
    found = [caught(name, make, **fields) for make, name, fields in made()]
    wrong = [why for why in found if why]
    assert not wrong and len(found) >= 3000, f"{len(wrong)} of {len(found)}: {wrong[:40]}"


BAD_REGEXES = ("(a", "a{2,1}", "[", "*", "(?=a)b", r"\1")
BAD_SCHEMAS = ('{"type": "strange"}', '{"$ref": "#/nowhere"}', '{"minimum": "a"}')
BAD_GRAMMARS = ("start: nothing", "a", 'start: "a', 'start: a\na: "b" +* "c"')
TEXT = "def fibonacci(n):\n"
NEIGHBOURS: Any = (
    (TEXT, SamplingParams(temperature=0, max_tokens=9)),
    ("class Stack:\n", SamplingParams(seed=3, max_tokens=12, logprobs=2, prompt_logprobs=2)),
    ("import os\n", SamplingParams(seed=4, presence_penalty=1.5, top_k=9, logprobs=3)),
    ({"prompt_token_ids": [0, V - 1, 7]}, SamplingParams(seed=5, n=2, min_tokens=16, logprobs=0)),
    ("with open(", SamplingParams(seed=6, logit_bias={0: -1e4, V - 1: 4.0}, top_p=0.8)),
    ("x = ", SamplingParams(seed=7, structured_outputs=StructuredOutputsParams(regex="[a-e]{7}"))),
)


def requests() -> Iterator[tuple[Any, SamplingParams, str]]:
    """Yields bad prompts, and parameters that only another model could honour."""
    ids = "prompt_token_ids"
    bad = [(p, "prompt") for v in (*NOT_TEXTS, None) for p in (v, {"prompt": v})]
    no_ids = (*JUNK, *BOOLS, *FLOATS, *HUGE, 3, {3}, [], np.array([]), np.array([[3]]))
    bad += [({ids: v}, "prompt|prompt_token_ids") for v in no_ids]
    for v in (*NOT_IDS, V, V + 1, np.int32(V), np.uint64(V)):
        bad += [({ids: list}, ids) for list in ([v], [3, v], (v, 3), [3] * 120 + [v])]
    bad += [({key: "x"}, "prompt") for key in ("promt", "", 3, None, "multi_modal_data")]
    texts = ("\ud83d", "a\udcff", "x " * 200, "é" * 10**5)
    bad += [(v, "prompt") for v in (*texts, *({ids: [3] * n} for n in (128, 129, 10**5)))]
    yield from ((prompt, SamplingParams(), name) for prompt, name in bad)
    given: list[Any] = [("extra_args", {name: 1.0}) for name in ("heat", "", "temperature")]
    for v in (V, V + 1, 2**16, COUNT, np.int64(V)):
        given += [(name, min(v + 1, COUNT)) for name in ("logprobs", "prompt_logprobs")]
        for some in ([v], [3, v], [v, 3], [*range(9), v]):
            given += [(name, some) for name in ID_FIELDS]
            given += [("logit_bias", dict.fromkeys(some, 1.0)), ("bad_words", ["a", some])]
    given += [("structured_outputs", StructuredOutputsParams(regex=v)) for v in BAD_REGEXES]
    given += [("structured_outputs", StructuredOutputsParams(json=v)) for v in BAD_SCHEMAS]
    given += [("structured_outputs", StructuredOutputsParams(grammar=v)) for v in BAD_GRAMMARS]
    yield from ((TEXT, SamplingParams(**{name: value}), name) for name, value in given)


def calls(llm) -> Iterator[tuple[str, Callable[..., Any], tuple[Any, ...], dict[str, Any]]]:
    """Yields calls that are bad as a whole, each with what its refusal names."""
    one, two = SamplingParams(max_tokens=1), BeamSearchParams(beam_width=2, max_tokens=2)
    for v in (*JUNK, *BOOLS, *FLOATS, *HUGE, 0, 3, [3], [1, 2], (3,), {3}, range(2), None):
        if not isinstance(v, str | dict):
            yield "prompts", llm.generate, (v, one), {}
            yield "prompts", llm.score_tokens, (v,), {}
            yield "prompts", llm.beam_search, (v, two), {}
        yield "on_error", llm.generate, (TEXT, one), dict(on_error=v)
        yield "sampling_params", llm.generate, ([TEXT, TEXT], [one, v]), {}
        yield "params", llm.beam_search, (TEXT, v), {}
        yield "pair 1", llm.loglikelihood, ([("a", "b"), v],), {}
        if not isinstance(v, str | list | tuple | range):
            yield "pair 1", llm.loglikelihood, ([("a", "b"), ("a", v)],), {}
            yield "pair 0", llm.loglikelihood, ([([3], v), ("a", "b")],), {}
    for v in (*NOT_INTS, None):
        yield "priority", llm.generate, (TEXT, one), dict(priority=[v])
        yield "priority", llm.generate, ([TEXT, TEXT], one), dict(priority=[1, v])
        yield "start", llm.score_tokens, (TEXT,), dict(start=v)
    yield from (("start", llm.score_tokens, (TEXT,), dict(start=v)) for v in EDGES)
    for v in ([], [1], [1, 2, 3], "ab", "abc", {1, 2}, 1.5):
        yield "priority", llm.generate, ([TEXT, TEXT], one), dict(priority=v)


@pytest.fixture(scope="module")
def llm():
    pytest.importorskip("llguidance")
    with LLM(
        str(embedded.PATH), dtype="float32", max_model_len=128, max_num_seqs=4, block_size=16,
        max_num_batched_tokens=64, token_buckets=(64,), decode_buckets=(4,), num_blocks=64,
        use_tqdm=False, warm_up=False) as llm:  # fmt: skip
        yield llm


@pytest.fixture
def launched(llm, monkeypatch):
    """The ids of all requests that reach the runner, by `step` or by `execute_model`."""
    seen, real = set(), llm.engine.runner._prepare

    def record(scheduled):
        seen.update(scheduled.num_scheduled_tokens, scheduled.requests)
        return real(scheduled)

    monkeypatch.setattr(llm.engine.runner, "_prepare", record)
    yield seen
    assert not llm.engine.has_unfinished and llm.engine.pools[0].num_free == 64


def answers(llm, requests) -> list[Any]:
    assert llm.reset_prefix_cache()
    return llm.generate([r[0] for r in requests], [r[1] for r in requests], use_tqdm=False)


def test_bad_requests_are_refused_alone_and_reach_no_device(llm, launched):
    bad, wrong, good = list(requests()), [], []
    answers(llm, NEIGHBOURS)  # compiles the grammar, while others run
    want = [output.outputs for output in answers(llm, NEIGHBOURS)]
    launched.clear()
    order = [one for i, near in enumerate(NEIGHBOURS) for one in (*bad[i::6], near)]
    for one, output in zip(order, answers(llm, order), strict=True):
        if len(one) == 2:
            good.append(output)
            continue
        assert output.request_id not in launched or not output.error, output
        why = fault(one[2], output.error) if output.error else f"{one[2]}: accepted {output!r:.90}"
        wrong += [why] if why or output.outputs[0].finish_reason != "error" else []
    assert not wrong and len(bad) >= 500, f"{len(wrong)} of {len(bad)}: {wrong[:40]}"
    assert [output.outputs for output in good] == want  # bit for bit
    assert {name.split(".")[0] for name in launched} == {output.request_id for output in good}


def test_bad_calls_are_refused_and_reach_no_device(llm, launched):
    wrong = []
    for name, method, args, fields in calls(llm):
        why = caught(name, method, *args, **fields, use_tqdm=False)
        wrong += [f"{method.__name__} {why or 'launched'}"] if why or launched else []
        launched.clear()
    assert not wrong, f"{len(wrong)}: {wrong[:40]}"
