"""Adapters of models besides Llama: trainers' names of modules, and tokens of merged models."""

import importlib
from typing import Any

import numpy as np
import pytest

from jaxrunner import LLM, LoRARequest, SamplingParams
from jaxrunner.hf_config import Settings, read_json
from jaxrunner.lora.module_names import by_names_of_model
from jaxrunner.lora.products import module_shapes
from jaxrunner.models.registry import read_model
from tests.support import dense_families, hybrids, lora

torch = pytest.importorskip("torch", reason="the reference needs PyTorch: install the hf extra")
transformers = pytest.importorskip("transformers", reason="the reference needs transformers")
mixtures: Any = importlib.import_module("tests.support.mixtures")

SIZES: dict[str, Any] = dict(
    skip_tokenizer_init=True, dtype="float32", max_model_len=48, block_size=4, num_blocks=64,
    max_num_seqs=3, max_num_batched_tokens=16, token_buckets=(16,), decode_buckets=(3,),
    warm_up=False, cache_dir=None, enable_lora=True, max_loras=2, max_lora_rank=8,
    logprobs_mode="raw_logits",
)  # fmt: skip
PROMPTS = [np.random.default_rng(n).integers(0, 61, n).tolist() for n in (11, 5, 8)]
CONFIG: dict[str, Any] = dict(peft_type="LORA", r=3, lora_alpha=14)
OF_TOWERS = "vision", "visual", "multi_modal"
NOT_SERVED = ("feed_forward.router",)
SOURCES: dict[str, Any] = dict(dense=dense_families, mixture=mixtures, hybrid=hybrids)
ALL = [(kind, name) for kind, of in SOURCES.items() for name in of.VARIANTS]


def saved(kind: str, variant: str, folder: Any) -> Any:
    """Writes the checkpoint of a variant; returns its module of transformers."""
    if kind == "mixture":
        module = mixtures.model(variant)
        module.save_pretrained(folder)
        return module
    if kind == "tower":
        return hybrids.save_beside_tower("Qwen3_5", variant, folder)
    return SOURCES[kind].save(variant, folder)


def known_of(folder: Any) -> tuple[set[str], tuple[str, ...]]:
    model, config = read_model(Settings(read_json(folder / "config.json")))
    return set(module_shapes(model, config)), model.spare


@pytest.mark.parametrize("kind, variant", [*ALL, ("tower", "qwen 3.5")])
def test_all_that_trainers_adapt_has_a_place(kind, variant, tmp_path):
    """Names of PEFT's "all-linear" are those of the model, but for a tower's."""
    module = saved(kind, variant, tmp_path)
    names = {name: name for name in lora.linears(module) if not name.endswith(NOT_SERVED)}
    known, spare = known_of(tmp_path)
    found = by_names_of_model(names, known, spare)
    assert known == found.keys()
    towers = {name for name in names if any(part in name for part in OF_TOWERS)}
    assert set(found.values()) == names.keys() - towers


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


SERVED = {
    "a tower, other names": ("dense", "gemma 3, beside a tower"),
    "fused qkv": ("dense", "phi 3"),
    "parallel blocks, fused qkv": ("dense", "pythia"),
    "inputs first": ("dense", "gpt 2"),
    "a mixture with a gate": ("mixture", "qwen2"),
    "latents": ("mixture", "deepseek v3"),
    "states, a mixture with a gate": ("hybrid", "qwen 3.5, experts"),
}
QUICK = ("a tower, other names",)


@pytest.mark.parametrize(
    "of", [pytest.param(of, marks=[pytest.mark.slow] * (of not in QUICK)) for of in SERVED]
)
def test_tokens_are_those_of_merged_models(of, tmp_path):
    module = saved(*SERVED[of], tmp_path)
    tensors = lora.of_module(module, 1, without=NOT_SERVED)
    adapter = LoRARequest("made", 1, lora_tensors=tensors, lora_config=CONFIG)
    with LLM(tmp_path, **SIZES) as llm:
        base, told = answers(llm, None), answers(llm, adapter)
        assert all(one != other for one, other in zip(base, told, strict=True))
        llm.merge_lora(1)
        merged = answers(llm, None)
    check_likeliest(module, base)
    assert tokens(merged) == tokens(told)
    lora.merge_into(module, tensors, CONFIG)
    check_likeliest(module, told)


@pytest.mark.slow
@pytest.mark.devices(4)
def test_adapters_of_latents_go_with_stages_of_two_devices(tmp_path):
    module = saved("mixture", "deepseek v3", tmp_path)
    tensors = lora.of_module(module, 1)
    adapter = LoRARequest("made", 1, lora_tensors=tensors, lora_config=CONFIG)
    cut: dict[str, Any] = dict(tensor_parallel_size=2, pipeline_parallel_size=2)
    with LLM(tmp_path, **SIZES | cut) as llm:
        told = answers(llm, adapter)
    lora.merge_into(module, tensors, CONFIG)
    check_likeliest(module, told)
