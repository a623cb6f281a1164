"""A sampling rule that is no part of the package, against float64."""

from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxrunner import SamplingParams
from jaxrunner.models.llama import llama
from jaxrunner.sampling.seed import TARGET, noise
from tests.outside import checkpoint, float64_llama
from tests.outside.top_n_sigma import top_n_sigma

SETTINGS: dict[str, Any] = checkpoint.LLAMA | dict(architectures=["LlamaForCausalLM"])
V = SETTINGS["vocab_size"]
PROMPTS = checkpoint.prompts(5, 12, 3, 9)
ASKED: list[dict[str, Any]] = [
    dict(extra_args={"top_n_sigma": 0.5}, temperature=1.5),
    dict(extra_args={"top_n_sigma": 1.2}, temperature=0.7, min_p=0.01),
    dict(temperature=0.8),
    dict(extra_args={"top_n_sigma": 1.0}, temperature=3.0, top_k=4),
]


def oracle(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    """Returns logprobs of what is drawn from, [T, V], of a model's logits."""
    z = logits / params.temperature
    if n := dict(params.extra_args or ()).get("top_n_sigma"):
        low = z.max(-1, keepdims=True) - n * z.std(-1, keepdims=True)
        z = np.where(z < low, -np.inf, z)
    if params.min_p:
        z = np.where(z < z.max(-1, keepdims=True) + np.log(params.min_p), -np.inf, z)
    if (params.top_k or 0) > 0:
        z = np.where(z < np.sort(z)[:, [-params.top_k]], -np.inf, z)
    return z - np.log(np.exp(z).sum(-1, keepdims=True))


def test_a_rule_of_others_draws_what_it_should(tmp_path):
    tensors = checkpoint.write(tmp_path, llama, SETTINGS)
    common: dict[str, Any] = dict(max_tokens=6, seed=5, logprobs=-1, detokenize=False)
    params = [SamplingParams(**common | asked) for asked in ASKED]
    kept = []
    with checkpoint.start(
        tmp_path, logits_fn=top_n_sigma, logprobs_mode="processed_logprobs"
    ) as llm:
        asked = [{"prompt_token_ids": ids} for ids in PROMPTS]
        outputs = llm.generate(asked, params, use_tqdm=False)
        # Without logprobs a step is one program, and draws the same.
        bare = [replace(one, logprobs=None) for one in params]
        same = checkpoint.answers(llm, PROMPTS, bare)
        unknown = SamplingParams(extra_args={"top_m_sigma": 1.0})
        error = llm.generate(asked[0], unknown, use_tqdm=False)[0].error
        assert error and "extra_args has 'top_m_sigma', this engine's rules read" in error
    for prompt, one, output, again in zip(PROMPTS, params, outputs, same, strict=True):
        answer = output.outputs[0]
        ids = [*prompt, *answer.token_ids]
        logits = float64_llama.logits(tensors, SETTINGS, ids)[len(prompt) - 1 : -1]
        want = oracle(logits, one)
        for i, (entry, row) in enumerate(zip(answer.logprobs or (), want, strict=True)):
            got = np.array([entry[t].logprob if t in entry else -np.inf for t in range(V)])
            np.testing.assert_array_equal(np.isfinite(got), np.isfinite(row))
            np.testing.assert_allclose(got[np.isfinite(got)], row[np.isfinite(row)], atol=1e-3)
            drawn = noise(
                jnp.array([0, 5], jnp.uint32), jnp.int32(len(prompt) + i), stream=TARGET, shape=(V,)
            )
            assert answer.token_ids[i] == (row + np.asarray(drawn)).argmax()
        assert list(answer.token_ids) == again
        kept.append(np.isfinite(want).sum(-1).mean())
    assert 1 < kept[0] < V / 2 and 1 < kept[1] < V / 2 and kept[2] == V and 1 < kept[3] <= 4


@pytest.mark.parametrize("value", [0.0, 0.4])
def test_it_leaves_the_likeliest(value):
    nothing: Any = None  # is read of the request
    row = top_n_sigma.row(SamplingParams(extra_args={"top_n_sigma": value}), 0)
    logits = jnp.array([0.0, 3.0, 2.9, -jnp.inf])
    out = top_n_sigma.apply(logits, row, nothing)
    assert out[1] == 3.0 and (np.isfinite(np.asarray(out)).sum() == (3 if value == 0 else 2))
