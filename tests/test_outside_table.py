"""A model's slot table that is no part of the package: each request's tokens are scaled its way."""

import functools
from typing import Any

import numpy as np

from jaxrunner import SamplingParams, register_model
from tests.outside import checkpoint, float64_llama
from tests.outside.scaled_tokens import scaled

NAME = "ScaledForCausalLM"
SETTINGS: dict[str, Any] = checkpoint.LLAMA | dict(architectures=[NAME])
SCALES = [{}, {"even": 0.5}, {"even": 2.0, "odd": -1.0}, {"odd": 3.0}, {"even": 0.5}]
BLOCK = checkpoint.SIZES["block_size"]


def _scaled(factors: np.ndarray, x: np.ndarray, layer: int) -> np.ndarray:
    return x * np.tile(factors, x.shape[1] // 2) if layer == 0 else x


def expected(tensors, prompt: list[int], given: dict[str, float]) -> list[int]:
    before = functools.partial(_scaled, np.array([given.get("even", 1), given.get("odd", 1)]))
    of = functools.partial(float64_llama.logits, tensors, SETTINGS, before_layer=before)
    return float64_llama.greedy(of, prompt, 9)


def test_each_request_has_its_row_and_shares_keys_with_its_like_alone(tmp_path):
    register_model(NAME, scaled)
    tensors = checkpoint.write(tmp_path, scaled, SETTINGS)
    [prompt] = checkpoint.prompts(17)
    want = [expected(tensors, prompt, given) for given in SCALES]
    params = [checkpoint.greedy(9, extra_args=given or None) for given in SCALES]
    with checkpoint.start(tmp_path, num_blocks=16) as llm:
        assert checkpoint.answers(llm, [prompt] * 5, params) == want
        assert llm.engine.scheduler.num_preemptions
        llm.reset_prefix_cache()
        found = []
        for given in [*SCALES[:2], *SCALES[1:4], {"odd": 3.0, "even": 1.0}]:
            asked = checkpoint.greedy(9, extra_args=given or None)
            [output] = llm.generate({"prompt_token_ids": prompt}, asked, use_tqdm=False)
            assert list(output.outputs[0].token_ids) == expected(tensors, prompt, given)
            found.append(output.num_cached_tokens)
        assert found[2] >= len(prompt) // BLOCK * BLOCK and not any(found[:2] + found[3:])
        [output] = llm.generate(
            {"prompt_token_ids": prompt}, SamplingParams(extra_args={"size": 1.0}), use_tqdm=False
        )
        assert (
            output.error
            and "extra_args has 'size', this engine's rules read ['even', 'odd']" in output.error
        )
    assert len({tuple(tokens) for tokens in want}) == 4
