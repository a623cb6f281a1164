"""Adapters that PEFT makes, saves and merges: logits and scores are PEFT's own."""

import copy
from typing import Any

import numpy as np
import pytest

from jaxrunner import LLM, LoRARequest, PoolingParams
from tests.support import pooling
from tests.support.lora_families import SIZES, answers, check_logits, saved, tokens

peft = pytest.importorskip("peft", reason="the reference needs PEFT: install the hf extra")
torch = pytest.importorskip("torch", reason="PEFT needs PyTorch: install the hf extra")
pytestmark = pytest.mark.filterwarnings(
    "ignore::FutureWarning:peft", "ignore::FutureWarning:transformers", "ignore::UserWarning:peft"
)
MIXED: dict[str, dict[str, Any]] = {
    "all products": dict(target_modules="all-linear"),
    "a list, rsLoRA": dict(target_modules=["q_proj", "v_proj", "o_proj"], r=7, use_rslora=True),
    "a regular expression, patterns, rsLoRA": dict(
        target_modules=r".*layers\.\d\.(mlp|self_attn)\.(up|down|q|v)_proj", use_rslora=True,
        rank_pattern={r"layers\.1\.mlp\.up_proj": 5, "q_proj": 2},
        alpha_pattern={"down_proj": 30, r"^model.layers.0.self_attn.v_proj": 3}),
}  # fmt: skip
KINDS: dict[str, tuple[tuple[str, str], dict[str, Any]]] = {
    "a tower": (("dense", "gemma 3, beside a tower"), dict(target_modules="all-linear")),
    "inputs first": (("dense", "gpt 2"), dict(
        target_modules=["c_attn", "c_proj", "c_fc"], fan_in_fan_out=True)),
    "another embedding and head": (("dense", "command r"), dict(
        target_modules=["q_proj", "down_proj"], modules_to_save=["embed_tokens", "lm_head"])),
    "another head of tied weights": (("dense", "smollm 3"), dict(
        target_modules=["q_proj", "down_proj"], modules_to_save=["lm_head"])),
    "another embedding that is the head": (("dense", "smollm 3"), dict(
        target_modules=["q_proj", "down_proj"], modules_to_save=["embed_tokens"],
        ensure_weight_tying=True)),
    "some layers of a mixture": (("mixture", "qwen2"), dict(
        target_modules=["q_proj", "o_proj", "shared_expert_gate"], layers_to_transform=[1])),
}  # fmt: skip


def adapter(module: Any, folder: Any, **told: Any) -> Any:
    """Saves an adapter of a module by PEFT; returns the module that PEFT merges it into."""
    config = peft.LoraConfig(**dict(r=4, lora_alpha=20, task_type="CAUSAL_LM") | told)
    adapted = peft.get_peft_model(copy.deepcopy(module), config).eval()
    torch.manual_seed(0)
    for name, weight in adapted.named_parameters():
        if "lora_" in name or "modules_to_save" in name:
            torch.nn.init.normal_(weight.data, 0.0, 0.15)
    adapted.save_pretrained(folder)
    return adapted.merge_and_unload()


def test_logits_of_a_mixed_batch_are_those_of_peft_merged(tmp_path):
    module = saved("dense", "smollm 3", tmp_path)
    merged = [adapter(module, tmp_path / kind, **told) for kind, told in MIXED.items()]
    requests = [LoRARequest(kind, i, tmp_path / kind) for i, kind in enumerate(MIXED, 1)]
    with LLM(tmp_path, **{**SIZES, "max_loras": 3}) as llm:
        got, base = answers(llm, [*requests]), answers(llm, None)
        others = answers(llm, [requests[1], requests[2], None])
    assert all(one != other for one, other in zip(tokens(got), tokens(base), strict=True))
    for of, told in zip([*merged, *merged[1:], module], [*got, *others], strict=True):
        check_logits(of, [told])


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_peft_merged(kind, tmp_path):
    of, told = KINDS[kind]
    module = saved(*of, tmp_path)
    merged = adapter(module, tmp_path / "peft", **told)
    request = LoRARequest("peft", 1, tmp_path / "peft")
    room = ["embed_tokens", "lm_head"] if "modules_to_save" in told else []
    with LLM(tmp_path, **SIZES, lora_modules_to_save=room) as llm:
        base, got = answers(llm, None), answers(llm, request)
    assert tokens(got) != tokens(base)
    check_logits(merged, got)
    check_logits(module, base)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "task", "sizes"),
    [
        ("Qwen3ForSequenceClassification", "SEQ_CLS", {}),
        ("BertForSequenceClassification", "SEQ_CLS", pooling.WHOLE),
        ("RobertaForSequenceClassification", "SEQ_CLS", pooling.WHOLE),
        ("BertForTokenClassification", "TOKEN_CLS", pooling.WHOLE),
    ],
    ids=["a decoder", "behind a pooler", "two layers", "each token"],
)
def test_scores_are_those_of_peft(name, task, sizes, tmp_path):
    """PEFT names the head in `modules_to_save` by itself."""
    module = pooling.save(tmp_path, name, num_labels=3)
    targets = ["q_proj", "down_proj"] if name.startswith("Qwen3") else ["query", "value"]
    merged = adapter(module, tmp_path / "peft", task_type=task, target_modules=targets)
    request, texts = LoRARequest("peft", 1, tmp_path / "peft"), pooling.prompts(pooling.PROMPTS)
    given: dict[str, Any] = dict(enable_lora=True, max_lora_rank=8) | sizes
    raw = PoolingParams(use_activation=False)
    with pooling.start(tmp_path, **given) as llm:
        base, got = llm.encode(texts, raw), llm.encode(texts, raw, lora_request=request)
    for ids, without, own in zip(pooling.PROMPTS, base, got, strict=True):
        want = pooling.scores(merged, ids)
        np.testing.assert_allclose(own.outputs.data, want, rtol=1e-5, atol=1e-5)
        assert np.abs(np.asarray(without.outputs.data) - want).max() > 0.01
