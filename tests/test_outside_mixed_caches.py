"""States, latents, windows and keys of all tokens in one model: tokens are those without caches."""

from typing import Any

import pytest

from jaxrunner import register_model
from jaxrunner.check import compare
from tests.outside import checkpoint
from tests.outside.mixed_caches import mixed_caches

NAME = "MixedCachesForCausalLM"
SETTINGS: dict[str, Any] = checkpoint.LLAMA | dict(
    architectures=[NAME], num_hidden_layers=4, head_dim=4, num_key_value_heads=6, kv_lora_rank=12,
    q_lora_rank=0, qk_rope_head_dim=4, qk_nope_head_dim=6, v_head_dim=10, n_routed_experts=2,
    num_experts_per_tok=1, moe_intermediate_size=8, n_shared_experts=0, first_k_dense_replace=4,
)  # fmt: skip
LENGTHS, COUNT, LONGEST = (3, 26, 9, 15, 30), 12, 42
PROMPTS = checkpoint.prompts(*LENGTHS)
OF_PREFIXES: dict[str, Any] = dict(enable_prefix_caching=True, mamba_block_size=8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    register_model(NAME, mixed_caches)
    folder = tmp_path_factory.mktemp("mixed")
    checkpoint.write(folder, mixed_caches, SETTINGS)
    return folder


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param(OF_PREFIXES, id="prefixes"),
        pytest.param({}, id="no prefixes", marks=pytest.mark.slow),
        pytest.param(dict(num_decode_steps=4), id="several steps", marks=pytest.mark.slow),
    ],
)
def test_tokens_are_those_of_whole_texts_without_caches(folder, changes):
    """In chunks, beside others, after preemptions, and from prefixes that all four kinds have."""
    asked = [{"prompt_token_ids": ids} for ids in PROMPTS]
    with checkpoint.start(folder, num_blocks=14, **changes) as llm:
        assert len(llm.engine.runner.program.cache_groups) == 4
        told = checkpoint.answers(llm, PROMPTS, checkpoint.greedy(COUNT))
        assert llm.engine.scheduler.num_preemptions
        again = llm.generate(asked[::-1], checkpoint.greedy(COUNT), use_tqdm=False)[::-1]
    assert [list(output.outputs[0].token_ids) for output in again] == told
    assert any(output.num_cached_tokens for output in again) == (changes == OF_PREFIXES)
    texts = [(p + new + [0] * LONGEST)[:LONGEST] for p, new in zip(PROMPTS, told, strict=True)]
    for length, tokens, found in zip(LENGTHS, told, compare.ours(folder, texts, None), strict=True):
        assert tokens == found.logits[length - 1 :][:COUNT].argmax(-1).tolist()
