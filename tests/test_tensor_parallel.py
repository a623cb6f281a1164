"""Models on shards, on fake devices of a CPU: tokens are those of one device."""

from pathlib import Path
from typing import Any, cast

import jax
import numpy as np
import pytest

from jaxrunner import LLM, SamplingParams, embedded
from jaxrunner.api.sampling_params import StructuredOutputsParams
from jaxrunner.engine.engine import Engine
from jaxrunner.loading.weights import load_params, save_checkpoint
from jaxrunner.models.llama import llama
from jaxrunner.parallel.drafter import shard_drafter
from jaxrunner.parallel.kv_heads import copy_heads, merge_heads
from jaxrunner.parallel.mesh import make_mesh
from jaxrunner.parallel.tensor import shard
from jaxrunner.speculators.drafter import DraftedConfig
from jaxrunner.speculators.eagle import eagle
from tests.support import tiny
from tests.support.drafters import with_eagle

SIZES: dict[str, Any] = dict(
    hidden_size=24, intermediate_size=32, num_attention_heads=8, vocab_size=64, head_dim=4
)
BIASES = dict(architectures=["LlamaForCausalLM"], attention_bias=True, mlp_bias=True)
KINDS: dict[str, dict[str, Any]] = {
    "few KV heads": SIZES | BIASES | dict(num_key_value_heads=2),
    "a KV head each": SIZES | dict(num_key_value_heads=8, tie_word_embeddings=True),
    "windows": SIZES
    | dict(
        architectures=["MistralForCausalLM"], model_type="mistral", sliding_window=6,
        num_key_value_heads=4,
    ),
}  # fmt: skip
PARAMS = [
    SamplingParams(temperature=0, max_tokens=14),
    SamplingParams(temperature=0.9, seed=4, max_tokens=14, top_k=9),
    SamplingParams(
        temperature=0.8, seed=7, max_tokens=12, logprobs=3, prompt_logprobs=1,
        repetition_penalty=1.2, logit_bias={5: 1.0},
    ),
]  # fmt: skip
LLM_SIZES: dict[str, Any] = dict(
    max_num_seqs=4, max_num_batched_tokens=64, token_buckets=(64,), decode_buckets=(4,),
    max_model_len=128, dtype="float32", warm_up=False, use_tqdm=False,
)  # fmt: skip
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
PROMPTS = ["import os\n", "class A:\n    def", "def f(x):"]


def answers(model, config, params, **sizes):
    """Returns tokens and logprobs of requests that crowd each other, and the engine."""
    e = Engine(model, config, tiny.engine_config(**sizes), params)
    prompts = [3, 1, 4, 1, 5, 9, 2, 6], [9, 2], list(range(1, 20)), [7] * 9
    requests = [e.add(f"{i}", prompt, PARAMS[i % len(PARAMS)]) for i, prompt in enumerate(prompts)]
    while e.has_unfinished:
        e.step()
    return [r.output_token_ids for r in requests], [r.logprobs for r in requests], e


@pytest.fixture(scope="module")
def saved(request, tmp_path_factory):
    """Returns a checkpoint folder, its config, and what one device answers."""
    config = tiny.config(**KINDS[request.param])
    folder = tmp_path_factory.mktemp("checkpoint")
    settings = tiny.SETTINGS | KINDS[request.param]
    save_checkpoint(folder, llama, config, tiny.random_params(config, seed=3), settings)
    params = load_params(folder, llama, config, dtype="float32", progress=False)
    return folder, config, answers(llama, config, params, num_blocks=24, num_decode_steps=2)


CUTS = [("few KV heads", 2), ("few KV heads", 8), ("a KV head each", 4), ("windows", 2)]


@pytest.mark.parametrize(("saved", "num"), CUTS, indirect=["saved"])
def test_tokens_are_those_of_one_device(saved, num):
    folder, config, (want, logprobs, _) = saved
    model, on_mesh = shard(llama, config, make_mesh(num))
    params = load_params(folder, model, on_mesh, dtype="float32", progress=False)
    assert {len(x.sharding.device_set) for x in jax.tree.leaves(params)} == {num}
    sizes: dict[str, Any] = dict(num_blocks=24, num_decode_steps=2)
    got, told, engine = answers(model, on_mesh, params, **sizes)
    assert got == want
    for ours, theirs in zip(jax.tree.leaves(told), jax.tree.leaves(logprobs), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-4)
    cache = engine.runner.state.kv[0].k
    heads = max(config.num_key_value_heads, num)
    assert cache.shape[1] == heads and cache.sharding.shard_shape(cache.shape)[1] == heads // num


@pytest.mark.parametrize("saved", ["few KV heads", "a KV head each"], indirect=True)
def test_weights_are_saved_as_they_were_read(saved, tmp_path):
    folder, config, _ = saved
    model, on_mesh = shard(llama, config, make_mesh(8))
    params = load_params(folder, model, on_mesh, dtype="float32", progress=False)
    save_checkpoint(tmp_path, model, on_mesh, params, {})
    one, other = (
        load_params(path, llama, config, dtype="float32", progress=False)
        for path in (folder, tmp_path)
    )
    jax.tree.map(np.testing.assert_array_equal, one, other)


def test_copied_heads_and_merged_ones_are_inverse():
    packed = np.arange(2 * 6 * 3 * 5).reshape(2, 6, 3, 5)  # 2 KV heads of 4 query heads each
    for num in (4, 8):
        copied = copy_heads(packed, num)
        assert copied.shape == (num, 8 // num + 2, 3, 5)
        np.testing.assert_array_equal(copied[num // 2, -1], packed[1, -1])
        np.testing.assert_array_equal(copied[1, 0], packed[0, 8 // num])
        np.testing.assert_array_equal(merge_heads(copied, 2), packed)


@pytest.fixture(scope="module")
def alone():
    """Returns what one device answers."""
    with LLM(str(embedded.PATH), **LLM_SIZES) as llm:
        return tokens(llm)


def tokens(llm: LLM) -> list[list[int]]:
    rules = [*PARAMS[:2], SamplingParams(
        temperature=0, max_tokens=24, structured_outputs=StructuredOutputsParams(json=SCHEMA)
    )]  # fmt: skip
    outputs = llm.generate(PROMPTS, rules, on_error="raise", use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.parametrize("drafts", [None, pytest.param("eagle3", marks=pytest.mark.slow)])
def test_an_llm_on_two_devices(alone, drafts):
    folder = embedded.EAGLE3_PATH if drafts == "eagle3" else embedded.PATH
    config = dict(method=drafts, model=str(folder), num_speculative_tokens=2)
    extra: dict[str, Any] = {} if drafts is None else dict(speculative_config=config)
    with LLM(str(embedded.PATH), tensor_parallel_size=2, **LLM_SIZES, **extra) as llm:
        assert tokens(llm) == alone
        if drafts:
            return
        llm.sleep(level=1)
        llm.wake_up()
        assert tokens(llm) == alone
        held = {x.sharding.num_devices for x in jax.tree.leaves(llm.engine.runner.params)}
        assert held == {2}


def test_a_plan_of_memory_is_that_of_a_device():
    sizes: dict[str, Any] = LLM_SIZES | dict(num_blocks=64)
    weights, kv = [], []
    for num in (1, 2):
        with LLM(str(embedded.PATH), tensor_parallel_size=num, **sizes) as llm:
            weights.append(llm.memory_plan.weights)
            kv.append(llm.memory_plan.kv)
    assert kv[0] == 2 * kv[1] and weights[1] < 0.51 * weights[0]


def test_a_snapshot_of_shards_goes_on(alone, tmp_path: Path):
    with LLM(str(embedded.PATH), tensor_parallel_size=2, **LLM_SIZES) as llm:
        parts = llm.stream(PROMPTS[:1], PARAMS[0])  # its end would abort the request
        next(parts)
        llm.save_state(tmp_path / "state")
    with LLM(str(embedded.PATH), tensor_parallel_size=2, **LLM_SIZES) as llm:
        *_, last = llm.restore_state(tmp_path / "state")
        assert last.finished and llm.engine.runner.state.kv[0].k.sharding.num_devices == 2
        assert last.outputs[0].token_ids == alone[0][-len(last.outputs[0].token_ids) :]


@pytest.mark.parametrize(
    "sizes,words",
    [
        (
            dict(tensor_parallel_size=3),
            r"tensor_parallel_size=3 does not divide .* take one of 1, 2",
        ),
        (dict(tensor_parallel_size=16), r"=16 needs as many devices, there are \d+ \(cpu\): lower"),
        (dict(tensor_parallel_size=0), r"tensor_parallel_size=0 is out of range"),
        (dict(tensor_parallel_size=2, enforce_eager=True), r"enforce_eager=True runs each operati"),
    ],
)
def test_what_cannot_be_cut_is_refused_by_name(sizes, words):
    with pytest.raises(ValueError, match=words):
        LLM(str(embedded.PATH), **LLM_SIZES | sizes)


def test_models_and_drafters_say_whether_they_run_on_shards():
    other = llama._replace(tensor_parallel=False)
    with pytest.raises(ValueError, match="wants a model that runs on shards, LlamaForCausalLM"):
        shard(other, tiny.config(**SIZES), make_mesh(2))
    drafter = eagle._replace(tensor_parallel=False)
    with pytest.raises(ValueError, match="wants a drafter that runs on shards, eagle does not say"):
        shard_drafter(drafter, cast(DraftedConfig, with_eagle()[1]).drafter, make_mesh(2))
