"""All pairs of features, each in one request among many: both have their effect, or are refused."""

from collections.abc import Callable, Sequence
import dataclasses
import functools
import itertools
from pathlib import Path
import re
import sys
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))  # as a script, from a checkout

import jax
import numpy as np
import pytest

from jaxrunner import LLM, SamplingParams, embedded
from jaxrunner.api.outputs import CompletionOutput, RequestOutput
from jaxrunner.api.sampling_params import RepetitionDetectionParams, RequestOutputKind
from jaxrunner.api.structured_outputs import StructuredOutputsParams
from jaxrunner.device.parts.parts import LoweredParts, Parts
from tests.support.token_oracle import PROMPT, L, N, Oracle, V

DOCS = Path(__file__).parents[1] / "docs" / "features.md"
HEAD = """# Features together

Every two features were asked of one request, in batches with the requests of the other pairs: `+`,
both had their effect, and each token is the one that the rules draw from logits computed without
engine, cache and neighbours; `r`, refused, with a message below; `.`, both set one field.
On the diagonal is one feature, which changed what was answered (`priority` only when).
`python tests/test_features.py` made this file, and `pytest tests/test_features.py` compares it.
"""
EOS, STOP, STOP_ID, NAMED = 307, "i]", 73, (5, 6, 73, 88)  # EOS is "def", said soon
BASE: dict[str, Any] = dict(seed=226, max_tokens=N)  # whose text ends by itself, with EOS
NUMBER = {"type": "integer", "minimum": 0, "maximum": 99}
SCHEMA = {"type": "array", "items": NUMBER, "minItems": 6, "maxItems": 6}
JSON = [r"\[", *["[0-9]{1,2}", ","] * 5, "[0-9]{1,2}", r"\]"]  # a cut text has the first ones
LETTERS = ["[a-f]", "-"] * 6 + ["[0-9]"]
CHOICES = [f"some other one of the answers {word} is no good" for word in ("here", "there")]
CHOICE = [*"some other one of the answers ", "t?", *"here is no good"]


class Case(NamedTuple):
    got: RequestOutput
    params: SamplingParams
    alone: RequestOutput  # what the other feature is answered by itself
    oracle: Oracle
    num_parts: int  # outputs of a stream
    is_first: bool  # whether no request without priority had a token before


Check = Callable[[Case, CompletionOutput], Any]


def is_same(case: Case, told: CompletionOutput, size: int = N) -> bool:
    return told.token_ids == case.alone.outputs[told.index].token_ids[:size]


def is_stopped(case: Case, told: CompletionOutput) -> bool:
    ids, params, decode = told.token_ids, case.params, case.oracle.decode
    whole = decode(ids)
    if told.stop_reason == STOP:
        rest = whole[len(told.text) - len(STOP) * params.include_stop_str_in_output :]
        return whole.startswith(told.text) and rest.startswith(STOP)
    first = max(len(decode(ids[: params.min_tokens])) - len(STOP) + 1, 0)
    return whole.find(STOP, first) < 0 and told.text in (whole, decode(ids[:-1]))


def is_stopped_by_id(case: Case, told: CompletionOutput) -> bool:
    ids = told.token_ids[max(case.params.min_tokens - 1, 0) :]
    return STOP_ID not in ids[:-1] and (STOP_ID in ids) <= (told.stop_reason == STOP_ID)


def is_repetitive(case: Case, told: CompletionOutput) -> bool:
    ids, pattern = told.token_ids, case.params.repetition_detection
    sizes = range(max(case.params.min_tokens, 1), len(ids) + 1)
    found = [size for size in sizes if pattern is not None and pattern.found(ids[:size])]
    ends = told.finish_reason == "repetition", told.finish_reason in ("repetition", "stop")
    return found in ([], [len(ids)]) and ends[0] <= bool(found) <= ends[1]


def follows(atoms: Sequence[str], case: Case, told: CompletionOutput) -> bool:
    """Whether a text is whole, or cut where something else ended it."""
    text = case.oracle.decode([token for token in told.token_ids if token != EOS])
    if (told.finish_reason, told.stop_reason) == ("stop", None):
        return re.fullmatch("".join(atoms), text) is not None
    starts = functools.reduce(lambda rest, atom: f"(?:{atom}{rest})?", reversed(atoms), "")
    return re.fullmatch(starts, text) is not None


def tells(least: int, named: Sequence[int], case: Case, told: CompletionOutput) -> bool:
    """Whether each token has an entry with its own, `named`, and `least` or one more in all."""
    want = np.asarray(jax.nn.log_softmax(case.oracle.logits(told.token_ids), axis=-1))
    entries = told.logprobs or ()
    return len(entries) == len(told.token_ids) and all(
        {token, *named} <= entry.keys() and least <= len(entry) <= least + 1
        and all(abs(value.logprob - row[t]) < 1e-3 for t, value in entry.items())
        for entry, token, row in zip(entries, told.token_ids, want, strict=True)
    )  # fmt: skip


def tells_prompt(case: Case, told: CompletionOutput) -> bool:
    first, *rest = case.got.prompt_logprobs or [{}]
    entries = zip(rest, case.oracle.prompt[1:], strict=True)
    return first is None and all(e and token in e and 2 <= len(e) <= 3 for e, token in entries)


def is_streamed(case: Case, told: CompletionOutput) -> bool:
    alone = case.alone.outputs[told.index]  # a part may have the tokens of two steps
    same = told.text == alone.text and told.finish_reason == alone.finish_reason
    return same and 3 * case.num_parts >= len(told.token_ids)


DRAWN: dict[str, dict[str, Any]] = {  # what `Oracle.draws` checks
    "greedy": dict(temperature=0.0), "temperature, seed": dict(temperature=1.5, seed=7),
    "top_k": dict(top_k=3), "top_p": dict(top_p=0.5), "min_p": dict(min_p=0.3),
    "presence_penalty": dict(presence_penalty=2.0), "logit_bias": dict(logit_bias={89: -9, 59: 3}),
    "frequency_penalty": dict(frequency_penalty=2.0), "repetition_penalty":
    dict(repetition_penalty=1.8), "bad_words": dict(bad_words=[[449, 199], [73, 61], [258]]),
    "allowed_token_ids": dict(allowed_token_ids=[  # those of CHOICES among them
        *range(440), 452, 489, 491, 524, 583, 597, 715, 812, 855, 925, 936, 972, 1015, 1031, 1056,
        1353, 1459, 1462, 1484, 1854, 1881, 2044, 2253, 2297, 2614, 2696, 2697, 2844]),
}  # fmt: skip
# These must leave the tokens of the other feature as they are.
OBSERVERS: dict[str, tuple[dict[str, Any], Check]] = {
    "logprobs": (dict(logprobs=3), functools.partial(tells, 3, ())),
    "logprobs of all": (dict(logprobs=-1), functools.partial(tells, V, ())),
    "logprob_token_ids": (dict(logprob_token_ids=NAMED), functools.partial(tells, 4, NAMED)),
    "prompt_logprobs": (dict(prompt_logprobs=2), tells_prompt),
    "skip_reading_prefix_cache": (dict(skip_reading_prefix_cache=True),
                                  lambda case, told: not case.got.num_cached_tokens),
    "detokenize": (dict(detokenize=False), lambda case, told: told.text == ""),
    "stream": (dict(output_kind=RequestOutputKind.DELTA), is_streamed),
    "priority": ({}, lambda case, told: case.is_first),
}  # fmt: skip
FEATURES: dict[str, tuple[dict[str, Any], Check]] = {
    **{name: (params, lambda case, told: True) for name, params in DRAWN.items()},
    "n": (dict(n=2), lambda case, told: len(case.got.outputs) == 2),
    "min_tokens": (dict(min_tokens=12), lambda case, told: len(told.token_ids) >= 12),
    "max_tokens": (dict(max_tokens=1), functools.partial(is_same, size=1)),
    "stop": (dict(stop=STOP), is_stopped),
    "include_stop_str_in_output": (dict(stop=STOP, include_stop_str_in_output=True), is_stopped),
    "stop_token_ids": (dict(stop_token_ids=[STOP_ID]), is_stopped_by_id),
    "ignore_eos": (dict(ignore_eos=True), lambda case, told: case.params.structured_outputs
                   or (told.finish_reason, told.stop_reason) != ("stop", None)),
    "repetition_detection": (dict(logit_bias={59: 12.0}, repetition_detection=
        RepetitionDetectionParams(max_pattern_size=4)), is_repetitive),
    "structured json": (dict(structured_outputs=StructuredOutputsParams(
        json=SCHEMA, disable_any_whitespace=True)), functools.partial(follows, JSON)),
    "structured regex": (dict(structured_outputs=StructuredOutputsParams(
        regex="".join(LETTERS))), functools.partial(follows, LETTERS)),
    "structured choice": (dict(structured_outputs=StructuredOutputsParams(
        choice=CHOICES)), functools.partial(follows, CHOICE)),
} | OBSERVERS  # fmt: skip
Pair = tuple[str, str]


def asked(pair: Pair) -> SamplingParams | str:
    a, b = (FEATURES[name][0] for name in pair)
    if any(a[field] != b[field] for field in a.keys() & b.keys()):
        return "."  # one field
    try:
        return SamplingParams(**BASE | a | b)
    except ValueError as error:
        return str(error)


def merged(parts: list[RequestOutput]) -> RequestOutput:
    whole: dict[int, CompletionOutput] = {}
    for told in (told for part in parts for told in part.outputs):
        if (old := whole.get(told.index)) is not None:
            text, ids = old.text + told.text, old.token_ids + told.token_ids
            logprobs = None if told.logprobs is None else [*(old.logprobs or ()), *told.logprobs]
            told = dataclasses.replace(told, text=text, token_ids=ids, logprobs=logprobs)
        whole[told.index] = told
    outputs = [whole[i] for i in sorted(whole)]
    return dataclasses.replace(parts[-1], outputs=outputs, prompt_logprobs=parts[0].prompt_logprobs)


def answers(llm: LLM, params: dict[Pair, SamplingParams]) -> dict[Pair, list[RequestOutput]]:
    found = {}
    for ask in (functools.partial(llm.generate, use_tqdm=False), llm.stream):
        pairs = [pair for pair in params if ("stream" in pair) == (ask == llm.stream)]
        parts: dict[int, list[RequestOutput]] = {}
        for part in ask([PROMPT] * len(pairs), [params[pair] for pair in pairs],
                        priority=[-("priority" in pair) for pair in pairs]):  # fmt: skip
            parts.setdefault(int(part.request_id), []).append(part)
        found |= {pair: parts[name] for pair, name in zip(pairs, sorted(parts), strict=True)}
    return found


def judged(found: dict[Pair, list[RequestOutput]], params, base, oracle: Oracle) -> dict[Pair, str]:
    whole, cells = {pair: merged(parts) for pair, parts in found.items()}, {}
    starts = {p: (one.metrics and one.metrics.first_token_s) or np.inf for p, one in whole.items()}
    for pair, got in whole.items():
        near = [p for p in whole if ("stream" in p) == ("stream" in pair) and "priority" not in p]
        rest = oracle, len(found[pair]), starts[pair] <= min(starts[p] for p in near)
        wrong = [told.index for told in got.outputs if not oracle.draws(params[pair], told)]
        for name, other in (pair, pair[::-1]):
            case = Case(got, params[pair], base if name == other else whole[other, other], *rest)
            checks = [FEATURES[name][1]] + [is_same] * (name in OBSERVERS)
            wrong += [name] * (not all(c(case, told) for c in checks for told in got.outputs))
        same: dict[str, Any] = dict(request_id="", metrics=None)
        if "skip_reading_prefix_cache" not in pair:  # of others the neighbours decide it
            same |= dict(num_cached_tokens=0)
        a, b = (dataclasses.replace(o, **same) for o in (got, base))
        if pair[0] == pair[1] not in ("priority", "stream") and a == b:
            wrong.append("no effect")
        cells[pair] = got.error or (f"failed: {wrong}" if wrong else "+")
    return cells


PAIRS: list[Pair] = [*itertools.combinations_with_replacement(FEATURES, 2)]


def matrix() -> dict[Pair, str]:
    """Returns the cells of all pairs, those of each feature alone among them."""
    wanted = {p: asked(p) for p in sorted(PAIRS, key=lambda p: "logprobs of all" in p)}
    params = {p: some for p, some in wanted.items() if isinstance(some, SamplingParams)}
    with LLM(
        str(embedded.PATH), dtype="float32", max_model_len=L, max_num_seqs=16, block_size=16,
        max_num_batched_tokens=32, token_buckets=(32,), decode_buckets=(16,), num_blocks=96,
        policy="priority", hf_overrides=dict(eos_token_id=EOS), generation_config="vllm",
        use_tqdm=False, warm_up=False,
    ) as llm:  # fmt: skip
        _, base = llm.generate([PROMPT] * 2, SamplingParams(**BASE), use_tqdm=False)
        cells = judged(answers(llm, params), params, base, Oracle(llm))
    return {pair: cells.get(pair, str(some)) for pair, some in wanted.items()}


def markdown(cells: dict[Pair, str]) -> str:
    assert not (failed := {p: c for p, c in cells.items() if c.startswith("failed")}), failed
    numbers = "".join(f" {i + 1} |" for i in range(len(FEATURES)))
    lines = [f"{HEAD}\n| |{numbers}\n|---{'|---' * len(FEATURES)}|"]
    for i, a in enumerate(FEATURES, 1):
        row = [cells.get((a, b)) or cells[b, a] for b in FEATURES]
        lines.append(f"| {i} {a} | {' | '.join(c if c in '+.' else 'r' for c in row)} |")
    told = sorted(f"- {a} and {b}: {cell}" for (a, b), cell in cells.items() if cell not in "+.")
    return "\n".join([*lines, "", "Refused:", "", *told, ""])


def optimised(lowered: LoweredParts, options: dict[str, str], own=LoweredParts.compile) -> Parts:
    """Compiles a program as users' are: these run hundreds of times, most others in tests once."""
    return own(lowered, options | dict(xla_backend_optimization_level="1"))


@pytest.mark.slow
def test_features_work_together_or_are_refused(monkeypatch):
    pytest.importorskip("llguidance")
    monkeypatch.setattr(LoweredParts, "compile", optimised)
    assert DOCS.read_text() == markdown(matrix())


if __name__ == "__main__":
    DOCS.write_text(markdown(matrix()))
