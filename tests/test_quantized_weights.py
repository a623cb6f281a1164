"""Quantised weights in an engine: rounding of float checkpoints, new weights, shards, drafts."""

import json
import math
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec
import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxrunner.hf_config import Settings
from jaxrunner.loading.quantized import read_quantized
from jaxrunner.loading.weights import load_params
from jaxrunner.models.llama import llama
from jaxrunner.parallel.mesh import TENSOR, make_mesh
from jaxrunner.parallel.tensor import shard
from jaxrunner.parallel.whole import merge
from jaxrunner.quantization import per_channel
from jaxrunner.quantization.quantized_linear import QuantizedLinear
from jaxrunner.worker.memory_plan import num_bytes
from tests.outside import checkpoint, float64_llama
from tests.support import quantized
from tests.support.quantized_formats import E4M3

SETTINGS: dict[str, Any] = checkpoint.LLAMA | dict(architectures=["LlamaForCausalLM"])
PROMPTS = checkpoint.prompts(5, 18, 9)
GREEDY = checkpoint.greedy(7)
UP = "model.layers.1.mlp.up_proj.weight"


def is_rounded(name):
    return name.endswith("proj.weight")


def fp8(weight):
    """Returns what numbers of fp8 and a scale an output stand for, in float64."""
    scale = np.abs(weight).max(1, keepdims=True) / np.float32(448)
    return (weight / scale).astype(E4M3).astype(np.float64) * scale


def int8(weight):
    scale = np.abs(weight).max(1, keepdims=True) / np.float32(127)
    return np.round(weight / scale).astype(np.float64) * scale


def wanted(tensors, rounding=fp8, settings=SETTINGS):
    """Returns the greedy answers of weights that are rounded, computed in float64."""
    held = {n: rounding(t) if is_rounded(n) else t for n, t in tensors.items()}
    return [
        float64_llama.greedy(lambda ids: float64_llama.logits(held, settings, ids), prompt, 7)
        for prompt in PROMPTS
    ]


def answers(llm):
    return checkpoint.answers(llm, PROMPTS, GREEDY)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The folder of a float checkpoint, and its tensors."""
    folder = tmp_path_factory.mktemp("float")
    return folder, checkpoint.write(folder, llama, SETTINGS)


@pytest.fixture(scope="module")
def fp8_llm(saved):
    with checkpoint.start(saved[0], quantization="fp8") as llm:
        yield llm


def test_rounded_weights_answer_as_what_they_stand_for(saved, fp8_llm):
    assert answers(fp8_llm) == wanted(saved[1])
    assert fp8_llm.memory_plan.weights == num_bytes(fp8_llm.params)
    products = [w for w in jax.tree.leaves(fp8_llm.params.layers, is_leaf=is_few) if is_few(w)]
    assert len(products) == 8 and {w.weight.dtype.itemsize for w in products} == {1}
    assert fp8_llm.params.head.weight.dtype == fp8_llm.params.embed.dtype == np.float32


def is_few(node):
    return isinstance(node, QuantizedLinear)


def test_new_weights_are_rounded_as_the_first_ones_were(saved, fp8_llm, tmp_path):
    tensors = {name: np.roll(tensor, 1, 0) for name, tensor in saved[1].items()}
    save_file(tensors, tmp_path / "model.safetensors")
    config = llama.read(Settings(SETTINGS))
    params = load_params(tmp_path, llama, config, dtype="float32", progress=False)
    first = fp8_llm.params
    try:
        fp8_llm.update_params(params)  # a trainer's tree of floats
        assert answers(fp8_llm) == (want := wanted(tensors))
        fp8_llm.update_params(first)
        fp8_llm.reload_weights(tensors)
        assert answers(fp8_llm) == want
        fp8_llm.reload_weights(tmp_path)
        assert answers(fp8_llm) == want
        with pytest.raises(ValueError, match=r"gate_up.weight does not hold the tensors that it"):
            fp8_llm.reload_weights({UP: tensors[UP]})
        with pytest.raises(ValueError, match=r"params must have the leaves of those they replace"):
            fp8_llm.update_params(params.layers)
    finally:
        fp8_llm.update_params(first)


def test_they_sleep_and_are_saved_as_they_are(saved, fp8_llm, tmp_path):
    want = answers(fp8_llm)
    fp8_llm.sleep(level=1)
    fp8_llm.wake_up()
    fp8_llm.save_sharded_state(tmp_path)
    fp8_llm.save_params(tmp_path / "orbax")
    fp8_llm.load_params(tmp_path / "orbax")
    stream = fp8_llm.stream([{"prompt_token_ids": ids} for ids in PROMPTS], GREEDY)
    parts = [next(stream)]
    fp8_llm.save_state(tmp_path / "state")
    (tmp_path / "config.json").write_text(json.dumps(SETTINGS))
    with checkpoint.start(tmp_path, load_format="sharded_state", quantization="fp8") as llm:
        parts += llm.restore_state(tmp_path / "state")
        assert answers(llm) == want
    tokens = {}
    for part in parts:
        tokens.setdefault(part.request_id, []).extend(part.outputs[0].token_ids)
    assert list(tokens.values()) == want
    stream.close()


SHARDED: dict[str, Any] = quantized.SETTINGS | dict(
    num_attention_heads=8, intermediate_size=256, vocab_size=64
)


@pytest.mark.devices(4)
@pytest.mark.parametrize(
    "format_",
    [
        "fp8 blocks", "gptq, desc_act", "gptq, desc_act, whole groups",
        "compressed int8 channels, by token", "awq",
    ],
)  # fmt: skip
def test_products_on_shards_are_those_of_one_device(tmp_path, format_):
    settings, tensors, _ = quantized.written(format_, SHARDED)
    quantized.save(tmp_path, settings, tensors)
    model, config = read_quantized(settings, "config.json")
    one = load_params(tmp_path, model, config, dtype="float32", progress=False).layers[0]
    model, config = shard(model, config, mesh := make_mesh(4))
    many = load_params(tmp_path, model, config, dtype="float32", progress=False).layers[0]
    for w, cut in ((one.o, many.o), (one.down, many.down)):
        shape = *w.weight.shape[1:-1], w.values().shape[-1] // math.prod(w.weight.shape[1:-1])
        x = np.random.default_rng(0).normal(size=(3, *shape)).astype(np.float32)
        at = PartitionSpec(None, TENSOR)
        spec = jax.tree.map(lambda leaf: leaf.sharding.spec, cut)
        assert cut.weight.sharding.shard_shape(cut.weight.shape) != cut.weight.shape
        product = jax.shard_map(
            lambda x, w: jax.lax.psum(w.on_shard(TENSOR).product(x), TENSOR), mesh=mesh,
            in_specs=(at, spec), out_specs=PartitionSpec(), check_vma=False,
        )  # fmt: skip
        x_cut = jax.device_put(x, NamedSharding(mesh, at))
        want = jax.jit(lambda x, w: w.product(x))(x, w)
        np.testing.assert_allclose(jax.jit(product)(x_cut, cut), want, rtol=1e-5, atol=1e-4)
        flat = PartitionSpec(*[None] * (w.values().ndim - 1), TENSOR)
        values = jax.shard_map(
            lambda w: w.on_shard(TENSOR).values(), mesh=mesh, in_specs=(spec,), out_specs=flat,
            check_vma=False,
        )  # fmt: skip
        np.testing.assert_array_equal(jax.jit(values)(cut), w.values())
    copied = merge(many.qkv, one.qkv)  # two KV heads on four devices
    for leaf, own in zip(jax.tree.leaves(copied), jax.tree.leaves(one.qkv), strict=True):
        np.testing.assert_array_equal(np.asarray(leaf), np.asarray(own))


@pytest.mark.slow
@pytest.mark.devices(4)
def test_a_quantised_checkpoint_answers_on_shards_as_what_it_stands_for(tmp_path):
    settings, tensors, floats = quantized.written("gptq, desc_act", SHARDED)
    quantized.save(tmp_path, settings, tensors)
    with checkpoint.start(tmp_path, tensor_parallel_size=4) as llm:
        assert answers(llm) == wanted(floats, lambda w: w, SHARDED)


@pytest.mark.slow
def test_a_quantised_model_drafts_for_one(saved, tmp_path):
    settings, tensors, _ = quantized.written("awq")
    quantized.save(tmp_path, settings, tensors)
    asked = dict(method="draft_model", model=str(tmp_path), num_speculative_tokens=2)
    with checkpoint.start(saved[0], quantization="int8", speculative_config=asked) as llm:
        assert answers(llm) == wanted(saved[1], int8)
        assert is_few(llm.params.target.layers[0].qkv) and is_few(llm.params.drafter.layers[0].qkv)


def test_rounding_to_fp8_is_that_of_numpy():
    every = np.arange(256, dtype=np.uint8).view(E4M3).astype(np.float32)
    every = every[np.isfinite(every)]
    middles = (every[:, None] + every).ravel() / 2  # where two are as near, and just beside
    near = (np.nextafter(middles, np.float32(end)) for end in (-500, 500))
    values = np.concatenate([middles, *near, [np.nan]]).astype(np.float32)
    got, want = per_channel._to_fp8(values), values.astype(E4M3)
    np.testing.assert_array_equal(got.view(np.uint8), want.view(np.uint8))
