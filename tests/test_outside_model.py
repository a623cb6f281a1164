"""A model family that is no part of the package: GLM-4, against transformers."""

from typing import Any

import pytest

from jaxrunner import register_model
from jaxrunner.models.llama import llama
from tests.outside import checkpoint
from tests.outside.glm4 import glm4

torch = pytest.importorskip("torch", reason="the reference is of transformers")
transformers = pytest.importorskip("transformers", reason="the reference is transformers")

ROPE = dict(rope_type="default", rope_theta=10000.0, partial_rotary_factor=0.5)
SETTINGS: dict[str, Any] = checkpoint.LLAMA | dict(
    architectures=["OutsideForCausalLM"], rope_parameters=ROPE, attention_bias=True
)


def reference(tensors):
    """Returns the model of transformers with these weights."""
    values = {k: v for k, v in SETTINGS.items() if k not in ("architectures", "dtype")}
    none = dict(bos_token_id=None, eos_token_id=SETTINGS["vocab_size"], pad_token_id=0)
    model = transformers.Glm4ForCausalLM(transformers.Glm4Config(**values | none)).eval()
    model.load_state_dict({name: torch.tensor(tensor) for name, tensor in tensors.items()})
    return model


def generated(model, prompt: list[int], count: int) -> list[int]:
    ids = torch.tensor([prompt])
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False
    )
    return out[0, len(prompt) :].tolist()


def test_a_family_of_others_answers_as_transformers_does(tmp_path):
    """In chunks of 8 tokens, with prompts that begin alike, and too few blocks for all."""
    register_model("OutsideForCausalLM", glm4)
    tensors = checkpoint.write(tmp_path, glm4, SETTINGS)
    prompts = checkpoint.prompts(3, 21, 9, 14, 2)
    prompts += [prompts[1][:13] + prompts[0], prompts[3]]
    model = reference(tensors)
    want = [generated(model, prompt, 14) for prompt in prompts]
    with checkpoint.start(tmp_path, num_blocks=14) as llm:
        assert checkpoint.answers(llm, prompts, checkpoint.greedy(14)) == want
        assert llm.engine.scheduler.num_preemptions
        again = llm.generate(
            {"prompt_token_ids": prompts[1]}, checkpoint.greedy(14), use_tqdm=False
        )
        assert list(again[0].outputs[0].token_ids) == want[1] and again[0].num_cached_tokens >= 12
        assert "OutsideForCausalLM" in repr(llm)
    assert len({tuple(tokens) for tokens in want}) >= 6


def test_an_architecture_has_one_model():
    register_model("OutsideForCausalLM", glm4)
    register_model("OutsideForCausalLM", glm4)
    with pytest.raises(ValueError, match="architecture 'OutsideForCausalLM' is served by another"):
        register_model("OutsideForCausalLM", llama)
    with pytest.raises(ValueError, match="'LlamaForCausalLM' is served by another"):
        register_model("LlamaForCausalLM", glm4)
