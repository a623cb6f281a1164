"""Checkpoints of families that adapters are tried on, and what an `LLM` answers with one."""

import importlib
from typing import Any

import numpy as np
import pytest

from jaxrunner import LLM, LoRARequest, SamplingParams
from tests.support import dense_families, hybrids

torch = pytest.importorskip("torch", reason="the reference needs PyTorch: install the hf extra")
mixtures: Any = importlib.import_module("tests.support.mixtures")
SIZES: dict[str, Any] = dict(
    skip_tokenizer_init=True, dtype="float32", max_model_len=48, block_size=4, num_blocks=64,
    max_num_seqs=3, max_num_batched_tokens=16, token_buckets=(16,), decode_buckets=(3,),
    warm_up=False, cache_dir=None, enable_lora=True, max_loras=2, max_lora_rank=8,
    logprobs_mode="raw_logits",
)  # fmt: skip
PROMPTS = [np.random.default_rng(n).integers(0, 61, n).tolist() for n in (11, 5, 8)]
SOURCES: dict[str, Any] = dict(dense=dense_families, mixture=mixtures, hybrid=hybrids)


def saved(kind: str, variant: str, folder: Any) -> Any:
    """Writes the checkpoint of a variant; returns its module of transformers."""
    if kind == "mixture":
        module = mixtures.model(variant)
        module.save_pretrained(folder)
        return module
    if kind == "tower":
        return hybrids.save_beside_tower("Qwen3_5", variant, folder)
    return SOURCES[kind].save(variant, folder)


def answers(llm: LLM, adapter: LoRARequest | None) -> list[list[tuple[int, float]]]:
    """Returns the tokens of each answer with their logits, in order."""
    params = SamplingParams(
        temperature=0.0, max_tokens=8, ignore_eos=True, detokenize=False, logprobs=0
    )
    asked = [dict(prompt_token_ids=ids) for ids in PROMPTS]
    outputs = llm.generate(asked, params, lora_request=adapter, use_tqdm=False)
    assert not [output.error for output in outputs if output.error]
    told: list[Any] = [output.outputs[0] for output in outputs]
    return [
        [(token, one[token].logprob) for token, one in zip(of.token_ids, of.logprobs, strict=True)]
        for of in told
    ]


def tokens(told: list[list[tuple[int, float]]]) -> list[list[int]]:
    """Returns the tokens of each answer."""
    return [[token for token, _ in pairs] for pairs in told]


def check_likeliest(module: Any, told: list[list[tuple[int, float]]]) -> None:
    """Holds greedy tokens and their logits against a module of transformers."""
    for prompt, pairs in zip(PROMPTS, told, strict=True):
        output, got = [token for token, _ in pairs], np.array([logit for _, logit in pairs])
        with torch.no_grad():
            logits = module(torch.tensor([[*prompt, *output[:-1]]]), use_cache=False).logits[0]
        rows = logits.float().numpy()[len(prompt) - 1 :]
        near = 1e-3 * np.abs(rows).max()
        assert (rows[range(len(output)), output] >= rows.max(1) - near).all()
        np.testing.assert_allclose(got, rows[range(len(output)), output], rtol=0, atol=near)
