"""Batches of no adapter up to eight, hundreds on the host, and new weights beneath them."""

import functools
from typing import Any

import jax
import pytest

from jaxrunner import LoRARequest
from jaxrunner.models.llama import llama
from tests.outside import checkpoint, float64_llama
from tests.support import lora

SETTINGS: dict[str, Any] = checkpoint.LLAMA | dict(architectures=["LlamaForCausalLM"])
NUM = 8
PROMPTS = checkpoint.prompts(*range(3, 3 + NUM + 1))
SIZES: dict[str, Any] = dict(
    enable_lora=True, max_loras=NUM, max_lora_rank=8, max_num_seqs=NUM + 1,
    decode_buckets=(NUM + 1,), max_num_batched_tokens=32, token_buckets=(32,),
)  # fmt: skip


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder of a checkpoint, its tensors, and adapters of all ranks up to eight."""
    folder = tmp_path_factory.mktemp("lora")
    base = checkpoint.write(folder, llama, SETTINGS)
    made = {i: lora.make(base, i, rank=i) for i in range(1, NUM + 1)}
    return folder, base, made


@pytest.fixture(scope="module", params=[8, pytest.param(128, marks=pytest.mark.slow)])
def llm(saved, request):
    """Engines of few ranks and, where tokens are grouped by adapter, of many."""
    with checkpoint.start(saved[0], **SIZES | dict(max_lora_rank=request.param)) as llm:
        yield llm


@pytest.fixture(scope="module")
def requests(saved):
    """Of each adapter, and of none."""
    named = [
        LoRARequest(f"{i}", i, lora_tensors=of[0], lora_config=of[1]) for i, of in saved[2].items()
    ]
    return [*named, None]


def answers(llm, prompts, adapters) -> list[list[int]]:
    asked = [dict(prompt_token_ids=ids) for ids in prompts]
    outputs = llm.generate(asked, checkpoint.greedy(7), lora_request=adapters, use_tqdm=False)
    assert not [output.error for output in outputs if output.error]
    return [list(output.outputs[0].token_ids) for output in outputs]


def wanted(tensors, prompt) -> list[int]:
    of = functools.partial(float64_llama.logits, tensors, SETTINGS)
    return float64_llama.greedy(of, prompt, 7)


@pytest.fixture(scope="module")
def alone(llm, requests):
    return [answers(llm, [p], r)[0] for p, r in zip(PROMPTS, requests, strict=True)]


@pytest.mark.parametrize("num", range(NUM + 1))
def test_tokens_of_a_batch_of_adapters_are_those_of_each_alone(llm, requests, alone, num):
    """num: of adapters; all others of the batch have none."""
    mixed = [*requests[:num], *[None] * (NUM + 1 - num)]
    got = answers(llm, PROMPTS, mixed)
    assert got[:num] == alone[:num] and got[-1] == alone[-1]
    others = [answers(llm, [prompt], None)[0] for prompt in PROMPTS[num:]]
    assert got[num:] == others


def test_adapters_stay_beside_new_weights_of_the_model(llm, saved, requests, alone):
    _, base, made = saved
    old = llm.params
    llm.update_params(jax.tree.map(lambda x: x * 0.9, old))
    changed = {name: tensor * 0.9 for name, tensor in base.items()}
    tensors = [*(lora.merge(changed, *made[i]) for i in sorted(made)), changed]
    got = answers(llm, PROMPTS, requests)
    assert got == [wanted(*of) for of in zip(tensors, PROMPTS, strict=True)] != alone
    llm.update_params(old)
    assert answers(llm, PROMPTS, requests) == alone


def test_of_hundreds_on_the_host_the_one_needed_least_recently_gives_way(saved):
    folder, base, _ = saved
    made = {i: lora.make(base, i, rank=1 + i % 4, targets=["q_proj"]) for i in range(1, 201)}
    with checkpoint.start(folder, **{**SIZES, "max_loras": 2}) as llm:
        for i, of in made.items():
            assert llm.add_lora(LoRARequest(f"{i}", i, lora_tensors=of[0], lora_config=of[1]))
        assert llm.list_loras() == made.keys()
        adapters = llm.engine.runner.adapters
        assert adapters is not None
        for i, there in (7, {7}), (150, {7, 150}), (7, {7, 150}), (33, {7, 33}), (200, {33, 200}):
            got = answers(llm, PROMPTS[:1], LoRARequest(f"{i}", i))
            assert got == [wanted(lora.merge(base, *made[i]), PROMPTS[0])]
            assert {*adapters.places} - {0} == there
