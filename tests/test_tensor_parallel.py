"""Models on shards, on fake devices of a CPU: tokens are those of one device."""

import dataclasses
from pathlib import Path
import re
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
import numpy as np
import pytest

from jaxrunner import LLM, SamplingParams, embedded
from jaxrunner.loading.weights import load_params, save_checkpoint
from jaxrunner.model import Ops
from jaxrunner.models.llama import llama
from jaxrunner.operation import Note, unnoted
from jaxrunner.ops.plain import norm_heads
from jaxrunner.parallel import tensor
from jaxrunner.parallel.drafter import shard_drafter
from jaxrunner.parallel.kv_heads import copy_heads, merge_heads
from jaxrunner.parallel.mesh import TENSOR, make_mesh
from jaxrunner.parallel.tensor import shard
from jaxrunner.speculators.drafter import DraftedConfig
from jaxrunner.speculators.eagle import eagle
from jaxrunner.types import Batch
from tests.support import small_checkpoint, tiny
from tests.support.drafters import with_eagle

SIZES: dict[str, Any] = dict(
    hidden_size=24, intermediate_size=32, num_attention_heads=8, vocab_size=64, head_dim=4
)
BIASES = dict(architectures=["LlamaForCausalLM"], attention_bias=True, mlp_bias=True)
KINDS: dict[str, dict[str, Any]] = {
    "few KV heads": SIZES | BIASES | dict(num_key_value_heads=2),
    "windows": SIZES
    | dict(
        architectures=["MistralForCausalLM"], model_type="mistral", sliding_window=6,
        num_key_value_heads=4, tie_word_embeddings=True,
    ),
}  # fmt: skip
LLM_SIZES: dict[str, Any] = dict(
    max_num_seqs=4, max_num_batched_tokens=64, token_buckets=(64,), decode_buckets=(4,),
    max_model_len=128, dtype="float32", warm_up=False, use_tqdm=False,
)  # fmt: skip


@pytest.fixture(scope="module")
def saved(request, tmp_path_factory):
    """Returns a checkpoint folder and its config."""
    config = tiny.config(**KINDS[request.param])
    folder = tmp_path_factory.mktemp("checkpoint")
    settings = tiny.SETTINGS | KINDS[request.param]
    save_checkpoint(folder, llama, config, tiny.random_params(config, seed=3), settings)
    return folder, config


@pytest.mark.devices(8)
@pytest.mark.parametrize(
    "saved", ["few KV heads", pytest.param("windows", marks=pytest.mark.slow)], indirect=True
)
def test_weights_are_saved_as_they_were_read(saved, tmp_path):
    folder, config = saved
    model, on_mesh = shard(llama, config, make_mesh(8))
    params = load_params(folder, model, on_mesh, dtype="float32", progress=False)
    save_checkpoint(tmp_path, model, on_mesh, params, {})
    one, other = (
        load_params(path, llama, config, dtype="float32", progress=False)
        for path in (folder, tmp_path)
    )
    jax.tree.map(np.testing.assert_array_equal, one, other)


@pytest.mark.devices(4)
@pytest.mark.parametrize("num_heads", [1, 2, 4, 8])
def test_a_norm_over_all_heads_is_that_of_one_device(num_heads):
    """Fewer heads than devices are copied, and count once."""
    mesh, rng = make_mesh(4), np.random.default_rng(num_heads)
    x = jnp.asarray(rng.normal(size=(3, num_heads, 5)), jnp.float32)
    weight = jnp.asarray(rng.normal(size=(num_heads, 5)), jnp.float32)
    run = jax.shard_map(
        lambda x, w: tensor._norm_heads(x, w, 0.1), mesh=mesh, check_vma=False,
        in_specs=(PartitionSpec(None, TENSOR), PartitionSpec()),
        out_specs=PartitionSpec(None, TENSOR),
    )  # fmt: skip
    copies = max(4 // num_heads, 1)
    got = np.asarray(run(jnp.repeat(x, copies, 1), weight))
    np.testing.assert_allclose(got, np.repeat(norm_heads(x, weight, 0.1), copies, 1), rtol=1e-6)


@pytest.mark.devices(2)
@pytest.mark.parametrize(("name", "num"), [("project", 1), ("mlp", 2), ("experts", 2)])
def test_devices_send_a_residual_as_wide_as_the_layer_takes_it(name, num):
    """Kernels leave parts in float32, twice the bytes. num: arguments behind x."""
    parts = jnp.arange(24, dtype=jnp.float32).reshape(2, 3, 4) / 8
    fields: dict[str, Any] = dict.fromkeys(field.name for field in dataclasses.fields(Ops))
    fields[name] = lambda *_: parts

    def make(batch: Batch, *, note: Note = unnoted) -> Ops:
        return Ops(**fields)

    over = tensor.all_reduce_ops(make, cast(Any, None))
    run = jax.shard_map(
        lambda x: getattr(over, name)(x, *[None] * num), mesh=make_mesh(2), check_vma=False,
        in_specs=PartitionSpec(), out_specs=PartitionSpec(),
    )  # fmt: skip
    for dtype in (jnp.bfloat16, jnp.float32):
        total = run(jnp.zeros((3, 4), dtype))
        assert total.dtype == dtype
        np.testing.assert_array_equal(total.astype(jnp.float32), 2 * parts.sum(0))
    assert "psum" in (told := str(jax.make_jaxpr(run)(jnp.zeros((3, 4), jnp.bfloat16))))
    assert not re.search(r"f32\S* = psum", told)


def test_copied_heads_and_merged_ones_are_inverse():
    packed = np.arange(2 * 6 * 3 * 5).reshape(2, 6, 3, 5)  # 2 KV heads of 4 query heads each
    for num in (4, 8):
        copied = copy_heads(packed, num)
        assert copied.shape == (num, 8 // num + 2, 3, 5)
        np.testing.assert_array_equal(copied[num // 2, -1], packed[1, -1])
        np.testing.assert_array_equal(copied[1, 0], packed[0, 8 // num])
        np.testing.assert_array_equal(merge_heads(copied, 2), packed)


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """Returns a checkpoint, what one device answers, and its memory plan."""
    pytest.importorskip("llguidance")
    folder = small_checkpoint.save(tmp_path_factory.mktemp("small"))
    with small_checkpoint.start(folder) as llm:
        return folder, small_checkpoint.tokens(llm), llm.memory_plan


@pytest.mark.devices(2)
def test_an_llm_on_two_devices(small, tmp_path: Path):
    """What sleeps wakes as it was; a snapshot of shards goes on; a plan is that of a device."""
    folder, want, memory = small
    with small_checkpoint.start(folder, tensor_parallel_size=2) as llm:
        assert small_checkpoint.tokens(llm) == want
        llm.sleep(level=1)
        llm.wake_up()
        assert small_checkpoint.tokens(llm) == want
        held = {x.sharding.num_devices for x in jax.tree.leaves(llm.engine.runner.params)}
        assert held == {2}
        assert memory.kv == 2 * llm.memory_plan.kv
        assert llm.memory_plan.weights < 0.55 * memory.weights
        # Its end would abort the request.
        parts = llm.stream([*small_checkpoint.PROMPTS[:1]], small_checkpoint.PARAMS[0])
        next(parts)
        llm.save_state(tmp_path / "state")
    with small_checkpoint.start(folder, tensor_parallel_size=2) as llm:
        *_, last = llm.restore_state(tmp_path / "state")
        assert last.finished and llm.engine.runner.state.kv[0].k.sharding.num_devices == 2
        assert last.outputs[0].token_ids == want[0][-len(last.outputs[0].token_ids) :]


@pytest.mark.devices(2)
@pytest.mark.slow
def test_an_llm_with_drafts_on_two_devices():
    rule, tokens = SamplingParams(temperature=0.7, seed=3, max_tokens=20), []
    config = dict(method="eagle3", model=str(embedded.EAGLE3_PATH), num_speculative_tokens=2)
    drafting: dict[str, Any] = dict(tensor_parallel_size=2, speculative_config=config)
    for extra in ({}, drafting):
        with LLM(str(embedded.PATH), **LLM_SIZES, **extra) as llm:
            outputs = llm.generate(["import os\n", "def f(x):"], rule, use_tqdm=False)
            tokens.append([output.outputs[0].token_ids for output in outputs])
    assert tokens[0] == tokens[1]


@pytest.mark.devices(4)
@pytest.mark.parametrize(
    "sizes,words",
    [
        (
            dict(tensor_parallel_size=3),
            r"tensor_parallel_size=3 does not divide .* take one of 1, 2",
        ),
        (dict(tensor_parallel_size=16), r"=16 needs as many devices, there are \d+ \(.*\): lower"),
        (dict(tensor_parallel_size=0), r"tensor_parallel_size=0 is out of range"),
        (dict(tensor_parallel_size=2, enforce_eager=True), r"enforce_eager=True runs each operati"),
    ],
)
def test_what_cannot_be_cut_is_refused_by_name(sizes, words):
    with pytest.raises(ValueError, match=words):
        LLM(str(embedded.PATH), **LLM_SIZES | sizes)


@pytest.mark.devices(2)
def test_models_and_drafters_say_whether_they_run_on_shards():
    other = llama._replace(tensor_parallel=False)
    with pytest.raises(ValueError, match="wants a model that runs on shards, LlamaForCausalLM"):
        shard(other, tiny.config(**SIZES), make_mesh(2))
    drafter = eagle._replace(tensor_parallel=False)
    with pytest.raises(ValueError, match="wants a drafter that runs on shards, eagle does not say"):
        shard_drafter(drafter, cast(DraftedConfig, with_eagle()[1]).drafter, make_mesh(2))
