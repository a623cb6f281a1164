"""Dense families against transformers: tokens, logits, chunks, cached prefixes, shards."""

from typing import Any

import numpy as np
import pytest

from jaxrunner import LLM, SamplingParams, check
from tests.support import dense_families
from tests.support.checkpoints import NEEDS_TORCH

LENGTHS = (1, 2, 3, 5, 7, 8, 9, 13, 14, 15, 16, 33, 35, 40, 51, 60)
PROMPTS = [np.random.default_rng(n).integers(0, 61, n).tolist() for n in LENGTHS]
LONG = {"gemma 2": 64, "command r7b": 64}  # new tokens of a request; of others 16
SIZES: dict[str, Any] = dict(
    skip_tokenizer_init=True, dtype="float32", max_model_len=128, block_size=8, num_blocks=400,
    max_num_seqs=16, max_num_batched_tokens=64, token_buckets=(64,), decode_buckets=(16,),
    warm_up=False,
)  # fmt: skip


def generate(llm: LLM, num_tokens: int) -> list[Any]:
    prompts = [dict(prompt_token_ids=ids) for ids in PROMPTS]
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    return llm.generate(prompts, params, use_tqdm=False)


def tokens(outputs: list[Any]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.mark.parametrize("variant", dense_families.VARIANTS)
def test_tokens_and_logits_are_those_of_transformers(variant, tmp_path):
    pytest.importorskip("torch", reason=NEEDS_TORCH)
    module = dense_families.save(variant, tmp_path)
    with LLM(tmp_path, **SIZES) as llm:  # 318 tokens of prompts, in chunks of 64 and less
        first = tokens(generate(llm, LONG.get(variant, 16)))
        again = generate(llm, LONG.get(variant, 16))  # most of each prompt is cached
    assert tokens(again) == first and again[-1].num_cached_tokens >= 40
    # Each token is the likeliest one after those before it: by induction, what generate gives.
    texts = [prompt + new for prompt, new in zip(PROMPTS, first, strict=True)]
    # LongRoPE turns short sequences otherwise: transformers asks for the longest of a batch.
    halves = [text for text in texts if len(text) <= 32], [text for text in texts if len(text) > 32]
    want = [logits for half in halves if half for logits in dense_families.logits(module, half)]
    for prompt, new, logits in zip(PROMPTS, first, want, strict=True):
        assert new == logits[len(prompt) - 1 : -1].argmax(-1).tolist()
    (exact,) = dense_families.logits(module.double(), PROMPTS[-1:])
    (got,) = check.ours(tmp_path, PROMPTS[-1:], None)
    np.testing.assert_allclose(got.logits, exact, atol=1e-4)
