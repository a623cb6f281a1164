"""What requests ask for beside tokens, with several tokens a step: as without drafts."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from jaxrunner import LLM, SamplingParams, embedded
from jaxrunner.api.sampling_params import RequestOutputKind
from jaxrunner.engine.engine import Engine
from jaxrunner.models.llama import llama
from tests.support import small_llm, tiny
from tests.support.drafters import DRAFTERS, K, joined

PROMPT = [5, 9, 2, 6]
# What ends or changes a request at token j of `free`, its tokens where nothing ends them.
ASKED: dict[str, Callable[[list[int], int], dict[str, Any]]] = dict(
    stop_token_ids=lambda free, j: dict(stop_token_ids=[free[j]]),
    eos=lambda free, j: dict(eos=free[j]),
    ignore_eos=lambda free, j: dict(eos=free[j], ignore_eos=True),
    # With logprobs, as the last: a rare rule by itself would be one more program.
    min_tokens=lambda free, j: dict(stop_token_ids=[free[j]], min_tokens=j + 2, logprobs=2),
    max_tokens=lambda free, j: dict(max_tokens=j + 1),
    logprobs=lambda free, j: dict(max_tokens=j + 1, logprobs=2),
)


@pytest.fixture(scope="module")
def engines() -> list[Engine]:
    """Returns an engine without drafts, and one whose drafts are all right."""
    both = (llama, *tiny.model_and_params()), DRAFTERS["itself"]()
    return [Engine(*parts[:2], tiny.engine_config(async_depth=1), parts[2]) for parts in both]


def answered(e: Engine, *, eos: int | None = None, **asked: Any) -> tuple[Any, list[int], Any]:
    """Returns tokens and reasons of a request, how many tokens each step gave, and logprobs."""
    given: dict[str, Any] = dict(max_tokens=20, seed=7)
    params = SamplingParams(**given | asked)
    request = e.add("a", PROMPT, params, eos_token_ids=() if eos is None else (eos,))
    chunks = []
    while e.has_unfinished:
        chunks += [len(new) for _, new in e.step()]
    e.step()  # tells the device that it has ended
    said = request.output_token_ids, request.finish_reason, request.stop_reason
    return said, [n for n in chunks if n], joined(request.logprobs, params)


@pytest.mark.parametrize(
    ("name", "temperature"), [("max_tokens", 0.7), *zip(ASKED, [0.0, 0.7] * 3, strict=True)]
)
def test_a_request_ends_amid_drafts_where_it_ends_without(engines, name, temperature):
    (free, *_), *_ = answered(engines[0], temperature=temperature)
    last, most = set(), set()
    for j in [j for j in range(1, 12) if free[j] not in free[:j]]:
        asked = ASKED[name](free, j) | dict(temperature=temperature)
        (want, ones, theirs), (got, chunks, ours) = (answered(e, **asked) for e in engines)
        assert got == want and {*ones} == {1}
        assert bool(ours) == ("logprobs" in asked)
        for x, y in zip(ours, theirs, strict=True):
            np.testing.assert_allclose(x, y, atol=2e-5)
        last.add(chunks[-1])
        most.add(max(chunks))
    assert max(most) == K + 1
    # The first step gives one token, each other all drafts that a stop leaves.
    assert len(last) > 2 or name in ("ignore_eos", "min_tokens")


SIZES: dict[str, Any] = small_llm.SIZES | dict(max_num_seqs=4, decode_buckets=(4,))
TEXT = "class Stack:\n    def __init__(self"
GREEDY = SamplingParams(temperature=0.0, max_tokens=40)


@pytest.fixture(scope="module")
def plain():
    with LLM(str(embedded.PATH), **SIZES) as llm:
        yield llm


@pytest.fixture(scope="module")
def drafting():
    drafts = dict(method="eagle3", model=str(embedded.EAGLE3_PATH), num_speculative_tokens=K)
    with LLM(str(embedded.PATH), speculative_config=drafts, **SIZES) as llm:
        yield llm


def completions(llm: LLM, params: SamplingParams) -> list[tuple[Any, ...]]:
    """Returns all that is said of each completion, but for numbers."""
    (output,) = llm.generate([TEXT], params)
    return [(c.index, c.text, list(c.token_ids), c.finish_reason, c.stop_reason)
            for c in output.outputs]  # fmt: skip


def told(llm: LLM, params: SamplingParams) -> list[tuple[str, list[int]]]:
    """Returns text and tokens of each part of a stream."""
    parts = [part.outputs[0] for part in llm.stream([TEXT], params)]
    return [(part.text, list(part.token_ids)) for part in parts]


def joined_parts(parts: list[tuple[str, list[int]]]) -> tuple[str, list[int]]:
    return "".join(text for text, _ in parts), [i for _, ids in parts for i in ids]


@pytest.mark.parametrize("keeps", [False, True], ids=["cut", "kept"])
def test_stop_strings_cut_text_and_tokens_where_they_do_without_drafts(plain, drafting, keeps):
    free = completions(plain, GREEDY)[0][1]
    for at in (20, 34, 45):
        params = replace(GREEDY, stop=[free[at : at + 3]], include_stop_str_in_output=keeps)
        want = completions(plain, params)
        assert completions(drafting, params) == want and want[0][3] == "stop"
        assert joined_parts(told(drafting, params)) == want[0][1:3]


def test_a_stream_tells_several_tokens_of_a_step_at_once(plain, drafting):
    ((_, text, ids, *_),) = completions(plain, GREEDY)
    parts = told(drafting, GREEDY)
    assert len(parts) < 0.7 * len(ids) and max(len(new) for _, new in parts) > 2
    assert joined_parts(parts) == (text, ids)
    growing = told(drafting, replace(GREEDY, output_kind=RequestOutputKind.CUMULATIVE))
    assert growing[-1] == (text, ids) and all(text.startswith(part) for part, _ in growing)


def test_each_completion_of_n_is_that_without_drafts(plain, drafting):
    params = SamplingParams(n=3, seed=5, temperature=0.9, max_tokens=24)
    want = completions(plain, params)
    assert completions(drafting, params) == want and len({text for _, text, *_ in want}) == 3
