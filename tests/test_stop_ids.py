"""Tokens that end a request: how many, when they are banned, and what is told of them."""

import numpy as np
import pytest

from jaxrunner.api.sampling_params import SamplingParams
from jaxrunner.program.bucket import FEW_STOP_IDS
from tests.support import rules
from tests.support.rules import Row
from tests.support.tiny_engine import engine

PROMPT, V = [3, 1, 4], 61
EOS, OTHER_EOS, LAST = 8, 9, V - 1


def run(e, name: str, likely: int, *, eos=(), **params):
    """Answers a prompt, `likely` being all but certain."""
    settings = {"temperature": 0, "max_tokens": 6, "logit_bias": {likely: 100.0}} | params
    request = e.add(name, PROMPT, SamplingParams(**settings), eos_token_ids=eos)
    while e.has_unfinished:
        e.step()
    return request


@pytest.mark.parametrize("steps", [1, 4])
@pytest.mark.parametrize("token", [EOS, OTHER_EOS])
def test_eos_is_banned_while_the_output_is_short_though_it_is_ignored(token, steps):
    e = engine(num_decode_steps=steps)
    request = run(e, "a", token, eos=[EOS, OTHER_EOS], min_tokens=3, ignore_eos=True)
    assert [t == token for t in request.output_token_ids] == [False] * 3 + [True] * 3
    assert not {EOS, OTHER_EOS} & {*request.output_token_ids[:3]}
    assert (request.finish_reason, request.stop_reason) == ("length", None)


def test_the_last_id_is_banned_by_no_padding():
    """Free places among stop ids hold an id beyond all, which must not count as the last."""
    rows = [Row(SamplingParams(temperature=0, min_tokens=4), [1], [2], stop_ids=[EOS])]
    logits = np.zeros((1, 3, V), np.float32)
    logits[..., LAST] = 5
    assert rules.step_draw(rows, logits).token_ids[0, 0] == LAST
    request = run(engine(), "a", LAST, eos=[EOS], min_tokens=4)
    assert request.output_token_ids == [LAST] * 6


@pytest.mark.parametrize(
    "eos,asked,want",
    [
        ([EOS, OTHER_EOS], {}, {EOS: None, OTHER_EOS: OTHER_EOS}),
        ([OTHER_EOS, EOS], {}, {EOS: EOS, OTHER_EOS: None}),
        ([EOS], {"stop_token_ids": [OTHER_EOS]}, {EOS: None, OTHER_EOS: OTHER_EOS}),
        ([EOS], {"stop_token_ids": [EOS]}, {EOS: EOS}),
    ],
    ids=["second", "the other way round", "asked", "both"],
)
def test_all_but_the_models_own_eos_are_told(eos, asked, want):
    e = engine()
    for token, reason in want.items():
        request = run(e, str(token), token, eos=eos, **asked)
        assert request.output_token_ids == [token]
        assert (request.finish_reason, request.stop_reason) == ("stop", reason)


@pytest.mark.parametrize("least", [0, 2])
def test_many_stop_ids_all_end_a_request_and_no_later_one(least):
    """One that has the slot after it stops at none of them."""
    many = range(LAST - 40, LAST)
    assert len(many) > FEW_STOP_IDS
    e = engine(max_num_seqs=1)
    for i, token in enumerate((many[0], many[-1])):
        request = run(e, f"many {i}", token, stop_token_ids=many, min_tokens=least)
        *before, last = request.output_token_ids
        assert last == token and len(before) == least and not {*before} & {*many}
        assert request.stop_reason == token
        after = run(e, f"after {i}", token, stop_token_ids=[0], min_tokens=least)
        assert after.output_token_ids == [token] * 6


def test_as_many_stop_ids_as_vllm_takes():
    params = SamplingParams(stop_token_ids=range(128))
    assert len(params.stop_token_ids or ()) == 128
    assert engine().runner.program.dims["X"] >= 128 + 16  # and EOS
