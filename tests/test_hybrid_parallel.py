"""Hybrids on fake devices of a CPU: tokens are those of one device, whichever has which states."""

import json
import shutil
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxrunner import LLM, LoRARequest, SamplingParams
from jaxrunner.loading.checkpoint import WHOLE
from jaxrunner.loading.weights import save_checkpoint
from tests.support import hybrids, lora

LENGTHS = (3, 5, 14, 33, 40, 40)
PROMPTS = [np.random.default_rng(n).integers(0, 61, n).tolist() for n in LENGTHS]
SIZES: dict[str, Any] = hybrids.LLM_SIZES | dict(num_blocks=32)
PREFIXES: dict[str, Any] = dict(
    enable_prefix_caching=True, mamba_block_size=8, num_state_checkpoints=8
)
DRAFTS: dict[str, Any] = dict(speculative_config=dict(method="ngram", num_speculative_tokens=2))
ONE_GROUP: dict[str, Any] = dict(mamba_n_groups=1)  # of all heads, which devices cannot share
MIXERS = ("in_proj", "in_proj_qkvz", "in_proj_ba", "in_proj_qkv", "in_proj_z", "out_proj")
EIGHT_HEADS: dict[str, Any] = dict(num_attention_heads=8, vocab_size=64)
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True),
    SamplingParams(temperature=0.9, seed=4, top_k=9, max_tokens=16, ignore_eos=True),
]


def generate(llm: LLM, **more: Any) -> list[list[int]]:
    """Returns the tokens of requests that crowd each other out, every other one sampled."""
    asked = [dict(prompt_token_ids=ids) for ids in PROMPTS]
    params = [PARAMS[i % 2] for i in range(len(asked))]
    outputs = llm.generate(asked, params, use_tqdm=False, **more)
    return [list(output.outputs[0].token_ids) for output in outputs]


def states(llm: LLM) -> list[tuple[int, ...]]:
    """Returns the shapes of a device's convolutions and matrices, of the first layer with some."""
    caches = jax.tree.leaves(llm.runner.state.kv, is_leaf=lambda x: hasattr(x, "conv"))
    found = next(cache for cache in caches if hasattr(cache, "conv"))
    kept = jax.tree.leaves((found.conv, found.recurrent))
    return [x.sharding.shard_shape(x.shape)[1:] for x in kept]


Case = tuple[str, dict[str, Any], int, list[tuple[int, ...]]]
# Variant, changes of its config, devices, and what one of them has of a convolution and a state.
CASES: dict[str, Case] = {
    "delta nets, one KV head, whole experts": (
        "qwen 3.5, experts", dict(num_key_value_heads=1), 2, [(3, 42), (3, 6, 10)],
    ),
    "one group": ("bamba", ONE_GROUP, 2, [(3, 116), (8, 12, 10)]),
    "one group of keys, weights of 8 bits": (
        "qwen 3 next", dict(linear_num_key_heads=1), 2, [(3, 52), (4, 6, 10)],
    ),
    "beside attention, 4 devices": (
        "falcon h1, normed before, biases", EIGHT_HEADS | dict(mamba_n_groups=4), 4,
        [(3, 40), (2, 10, 10)],
    ),
}  # fmt: skip
# These draft nothing: others have drafts of mixers of their kind.
WITHOUT = "one group of keys, weights of 8 bits", "beside attention, 4 devices"


@pytest.mark.devices("num")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("variant", "changes", "num", "of_device"),
    [pytest.param(*case, id=name) for name, case in CASES.items()],
)
def test_tokens_are_those_of_one_device(request, variant, changes, num, of_device, tmp_path):
    hybrids.save(variant, tmp_path, **changes)
    name = request.node.callspec.id
    weights, drafts = "fp8" if "8 bits" in name else None, {} if name in WITHOUT else DRAFTS
    with LLM(tmp_path, quantization=weights, **SIZES) as llm:
        want = generate(llm)
        assert llm.engine.scheduler.num_preemptions
    several: dict[str, Any] = dict(
        tensor_parallel_size=num, quantization=weights,
        enable_expert_parallel="whole experts" in name,
    )  # fmt: skip
    with LLM(tmp_path, **several, **SIZES | PREFIXES | drafts) as llm:
        assert generate(llm) == want
        assert generate(llm) == want  # from prefixes
        assert sum(request.num_cached_tokens for request in llm.generate(
            dict(prompt_token_ids=PROMPTS[-1]), PARAMS[0], use_tqdm=False)) == 32  # fmt: skip
        assert states(llm) == of_device


@pytest.mark.slow
@pytest.mark.devices(4)
@pytest.mark.parametrize(
    ("variant", "sizes", "of_device"),
    [
        (
            "nemotron h, latent experts, biases",
            dict(tensor_parallel_size=2, pipeline_parallel_size=2), [(3, 50), (3, 10, 10)],
        ),
        (
            "lfm 2", PREFIXES | DRAFTS | dict(data_parallel_size=2, tensor_parallel_size=2),
            [(2, 24)],
        ),
    ],
    ids=["stages of two devices", "two replicas of two devices"],
)  # fmt: skip
def test_stages_and_replicas_tell_the_tokens_of_one_device(variant, sizes, of_device, tmp_path):
    hybrids.save(variant, tmp_path)
    with LLM(tmp_path, **SIZES) as llm:
        want = generate(llm)
    with LLM(tmp_path, **SIZES | sizes) as llm:
        assert generate(llm) == want
        if "enable_prefix_caching" in sizes:
            assert generate(llm) == want  # from prefixes
        assert states(llm) == of_device


@pytest.mark.slow
@pytest.mark.devices(2)
def test_weights_and_states_of_a_mesh_are_read_by_one_device(tmp_path):
    """In the midst of requests: a snapshot holds states as one device has them."""
    hybrids.save("bamba", tmp_path / "saved")
    with LLM(tmp_path / "saved", **SIZES) as llm:
        want = generate(llm)
    with LLM(tmp_path / "saved", tensor_parallel_size=2, **SIZES) as llm:
        asked = [dict(prompt_token_ids=ids) for ids in PROMPTS]
        stream = llm.stream(asked, [PARAMS[i % 2] for i in range(len(asked))])
        told = [next(stream) for _ in range(9)]
        llm.save_state(tmp_path / "state")
        program, params = llm.engine.runner.program, llm.engine.runner.params
        settings = json.loads((tmp_path / "saved" / "config.json").read_text())
        save_checkpoint(tmp_path / "again", program.model, program.config, params, settings)
    with LLM(tmp_path / "again", **SIZES) as llm:
        assert generate(llm) == want
        told += llm.restore_state(tmp_path / "state")
    found = [[] for _ in PROMPTS]
    for output in told:
        found[int(output.request_id)] += output.outputs[0].token_ids
    assert found == want


@pytest.mark.devices(4)
def test_mixers_that_devices_cannot_share_are_refused(tmp_path):
    changes = EIGHT_HEADS | dict(mamba_n_heads=6, mamba_d_head=5, mamba_d_ssm=30)
    hybrids.save("falcon h1", tmp_path, **changes)
    with pytest.raises(ValueError, match=r"the width of its mixers=30, .*: take one of 1, 2$"):
        LLM(tmp_path, tensor_parallel_size=4, **SIZES)


@pytest.mark.devices(2)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("variant", "changes"),
    [("bamba", ONE_GROUP), ("qwen 3 next", {})],
    ids=str,
)
def test_adapters_of_mixers_are_those_of_merged_weights(variant, changes, tmp_path):
    hybrids.save(variant, tmp_path / "base", **changes)
    base = load_file(tmp_path / "base" / WHOLE)
    modules = [name.removesuffix(".weight").split(".")[-1] for name in base if ".layers.0." in name]
    targets = [name for name in modules if name in MIXERS]
    tensors, told = lora.make(base, 3, targets=targets)
    lora.write(tmp_path / "adapter", tensors, told)
    shutil.copytree(tmp_path / "base", tmp_path / "merged")
    changed = {k: v.astype(np.float32) for k, v in lora.merge(base, tensors, told).items()}
    save_file(changed, str(tmp_path / "merged" / WHOLE))
    with LLM(tmp_path / "merged", **SIZES) as llm:
        want = generate(llm)
    adapted: dict[str, Any] = dict(enable_lora=True, max_lora_rank=8, max_loras=2)
    with LLM(tmp_path / "base", tensor_parallel_size=2, **SIZES | adapted) as llm:
        adapter = LoRARequest("one", 1, str(tmp_path / "adapter"))
        given = [adapter, None, adapter, adapter, None, adapter]
        got = generate(llm, lora_request=given)
    for one, tokens, merged in zip(given, got, want, strict=True):
        assert (tokens == merged) == (one is adapter)
