"""What is told of a completion where a launch gives more tokens than it takes."""

from typing import Any

import numpy as np
import pytest
import tokenizers

from jaxrunner import SamplingParams
from jaxrunner.api.sampling_params import RequestOutputKind
from jaxrunner.engine.output_processor import RequestState, new_outputs
from jaxrunner.pytree import host_value
from jaxrunner.scheduling.request import Request
from jaxrunner.scheduling.stop import append_tokens
from jaxrunner.text.tokenizer import Tokenizer
from jaxrunner.types import Logprobs

INNER = tokenizers.Tokenizer(tokenizers.models.BPE({c: i for i, c in enumerate("abcde")}, []))
INNER.decoder = tokenizers.decoders.Fuse()
LETTERS = Tokenizer(INNER)


def logprobs(N: int) -> Logprobs:
    """Returns -1, -2 and so on, and two likely tokens beside each."""
    values = -np.arange(1, N + 1, dtype=np.float32)
    return host_value(
        Logprobs, value=values, rank=np.full(N, 7, np.int32), raw=values, processed=values,
        kept_mass=np.ones(N, np.float32), top_ids=np.tile(np.array([[4, 3]], np.int32), (N, 1)),
        top_value=np.full((N, 2), -9.0, np.float32),
    )  # fmt: skip


def told(params: SamplingParams, tokens: list[int]) -> RequestState:
    """Returns a completion that was given `tokens` by one launch."""
    state = RequestState("r", params)
    state.start([0], LETTERS)
    request = Request("r", [0], params, 0, 99)
    request.logprobs = [logprobs(len(tokens))]
    state.update(request, append_tokens(request, tokens))
    return state


@pytest.mark.parametrize("delta", [False, True])
def test_tokens_after_a_stop_string_count_in_no_sum(delta):
    """Several steps a launch go on until the host sees the text."""
    state = told(SamplingParams(stop=["b"], logprobs=0, max_tokens=9), [0, 1, 2, 3])
    got = state.completion(delta=delta)
    assert (got.text, got.token_ids, got.stop_reason) == ("a", [0, 1], "b")
    assert got.cumulative_logprob == -1 - 2 and len(got.logprobs or ()) == 2
    assert got.raw_logprobs is not None and got.raw_logprobs.tolist() == [-1, -2]


def test_ids_that_a_request_names_have_no_rank():
    named = told(SamplingParams(logprob_token_ids=[4, 3]), [0]).completion()
    likeliest = told(SamplingParams(logprobs=2), [0]).completion()
    for completion, ranks in ((named, [7, None, None]), (likeliest, [7, 1, 2])):
        entry = (completion.logprobs or [{}])[0]
        assert [*entry] == [0, 4, 3] and [e.rank for e in entry.values()] == ranks


@pytest.mark.parametrize("kind", [None, *RequestOutputKind])
def test_a_stream_tells_the_logprobs_of_a_prompt_once(kind):
    """With each output only where each holds all so far."""
    params = SamplingParams(n=2, prompt_logprobs=1, max_tokens=3, output_kind=kind)
    group = [RequestState("r", params, i) for i in range(2)]
    requests: list[Any] = [Request(f"r{i}", [0, 1], params, 0, 5) for i in range(2)]
    seen = []
    for _ in range(3):
        for state, request in zip(group, requests, strict=True):
            if state.request is None:
                state.start([0, 1], LETTERS)
                state.request = request
                request.prompt_logprobs = [(np.array([1]), logprobs(1))]
            state.update(request, append_tokens(request, [2]))
        seen += [output.prompt_logprobs for output in new_outputs(group)]
    entries = group[0].prompt_logprobs()
    assert entries is not None and entries[0] is None and [*(entries[1] or {})] == [1, 4]
    again = entries if kind == RequestOutputKind.CUMULATIVE else []
    num = 1 if kind == RequestOutputKind.FINAL_ONLY else 6
    assert seen == [entries] + [again] * (num - 1)
