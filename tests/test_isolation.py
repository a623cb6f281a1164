"""What a request is answered depends on no other request, whatever these use and do."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from jaxrunner.api.sampling_params import SamplingParams
from jaxrunner.engine.engine import Engine
from jaxrunner.models.llama import llama
from jaxrunner.scheduling.request import Request
from tests.support import features, tiny

NUM_TRIALS = 100


def engine(**changes) -> Engine:
    config, params = tiny.model_and_params()
    sizes = tiny.engine_config(**changes)
    return Engine(llama, config, sizes, params, make_compiler=features.ParityCompiler)


@pytest.fixture(scope="module")
def solo() -> Engine:
    """Returns the engine that answers one request at a time."""
    return engine(enable_prefix_caching=False)


@dataclass
class Told:
    """All that a request's user learns of it, step by step."""

    request: Request
    tokens: list[int] = field(default_factory=list)

    def logprobs(self) -> dict[tuple[str, int], np.ndarray]:
        """Returns the likeliest tokens' logprobs at each place."""
        found = {}
        for positions, part in self.request.prompt_logprobs:
            for at, row in zip(positions.tolist(), part.top_value, strict=True):
                found["prompt", at] = np.append(row, 0)[: self.request.params.prompt_logprobs]
        parts = [row for part in self.request.logprobs for row in part.top_value]
        for at, row in enumerate(parts):
            found["output", at] = row[: self.request.params.num_logprobs]
        return found


def add(e: Engine, name: str, prompt, params: SamplingParams) -> Told:
    return Told(e.add(name, prompt, params, eos_token_ids=[features.EOS]))


def step(e: Engine, told: dict[str, Told]) -> None:
    for request, tokens in e.step():
        told[request.request_id].tokens += tokens


def alone(e: Engine, prompt, params: SamplingParams) -> Told:
    told = add(e, "a", prompt, params)
    while e.has_unfinished:
        step(e, {"a": told})
    return told


def summary(told: Told) -> Any:
    request = told.request
    return told.tokens, request.finish_reason, request.stop_reason, request.error


def prompt_of(rng: np.random.Generator) -> list[int]:
    base = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2]
    return base[: rng.integers(0, 17)] + rng.integers(0, 60, rng.integers(1, 6)).tolist()


@pytest.mark.slow
def test_a_request_is_answered_as_if_it_were_alone(solo):
    """Of many requests each is compared; those around it join, leave, abort and end."""
    rng = np.random.default_rng(7)
    e = engine(num_blocks=15, max_num_batched_tokens=13, token_buckets=(13,), async_depth=3)
    told: dict[str, Told] = {}
    asked: dict[str, tuple[list[int], SamplingParams]] = {}
    aborted = set()
    while len(asked) < NUM_TRIALS or e.has_unfinished:
        if len(asked) < NUM_TRIALS and e.scheduler.num_waiting < 4 and rng.random() < 0.5:
            name = str(len(asked))
            asked[name] = prompt_of(rng), features.random_params(rng)
            told[name] = add(e, name, *asked[name])
        if rng.random() < 0.03:
            live = [n for n in told if told[n].request.finish_reason is None]
            if live:
                aborted.add(gone := str(rng.choice(live)))
                e.abort([gone])
        step(e, told)
    assert len(aborted) > 5
    for name, (prompt, params) in asked.items():
        want = alone(solo, prompt, params)
        if name in aborted:
            assert told[name].tokens == want.tokens[: len(told[name].tokens)]
            continue
        assert summary(told[name]) == summary(want), (name, params)
        got, wanted = told[name].logprobs(), want.logprobs()
        assert got.keys() == wanted.keys(), (name, params)
        for place, values in wanted.items():
            np.testing.assert_allclose(got[place], values, atol=1e-4)
    assert e.scheduler.num_preemptions > 10


def test_tokens_of_every_feature_survive_the_bucket_and_the_depth(solo):
    rng = np.random.default_rng(3)
    asked = [(prompt_of(rng), features.random_params(rng)) for _ in range(12)]
    e = engine(async_depth=1, decode_buckets=(2, 5), num_decode_steps=4)
    told = {str(i): add(e, str(i), *one) for i, one in enumerate(asked)}
    while e.has_unfinished:
        step(e, told)
    assert [summary(one) for one in told.values()] == [summary(alone(solo, *one)) for one in asked]


def test_a_slot_keeps_nothing_of_the_request_before(solo):
    rng = np.random.default_rng(5)
    plain, slots = SamplingParams(max_tokens=6, seed=4), set()
    want = summary(alone(solo, [3, 1, 4], plain))
    for i in range(10):
        for prompt, params in ((prompt_of(rng), features.random_params(rng)), ([3, 1, 4], plain)):
            told = add(solo, "a", prompt, params)
            while solo.has_unfinished:
                step(solo, {"a": told})
                slots |= {slot.index for slot in solo.runner.requests._slots.values()}
        assert summary(told) == want, i
    assert len(slots) == 1
