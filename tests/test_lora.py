"""Adapters of requests: tokens and logits are those of models that these are merged into."""

import functools
from typing import Any

import numpy as np
import pytest

from jaxrunner import LoRARequest
from jaxrunner.models.llama import llama
from tests.outside import checkpoint, float64_llama
from tests.support import lora

SETTINGS: dict[str, Any] = checkpoint.LLAMA | dict(architectures=["LlamaForCausalLM"])
KINDS: dict[str, dict[str, Any]] = {
    "all": dict(rank=3),
    "attention": dict(rank=8, targets=("q_proj", "v_proj")),
    "mlp of one rank": dict(rank=1, targets=("up_proj", "down_proj"), use_rslora=True),
    "patterns": dict(
        rank=4, targets=lora.ALL, use_rslora=True,
        rank_pattern={"k_proj": 2, r"layers\.1\.mlp\.gate_proj": 5},
        alpha_pattern={"down_proj": 3, "q_proj": 11},
    ),
}  # fmt: skip
PROMPTS = checkpoint.prompts(5, 11, 3, 7, 9)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder of a checkpoint with adapters in it, its tensors, and requests with the tokens that
    float64 gives of the merged models; the last one has no adapter."""
    folder = tmp_path_factory.mktemp("lora")
    base = checkpoint.write(folder, llama, SETTINGS)
    requests, want = [], []
    for i, (name, kind) in enumerate(KINDS.items(), 1):
        made = lora.make(base, i, **kind)
        requests.append(LoRARequest(name, i, lora.write(folder / name, *made)))
        want.append(tokens(lora.merge(base, *made), PROMPTS[i - 1]))
    return folder, base, [*requests, None], [*want, tokens(base, PROMPTS[-1])]


def tokens(tensors, prompt, count=9):
    of = functools.partial(float64_llama.logits, tensors, SETTINGS)
    return float64_llama.greedy(of, prompt, count)


@pytest.fixture(scope="module")
def llm(saved):
    sizes = dict(enable_lora=True, max_loras=3, max_lora_rank=8, max_num_seqs=3)
    with checkpoint.start(saved[0], **sizes, logprobs_mode="raw_logits") as llm:
        yield llm


def answers(llm, prompts, adapters, count=9):
    asked = [{"prompt_token_ids": ids} for ids in prompts]
    outputs = llm.generate(asked, checkpoint.greedy(count), lora_request=adapters, use_tqdm=False)
    assert not [o.error for o in outputs if o.error]
    return [list(output.outputs[0].token_ids) for output in outputs]


def test_tokens_of_a_mixed_batch_are_those_of_merged_models(llm, saved):
    _, _, requests, want = saved
    assert len({tuple(one) for one in want}) == len(want)
    assert answers(llm, PROMPTS, requests) == want
    for prompt, request, one in zip(PROMPTS, requests, want, strict=True):
        assert answers(llm, [prompt], request) == [one]


def test_logits_are_those_of_merged_models(llm, saved):
    folder, base, requests, _ = saved
    params = checkpoint.greedy(1, logprobs=-1)
    asked = [{"prompt_token_ids": ids} for ids in PROMPTS]
    outputs = llm.generate(asked, params, lora_request=requests, use_tqdm=False)
    for prompt, output, request, kind in zip(
        PROMPTS, outputs, requests, [*KINDS.values(), None], strict=True
    ):
        made = kind and lora.make(base, request.lora_int_id, **kind)
        tensors = lora.merge(base, *made) if made else base
        entry = output.outputs[0].logprobs[0]
        got = np.array([entry[t].logprob for t in range(SETTINGS["vocab_size"])])
        wanted = float64_llama.logits(tensors, SETTINGS, prompt)[-1]
        np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-4)
