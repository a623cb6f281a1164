"""Adapters of models besides Llama: trainers' names of modules, and logits of merged models."""

from typing import Any

import pytest

from jaxrunner import LLM, LoRARequest
from jaxrunner.hf_config import Settings, read_json
from jaxrunner.lora.module_names import by_names_of_model
from jaxrunner.lora.products import module_shapes
from jaxrunner.models.registry import read_model
from tests.support import lora
from tests.support.lora_families import SIZES, SOURCES, answers, check_logits, saved, tokens

transformers = pytest.importorskip("transformers", reason="the reference needs transformers")

CONFIG: dict[str, Any] = dict(peft_type="LORA", r=3, lora_alpha=14)
OF_TOWERS = "vision", "visual", "multi_modal"
NOT_SERVED = ("feed_forward.router",)
ALL = [(kind, name) for kind, of in SOURCES.items() for name in of.VARIANTS]


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


SERVED = {
    "a tower, other names": ("dense", "gemma 3, beside a tower"),
    "fused qkv": ("dense", "phi 3"),
    "parallel blocks, fused qkv": ("dense", "pythia"),
    "inputs first": ("dense", "gpt 2"),
    "a mixture with a gate": ("mixture", "qwen2"),
    "latents": ("mixture", "deepseek v3"),
    "states, a mixture with a gate": ("hybrid", "qwen 3.5, experts"),
}


@pytest.mark.slow
@pytest.mark.parametrize("of", SERVED)
def test_logits_are_those_of_merged_models(of, tmp_path):
    module = saved(*SERVED[of], tmp_path)
    tensors = lora.of_module(module, 1, without=NOT_SERVED)
    adapter = LoRARequest("made", 1, lora_tensors=tensors, lora_config=CONFIG)
    with LLM(tmp_path, **SIZES) as llm:
        base, told = answers(llm, None), answers(llm, adapter)
        pairs = zip(base, told, strict=True)
        assert all(abs(one.logits - other.logits).max() > 0.1 for one, other in pairs)
        llm.merge_lora(1)
        merged = answers(llm, None)
    check_logits(module, base)
    assert tokens(merged) == tokens(told)
    lora.merge_into(module, tensors, CONFIG)
    check_logits(module, told)


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
    check_logits(module, told)
