"""Requests whose drafts are drawn from the drafter's own distribution, from their queue to tokens.

The target's probabilities of the first N tokens are computed from its logits in float64, and
compared with what an engine gives to as many requests as `NUM`, each with a seed of its own.
"""

import functools
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxrunner.api.sampling_params import SamplingParams
from jaxrunner.engine.engine import Engine
from jaxrunner.models.llama import llama
from jaxrunner.speculators import chain
from jaxrunner.speculators.draft_model import DraftModelConfig, draft_model
from jaxrunner.speculators.drafted import with_drafter
from jaxrunner.speculators.drafter import Drafted
from tests.support import tiny
from tests.support.chi_square import excess

V, K, N, PROMPT, NUM = 3, 2, 4, [1, 2], 2_000
RULE: dict[str, Any] = dict(temperature=0.9)
R = 64
SIZES: dict[str, Any] = dict(
    max_model_len=8, num_blocks=4 * R, max_num_seqs=R, max_num_batched_tokens=(1 + K) * R,
    token_buckets=((1 + K) * R,), decode_buckets=(R,), enable_prefix_caching=False,
)  # fmt: skip
FAMILY = draft_model(llama)


def never_2(*args: Any) -> Any:
    """Scores tokens as `FAMILY` does, but one that it never drafts."""
    return FAMILY.logits(*args).at[..., 2].set(-np.inf)


def parts(rejection: str, method: str, *, family: Any = FAMILY, itself: bool = False) -> Any:
    """Returns a model, its config and weights, drafted by one of other weights, or by itself."""
    config = tiny.config(vocab_size=V)
    other = config if itself else tiny.config(vocab_size=V, num_hidden_layers=1)
    own, weights = DraftModelConfig(llama, other), tiny.random_params(other, 0 if itself else 5)
    model, both = with_drafter(llama, config, family, own, K, draft_sample_method=method)
    assert model.speculator is not None
    model = model._replace(speculator=model.speculator._replace(rejection=rejection))
    return model, both, Drafted(tiny.random_params(config), weights)


def generate(given: Any, num: int, **changes: Any) -> tuple[np.ndarray, Engine, np.ndarray]:
    """Returns the first tokens of `num` requests, [num, N], the engine, and counts of drafts.

    Near its end a request verifies fewer drafts than were proposed.
    """
    model, config, params = given
    max_tokens = changes.pop("max_tokens", N)
    e = Engine(model, config, tiny.engine_config(**SIZES | changes), params)
    asked = (SamplingParams(max_tokens=max_tokens, seed=i, **RULE) for i in range(num))
    requests = [e.add(str(i), PROMPT, params) for i, params in enumerate(asked)]
    while e.has_unfinished:
        e.step()
    tokens = np.array([request.output_token_ids[:N] for request in requests])
    return tokens, e, np.sum([request.draft_counts for request in requests], 0)


@functools.cache
def target() -> np.ndarray:
    """Returns how likely the model gives each row of N tokens, [V ** N], in float64."""
    config = tiny.config(vocab_size=V)
    params, shares, rows = tiny.random_params(config), np.ones(1), [[]]
    for _ in range(N):
        last = [tiny.dense_logits(config, params, [*PROMPT, *row])[-1] for row in rows]
        scores = np.array(last, np.float64) / RULE["temperature"]
        chances = np.exp(scores - scores.max(1, keepdims=True))
        shares = (shares[:, None] * chances / chances.sum(1, keepdims=True)).reshape(-1)
        rows = [[*row, token] for row in rows for token in range(V)]
    return shares


def difference(tokens: np.ndarray) -> float:
    """Returns how far tokens, [num, N], are from the target's, as `excess` has it; rows of tokens
    that hardly any request has are taken together."""
    seen = np.bincount(tokens @ V ** np.arange(N)[::-1], minlength=V**N)
    expected = len(tokens) * target()
    rare = expected < 20
    if not rare.any():
        return excess(seen, expected)
    return excess(*(np.append(x[~rare], x[rare].sum()) for x in (seen, expected)))


CONDITIONS: dict[str, dict[str, Any]] = {
    "in the usual way": {},
    "preempted": dict(num_blocks=R),
    # As many tokens as two steps of all drafts give.
    "steps": dict(num_decode_steps=2, max_tokens=8, max_model_len=12),
    "a token that is never drafted": {},
}


CASES = [
    ("standard", "probabilistic", "preempted"),
    ("block", "greedy", "in the usual way"),
    ("block", "probabilistic", "a token that is never drafted"),
    ("standard", "probabilistic", "steps"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("rejection", "method", "condition"), CASES)
def test_tokens_are_distributed_as_the_target_says(rejection: str, method: str, condition: str):
    family = FAMILY._replace(logits=never_2) if "never" in condition else FAMILY
    given = parts(rejection, method, family=family)
    preempted = condition == "preempted"
    tokens, e, (steps, *_, first, second) = generate(given, NUM, **CONDITIONS[condition])
    assert difference(tokens) < 4
    assert bool(e.scheduler.num_preemptions) == preempted
    assert 0.2 * steps < first < 0.95 * steps and 0 < second < first


def forgetting(inputs: Any) -> Any:
    """Drafts as `chain` does, and keeps nothing of what drafts were drawn from."""
    return chain.propose(inputs)._replace(tables=None)


def taking_the_likeliest(inputs: Any) -> Any:
    """Keeps what drafts ought to be drawn from, and drafts the likeliest token."""

    def draw(*given: Any) -> Any:
        kept = inputs.draw_own(*given)[1]
        return jnp.argmax(kept, axis=1).astype(jnp.int32), kept

    return chain.propose(inputs._replace(draw_own=draw))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("propose", "num"),
    [(forgetting, 500), (taking_the_likeliest, NUM)],
)
def test_drafts_that_are_verified_by_another_distribution_are_seen(propose: Any, num: int):
    """So that the test above can fail."""
    model, *rest = parts("standard", "probabilistic")
    model = model._replace(speculator=model.speculator._replace(propose=propose))
    assert difference(generate((model, *rest), num)[0]) > 10


@pytest.mark.parametrize("rejection", [pytest.param("standard", marks=pytest.mark.slow), "block"])
def test_all_drafts_of_the_model_itself_stand(rejection: str):
    """Draft and target are of one distribution, so what is kept of a draft is what it came from."""
    given = parts(rejection, "probabilistic", itself=True)
    _, _, (steps, *_, first, second) = generate(given, 100)
    assert first == second == steps
