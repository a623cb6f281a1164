"""Routes of a mixture over data ranks: told with outputs, replayed in scores, and saved."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from jaxrunner import LLM, SamplingParams
from tests.support import small_checkpoint
from tests.support.data_ranks import MIXTURE, RANKS, SIZES, D

ROUTES: dict[str, Any] = SIZES | dict(enable_return_routed_experts=True)
LENGTHS = range(4, 4 + 3 * D)
PROMPTS = [dict(prompt_token_ids=[n, *range(n), 5]) for n in LENGTHS]
PARAMS = [
    SamplingParams(temperature=n % 2, seed=n, max_tokens=20 + n, ignore_eos=True) for n in LENGTHS
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    return small_checkpoint.save_family(tmp_path_factory.mktemp("mixture"), MIXTURE)


@pytest.fixture(scope="module")
def one(folder) -> Iterator[LLM]:
    with LLM(folder, **ROUTES) as llm:
        yield llm


@pytest.fixture(scope="module")
def several(folder) -> Iterator[LLM]:
    with LLM(folder, **ROUTES, **RANKS) as llm:
        yield llm


def routes(outputs: Any) -> dict[str, np.ndarray]:
    return {out.request_id: out.outputs[0].routed_experts for out in outputs if out.finished}


@pytest.mark.slow
@pytest.mark.devices(D)
def test_routes_and_tokens_are_those_of_one_device(one, several, tmp_path):
    """Of requests that are preempted, and of those that are saved in the midst."""
    want, got = (llm.generate(PROMPTS, PARAMS, on_error="raise") for llm in (one, several))
    assert several.engine.scheduler.num_preemptions
    for a, b in zip(want, got, strict=True):
        assert a.outputs[0].token_ids == b.outputs[0].token_ids
        np.testing.assert_array_equal(a.outputs[0].routed_experts, b.outputs[0].routed_experts)
    stream = several.stream(PROMPTS, PARAMS)
    told = [next(stream) for _ in range(20 * D)]
    several.save_state(tmp_path / "saved")
    stream.close()
    several.generate(PROMPTS[::-1], PARAMS)  # whose routes lie where those of the saved ones did
    found = routes(told) | routes(several.restore_state(tmp_path / "saved"))
    assert len(found) == len(want)
    for a, b in zip(want, sorted(found, key=int), strict=True):
        np.testing.assert_array_equal(a.outputs[0].routed_experts, found[b])


@pytest.mark.slow
@pytest.mark.devices(D)
def test_scores_replay_given_routes(one, several):
    rng, (Y, X, k) = np.random.default_rng(0), (2, 6, 2)
    given: list[Any] = [
        rng.permuted(np.tile(np.arange(X), (n + 2, Y, 1)), axis=-1)[..., :k] if n % 3 else None
        for n in LENGTHS
    ]
    own = one.score_tokens(PROMPTS, use_tqdm=False)
    want, got = (
        llm.score_tokens(PROMPTS, routed_experts=given, use_tqdm=False) for llm in (one, several)
    )
    for routed, a, b, c in zip(given, want, got, own, strict=True):
        np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-4)
        assert (np.abs(a.logprobs - c.logprobs).max() > 0.1) == (routed is not None)
