"""Each field of vLLM's `SamplingParams` has an effect, or is refused; its widest values work."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from jaxrunner import LLM, SamplingParams
from jaxrunner.api.sampling_params import RepetitionDetectionParams, RequestOutputKind
from jaxrunner.api.structured_outputs import StructuredOutputsParams
from jaxrunner.sampling.custom import logits_fn

V, COUNT = 4096, 2**30
SIZES: dict[str, Any] = dict(
    dtype="float32", max_model_len=128, max_num_seqs=4, max_num_batched_tokens=64,
    token_buckets=(64,), decode_buckets=(4,), block_size=16, num_blocks=64, use_tqdm=False,
    warm_up=False,
)  # fmt: skip
# vLLM 0.23.0's. Its `output_kind` is CUMULATIVE, which ours is outside of streams.
DEFAULTS: dict[str, Any] = dict(
    n=1, presence_penalty=0.0, frequency_penalty=0.0, repetition_penalty=1.0, temperature=1.0,
    top_p=1.0, top_k=0, min_p=0.0, seed=None, stop=None, stop_token_ids=None, ignore_eos=False,
    max_tokens=16, min_tokens=0, logprobs=None, prompt_logprobs=None, logprob_token_ids=None,
    flat_logprobs=False, detokenize=True, skip_special_tokens=True,
    spaces_between_special_tokens=True, include_stop_str_in_output=False, output_kind=None,
    structured_outputs=None, logit_bias=None, allowed_token_ids=None, bad_words=None,
    extra_args=None, skip_reading_prefix_cache=None, repetition_detection=None,
)  # fmt: skip
AS_TUPLES = ("stop", "stop_token_ids", "bad_words")  # stored as () where they are None
EOS = 0
PROMPT = "for i in range(10):\n    x[i] = 0\n    x[i] = 0\n    x[i] ="
SEEDED: dict[str, Any] = dict(seed=1)
GREEDY: dict[str, Any] = dict(temperature=0.0)
ENDS = GREEDY | dict(logit_bias={EOS: 100.0}, max_tokens=4)  # says EOS whenever it may
SAYS_EOS = ENDS | dict(ignore_eos=True)
TWICE = RepetitionDetectionParams(max_pattern_size=1)

# Of each field: what stands beside it, its value, and what shows its effect.
EFFECTS: dict[str, tuple[dict[str, Any], Any, str]] = {
    "n": ({}, 3, "count"),
    "presence_penalty": ({}, 2.0, "tokens"),
    "frequency_penalty": (GREEDY, 2.0, "tokens"),
    "repetition_penalty": (GREEDY, 2.0, "tokens"),
    "temperature": ({}, 4.0, "tokens"),
    "top_p": ({}, 0.2, "tokens"),
    "top_k": ({}, 1, "tokens"),
    "min_p": ({}, 0.9, "tokens"),
    "seed": ({}, 7, "tokens"),
    "stop": (GREEDY, "#", "text"),
    "stop_token_ids": (GREEDY, [199], "tokens"),  # a line break
    "ignore_eos": (ENDS, True, "tokens"),
    "max_tokens": (GREEDY, 3, "tokens"),
    "min_tokens": (ENDS, 3, "tokens"),
    "logprobs": ({}, 3, "logprobs"),
    "prompt_logprobs": ({}, 3, "prompt_logprobs"),
    "logprob_token_ids": (dict(logprobs=2), [5, 6], "logprobs"),
    "flat_logprobs": (dict(logprobs=2), True, "kind"),
    "truncate_prompt_tokens": ({}, 3, "prompt"),
    "detokenize": ({}, False, "text"),
    "skip_special_tokens": (SAYS_EOS, False, "text"),
    "include_stop_str_in_output": (GREEDY | dict(stop="#"), True, "text"),
    "structured_outputs": ({}, StructuredOutputsParams(regex="[a-c]{5}"), "text"),
    "logit_bias": (GREEDY, {9: 100.0}, "tokens"),
    "allowed_token_ids": (GREEDY, [9, 10, 11], "tokens"),
    "bad_words": (GREEDY, [" 0"], "tokens"),
    "skip_reading_prefix_cache": ({}, True, "cached"),
    "repetition_detection": (GREEDY | dict(logit_bias={9: 100.0}), TWICE, "finish_reason"),
}
REFUSED = {"extra_args": {"heat": 1}}
OLDER: dict[str, Any] = dict(truncate_prompt_tokens=None)  # of vLLM's releases before
TESTED_ELSEWHERE = {"output_kind", "spaces_between_special_tokens"}


GOOD: tuple[dict[str, Any], ...] = (
    *({"temperature": v} for v in (0, -0.0, 5e-324, 1e-9, 3e38, np.float16(0.5))),
    *({"top_p": v} for v in (1e-37, 1, 1.0)), *({"min_p": v} for v in (0, 1e-300, 1)),
    *({"top_k": v} for v in (-1, 0, 1, V, COUNT)), *({"seed": v} for v in (-1, 0, 2**64 - 1)),
    dict(n=2, seed=2**64 - 1), dict(n=9), dict(temperature=3e38, min_p=1, top_p=1e-37, top_k=V),
    *({name: v} for name in ("presence_penalty", "frequency_penalty") for v in (-2, 2)),
    *({"repetition_penalty": v} for v in (0.001, 1000)), dict(max_tokens=None, ignore_eos=True),
    *(dict(max_tokens=v, ignore_eos=True) for v in (1, 127, COUNT)), dict(min_tokens=3),
    dict(min_tokens=COUNT, max_tokens=None), dict(min_tokens=COUNT, max_tokens=COUNT),
    *({name: v} for name in ("logprobs", "prompt_logprobs") for v in (-1, 0, V)),
    *({name: v} for name in ("stop_token_ids", "logprob_token_ids", "allowed_token_ids")
      for v in ([EOS], [V - 1], [EOS, V - 1], range(V - 16, V))),
    dict(logprob_token_ids=range(128)), dict(allowed_token_ids=range(V - 1024, V)),
    *({"logit_bias": v} for v in ({}, {0: 1e4, V - 1: 1e4}, {0: -1e4, V - 1: 1e4}, [(0, -1e4)])),
    dict(logit_bias=dict.fromkeys(range(1024), 1e4), temperature=1e-9, repetition_penalty=1000),
    *({"bad_words": v} for v in ([], [[0], [V - 1]], [range(1024)], [[i] for i in range(128)])),
    dict(repetition_detection=RepetitionDetectionParams(max_pattern_size=4096, min_count=4096)),
)  # fmt: skip
NEIGHBOURS: tuple[dict[str, Any], ...] = (
    dict(temperature=0),
    dict(seed=2, logprobs=0),
    dict(seed=3, top_k=9, min_tokens=16),
)


@pytest.fixture(scope="module")
def llm(shallow):
    with LLM(shallow, **SIZES) as llm:
        yield llm


def ask(llm, *params: dict[str, Any], prompt: Any = PROMPT) -> list[Any]:
    """Returns the output of each of some parameters."""
    asked = [SamplingParams(**SEEDED | some) for some in params]
    return llm.generate([prompt] * len(asked), asked, use_tqdm=False)


def seen(output: Any) -> dict[str, Any]:
    """Returns what a user sees of an output."""
    first = output.outputs[0]
    return dict(
        count=len(output.outputs), tokens=first.token_ids, text=first.text,
        logprobs=first.logprobs and [sorted(entry) for entry in first.logprobs],
        prompt_logprobs=output.prompt_logprobs, cached=output.num_cached_tokens,
        finish_reason=first.finish_reason, kind=type(first.logprobs).__name__,
        prompt=output.prompt_token_ids,
    )  # fmt: skip


def test_fields_and_defaults_are_those_of_vllm():
    fields = {field.name: field.default for field in dataclasses.fields(SamplingParams)}
    assert fields == DEFAULTS | OLDER
    stored = {name: getattr(SamplingParams(), name) for name in fields}
    assert stored == DEFAULTS | OLDER | dict.fromkeys(AS_TUPLES, ())


def test_each_field_is_in_a_test_below():
    tested = EFFECTS.keys() | REFUSED.keys() | TESTED_ELSEWHERE
    assert tested == DEFAULTS.keys() | OLDER.keys()


@pytest.mark.parametrize("name", EFFECTS)
def test_a_field_has_an_effect(llm, name):
    beside, value, what = EFFECTS[name]
    ask(llm, dict(max_tokens=1))  # so that the prompt is in the cache
    without, changed = (seen(output) for output in ask(llm, beside, beside | {name: value}))
    assert without[what] != changed[what]
    if what in ("logprobs", "prompt_logprobs", "cached"):
        assert without["tokens"] == changed["tokens"]
    if name == "repetition_detection":
        assert (changed["tokens"], changed["finish_reason"]) == ([9, 9], "repetition")


def test_the_text_of_a_stop_token_is_told_like_that_of_a_stop_string(llm):
    stop = GREEDY | dict(stop_token_ids=[199])
    outputs = ask(llm, stop, stop | dict(include_stop_str_in_output=True))
    assert [seen(output)["tokens"] for output in outputs] == [[449, 199]] * 2
    assert [seen(output)["text"] for output in outputs] == [" 0", " 0\n"]  # vLLM's


def test_the_kind_of_output_shapes_a_stream(llm):
    whole = ask(llm, GREEDY)[0].outputs[0].token_ids
    told = {}
    for kind in (None, *RequestOutputKind):
        parts = llm.stream(PROMPT, SamplingParams(temperature=0.0, output_kind=kind))
        told[kind] = [part.outputs[0].token_ids for part in parts]
    assert told[None] == told[RequestOutputKind.DELTA] == [[token] for token in whole]
    assert told[RequestOutputKind.CUMULATIVE] == [whole[: i + 1] for i in range(len(whole))]
    assert told[RequestOutputKind.FINAL_ONLY] == [whole]


@pytest.mark.parametrize("name", REFUSED)
def test_a_field_without_an_effect_is_refused(llm, name):
    fields: dict[str, Any] = {name: REFUSED[name]}
    with pytest.raises(ValueError, match=name):
        llm.generate(PROMPT, SamplingParams(**fields), on_error="raise")


def test_extra_args_have_an_effect_where_a_logits_function_reads_them(shallow):
    rule = logits_fn(lambda logits, row: logits * row.args["heat"], extra_args={"heat": 1.0})
    with LLM(shallow, logits_fn=rule, **SIZES) as llm:
        without, same, hot = ask(llm, {}, *({"extra_args": {"heat": v}} for v in (1.0, 0.1)))
        assert seen(without)["tokens"] == seen(same)["tokens"] != seen(hot)["tokens"]
        (unread,) = ask(llm, {"extra_args": {"cold": 1.0}})
        assert "extra_args has 'cold'" in unread.error


@pytest.mark.slow
def test_the_widest_values_do_no_harm(llm):
    """Those of neighbours included: their tokens stay as they were."""
    prompt = {"prompt_token_ids": [V - 1] * 120}
    want = ask(llm, *NEIGHBOURS)
    wide: list[dict[str, Any]] = [{"max_tokens": 3} | fields for fields in GOOD]
    prompts = [PROMPT] * 3 + [prompt] * len(wide)
    params = [SamplingParams(**SEEDED | p) for p in (*NEIGHBOURS, *wide)]
    order = np.random.default_rng(len(prompts)).permutation(len(prompts))
    outputs = llm.generate([prompts[i] for i in order], [params[i] for i in order], use_tqdm=False)
    found = dict(zip(order.tolist(), outputs, strict=True))
    for i, output in found.items():
        check_sane(output, params[i])
    for i, wanted in enumerate(want):
        assert seen(found[i])["tokens"] == seen(wanted)["tokens"]


def check_sane(output: Any, params: SamplingParams) -> None:
    for told in output.outputs:
        assert output.error is None and told.finish_reason in ("stop", "length"), params
        assert told.token_ids and all(0 <= token < V for token in told.token_ids), params
        entries = [*(told.logprobs or ()), *(output.prompt_logprobs or ())]
        values = [one.logprob for entry in entries for one in (entry or {}).values()]
        assert np.isfinite(values).all(), params
        for name in ("raw_logprobs", "processed_logprobs", "kept_mass"):
            values = getattr(told, name)
            assert values is None or np.isfinite(values).all(), (name, params)
