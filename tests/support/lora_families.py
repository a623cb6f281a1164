"""Checkpoints of families that adapters are tried on, and what an `LLM` answers with one."""

import importlib
from typing import Any, NamedTuple

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


NEAR = 1e-4  # of logits in float32


class Answer(NamedTuple):
    """The tokens after a prompt, and the logits of each, [tokens, V]."""

    prompt: list[int]
    tokens: list[int]
    logits: np.ndarray


def saved(kind: str, variant: str, folder: Any) -> Any:
    """Writes the checkpoint of a variant; returns its module of transformers."""
    if kind == "mixture":
        module = mixtures.model(variant)
        module.save_pretrained(folder)
        return module
    if kind == "tower":
        return hybrids.save_beside_tower("Qwen3_5", variant, folder)
    return SOURCES[kind].save(variant, folder)


def answers(llm: LLM, adapters: LoRARequest | list[LoRARequest | None] | None) -> list[Answer]:
    """Returns what prompts are answered with: one adapter is of all, several are of one each."""
    params = SamplingParams(
        temperature=0.0, max_tokens=8, ignore_eos=True, detokenize=False, logprobs=-1
    )
    asked = [dict(prompt_token_ids=ids) for ids in PROMPTS]
    outputs = llm.generate(asked, params, lora_request=adapters, use_tqdm=False)
    assert not [output.error for output in outputs if output.error]
    told: list[Any] = [output.outputs[0] for output in outputs]
    rows = [[[one[i].logprob for i in range(len(one))] for one in of.logprobs] for of in told]
    return [
        Answer(prompt, list(of.token_ids), np.array(own))
        for prompt, of, own in zip(PROMPTS, told, rows, strict=True)
    ]


def tokens(told: list[Answer]) -> list[list[int]]:
    """Returns the tokens of each answer."""
    return [answer.tokens for answer in told]


def check_logits(module: Any, told: list[Answer]) -> None:
    """Holds greedy tokens and the logits of all tokens against a module of transformers."""
    for prompt, output, got in told:
        with torch.no_grad():
            logits = module(torch.tensor([[*prompt, *output[:-1]]]), use_cache=False).logits[0]
        rows = logits.float().numpy()[len(prompt) - 1 :]
        np.testing.assert_allclose(got, rows, rtol=0, atol=NEAR)
        assert (rows[range(len(output)), output] >= rows.max(1) - NEAR).all()
