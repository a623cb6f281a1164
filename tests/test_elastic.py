"""The devices of whole experts, changed while requests run."""

from typing import Any

import jax
import numpy as np
import pytest

from jaxrunner import LLM, SamplingParams
from jaxrunner.program.program import Program

pytest.importorskip("torch", reason="the checkpoints need PyTorch: install the hf extra")
pytest.importorskip("transformers", reason="the checkpoints need transformers")

PROMPTS = [np.random.default_rng(n).integers(1, 62, n).tolist() for n in (1, 5, 17, 40)]
SIZES: dict[str, Any] = dict(
    max_num_batched_tokens=64, max_num_seqs=8, max_model_len=128, block_size=8, num_blocks=200,
    token_buckets=(64,), decode_buckets=(8,), skip_tokenizer_init=True, warm_up=False,
    cache_dir=None, use_tqdm=False,
)  # fmt: skip
ON_TWO: dict[str, Any] = dict(
    tensor_parallel_size=2, enable_expert_parallel=True, enable_return_routed_experts=True,
    enable_eplb=True, eplb_config=dict(window_size=4, step_interval=4, num_redundant_experts=2),
)  # fmt: skip
ON_RANKS: dict[str, Any] = ON_TWO | dict(tensor_parallel_size=1, data_parallel_size=2)
PARAMS = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True, detokenize=False, logprobs=1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Returns a mixture that two and four devices can cut, of fewer KV heads than four."""
    import torch
    import transformers

    from tests.support import mixtures

    torch.manual_seed(0)
    changes = mixtures.FEW | dict(num_attention_heads=8, vocab_size=64)
    sizes: dict[str, Any] = mixtures.BASE | changes
    config = transformers.Qwen3MoeConfig(**sizes)
    made = transformers.Qwen3MoeForCausalLM(config)
    for name, weight in made.named_parameters():
        middle, spread = (1.0, 0.2) if "norm" in name else (0.0, 0.3)
        torch.nn.init.normal_(weight.data, middle, spread)
    made.save_pretrained(path := tmp_path_factory.mktemp("mixture"))
    return str(path)


@pytest.mark.slow
@pytest.mark.skipif(len(jax.devices()) < 4, reason="wants four devices")
def test_requests_go_on_with_their_tokens_on_other_devices(folder):
    """Twice while a stream is told: to more devices, and back. Prefixes are still cached."""
    prompts = [dict(prompt_token_ids=p) for p in PROMPTS]
    with LLM(folder, **SIZES) as one:
        want = [list(o.outputs[0].token_ids) for o in one.generate(prompts, PARAMS, use_tqdm=False)]
    with LLM(folder, **SIZES, **ON_TWO) as llm:
        got: list[list[int]] = [[] for _ in PROMPTS]
        logprobs = 0
        for i, out in enumerate(llm.stream(prompts, PARAMS)):
            told = out.outputs[0]
            got[int(out.request_id)] += told.token_ids
            logprobs += len(told.logprobs or ())
            if i in (5, 25):
                llm.scale_elastic_ep(num := 4 if i == 5 else 2)
                down = llm.params.layers[0].experts.down
                assert {s.data.shape[0] for s in down.addressable_shards} == {8 // num}
        assert got == want and logprobs == 12 * len(PROMPTS)
        (again,) = llm.generate(prompts[3:], PARAMS, use_tqdm=False)
        assert again.num_cached_tokens >= 32 and again.outputs[0].token_ids == want[3]
        with pytest.raises(ValueError, match="tensor_parallel_size=3 does not divide"):
            llm.scale_elastic_ep(3)
        (again,) = llm.generate(prompts[:1], PARAMS, use_tqdm=False)
        assert again.outputs[0].token_ids == want[0]


@pytest.mark.slow
@pytest.mark.devices(4)
def test_requests_go_on_with_their_tokens_on_other_ranks(folder):
    """On more ranks, on one, and on ranks of two devices; more requests wait than have slots."""
    prompts = [dict(prompt_token_ids=p) for p in PROMPTS * 3]
    sizes_after = {5: (1, 4), 25: (2, 1), 60: (None, 2)}
    with LLM(folder, **SIZES) as one:
        want = [list(o.outputs[0].token_ids) for o in one.generate(prompts, PARAMS, use_tqdm=False)]
    with LLM(folder, **SIZES, **ON_RANKS) as llm:
        got: list[list[int]] = [[] for _ in prompts]
        for i, out in enumerate(llm.stream(prompts, PARAMS)):
            got[int(out.request_id)] += out.outputs[0].token_ids
            if i in sizes_after:
                tensor, data = sizes_after[i]
                llm.scale_elastic_ep(tensor, data)
                assert llm.engine.runner.program.num_ranks == data
                devices = [len(x.sharding.device_set) for x in jax.tree.leaves(llm.params)]
                assert set(devices) == {data * (tensor or 2)}
        assert got == want


@pytest.mark.devices(2)
def test_devices_that_are_not_there_are_refused(folder, monkeypatch):
    with LLM(folder, **SIZES, **ON_TWO) as llm:
        with pytest.raises(ValueError, match="new_data_parallel_size=1 are 1 devices, take 2 to"):
            llm.scale_elastic_ep(1)
        with pytest.raises(ValueError, match=r"are 198 devices, take 2 to the \d+ that there are"):
            llm.scale_elastic_ep(new_data_parallel_size=99)
        monkeypatch.setattr(Program, "is_shared", True)
        with pytest.raises(ValueError, match="moves an LLM of one process and this one is of 1"):
            llm.scale_elastic_ep(new_data_parallel_size=2)


def test_engines_of_another_kind_are_refused(folder):
    with LLM(folder, **SIZES) as llm:
        words = "scale_elastic_ep moves one engine with enable_expert_parallel=True over several"
        with pytest.raises(ValueError, match=words):
            llm.scale_elastic_ep(2)
