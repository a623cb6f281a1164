"""States over prompts of 2,000 tokens: what a prompt is cut into changes no greedy token, and
matrices in half the bytes change logprobs within a bound."""

from typing import Any

import numpy as np
import pytest

from jaxrunner import LLM, SamplingParams
from tests.support import hybrids

PROMPTS = [np.random.default_rng(n).integers(0, 61, n).tolist() for n in (2000, 1999, 1537)]
CHUNKS = 64, 2048
# Of float32 logprobs, between both lengths of chunks and beside transformers in float64.
TOLERANCE = 5e-4
# Of logprobs behind states in bfloat16, over prompts of 200 tokens.
OF_BFLOAT16 = 0.04


def generate(
    folder: Any, chunk: int, prompts: list[list[int]] = PROMPTS, **changes: Any
) -> tuple[list[list[int]], list[np.ndarray]]:
    """Returns greedy tokens, and the logprobs of each prompt, computed `chunk` tokens a step."""
    params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True, prompt_logprobs=0)
    sizes: dict[str, Any] = dict(
        skip_tokenizer_init=True, dtype="float32", max_model_len=2048, block_size=64,
        num_blocks=100, max_num_seqs=3, max_num_batched_tokens=chunk, token_buckets=(chunk,),
        decode_buckets=(3,), warm_up=False, cache_dir=None,
    )  # fmt: skip
    with LLM(folder, **sizes | changes) as llm:
        asked = [dict(prompt_token_ids=ids) for ids in prompts]
        outputs = llm.generate(asked, params, use_tqdm=False)
    told: Any = [output.prompt_logprobs for output in outputs]
    logprobs = [
        np.array([at[token].logprob for at, token in zip(found[1:], ids[1:], strict=True)])
        for found, ids in zip(told, prompts, strict=True)
    ]
    return [list(output.outputs[0].token_ids) for output in outputs], logprobs


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["nemotron h", "qwen 3 next", "lfm 2", "granite 4"])
def test_chunks_of_a_long_prompt_change_no_greedy_token(variant, tmp_path):
    module = hybrids.save(variant, tmp_path, max_position_embeddings=2048).double()
    (tokens, logprobs), (others, told) = (generate(tmp_path, chunk) for chunk in CHUNKS)
    assert others == tokens
    for got, want in zip(told, logprobs, strict=True):
        np.testing.assert_allclose(got, want, atol=TOLERANCE)
    logits = hybrids.logits(module, PROMPTS[0] + tokens[0])
    assert tokens[0] == logits[len(PROMPTS[0]) - 1 : -1].argmax(-1).tolist()
    shifted = logits - logits.max(-1, keepdims=True)
    exact = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    wanted = exact[np.arange(len(PROMPTS[0]) - 1), PROMPTS[0][1:]]
    np.testing.assert_allclose(logprobs[0], wanted, atol=TOLERANCE)


@pytest.mark.parametrize(
    "variant", ["granite 4", pytest.param("qwen 3 next", marks=pytest.mark.slow)]
)
def test_states_in_bfloat16_are_near_those_in_float32(variant, tmp_path):
    hybrids.save(variant, tmp_path, max_position_embeddings=256)
    prompts = [ids[:200] for ids in PROMPTS]
    halved = dict(hf_overrides=dict(mamba_ssm_cache_dtype="bfloat16"))
    sizes: dict[str, Any] = dict(max_model_len=256)
    (_, want), (_, got) = (generate(tmp_path, 64, prompts, **sizes, **c) for c in ({}, halved))
    apart = np.abs(np.array(got) - want).max()
    assert 1e-3 < apart < OF_BFLOAT16
