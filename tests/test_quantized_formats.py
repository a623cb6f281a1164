"""Formats of quantised checkpoints: what is loaded, and what a product of it gives."""

import importlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrunner.linear import Linear
from jaxrunner.loading.quantized import read_quantized
from jaxrunner.loading.weights import load_params
from jaxrunner.ops import banded_products, fp8_products, products, quantized_products
from jaxrunner.quantization.quantized_linear import QuantizedLinear
from tests.support import quantized
from tests.support.quantized import SETTINGS
from tests.support.quantized_formats import FORMATS
from tests.support.rounded_inputs import rounded

E = SETTINGS["hidden_size"]
# All but actorder="group", which the library of compressed-tensors has dropped.
KNOWN_TO_LIBRARY = [n for n in FORMATS if n.startswith("compressed") and not n.endswith(", order")]


def load(folder, settings, tensors, **kwargs):
    """Returns the params of a checkpoint that is written to a folder."""
    quantized.save(folder, settings, tensors)
    model, config = read_quantized(settings, "config.json", **kwargs)
    return load_params(folder, model, config, dtype="float32", progress=False)


def both(tmp_path, format_):
    """Returns the products of a quantised checkpoint, and those of what it stands for, by name."""
    settings, tensors, floats = quantized.written(format_)
    trees = load(tmp_path / "few", settings, tensors), load(tmp_path / "float", SETTINGS, floats)
    return [
        {name: getattr(tree.layers[0], name) for name in ("qkv", "o", "gate_up", "down")}
        for tree in trees
    ]


@pytest.mark.parametrize("format_", FORMATS)
def test_weights_and_products_are_those_of_the_definition(tmp_path, format_):
    few, floats = both(tmp_path, format_)
    for name, w in few.items():
        assert isinstance(w, QuantizedLinear) and isinstance(floats[name], Linear)
        want = np.asarray(floats[name].weight)
        np.testing.assert_array_equal(np.asarray(w.values()).reshape(want.shape), want, name)
    for name in ("qkv", "o"):
        w, want = few[name], np.asarray(floats[name].weight, np.float64)
        inputs = want.shape[want.ndim - w.num_in :]
        x = np.random.default_rng(0).normal(size=(3, *inputs)).astype(np.float32)
        flat = x.reshape(3, -1).astype(np.float64)
        if (activation := w.scheme.activation) is not None:
            scale = None if w.input_scale is None else np.asarray(w.input_scale)
            flat = rounded(flat, activation, scale)
            assert abs(flat - x.reshape(3, -1)).max() > 1e-3
        got = jax.jit(lambda x, w: w.product(x))(jnp.asarray(x), w)
        product = flat @ want.reshape(-1, flat.shape[1]).T
        np.testing.assert_allclose(np.asarray(got).reshape(3, -1), product, rtol=2e-5, atol=2e-4)


def test_transformers_means_the_same_by_blocks_and_by_mxfp4(tmp_path):
    torch = pytest.importorskip("torch")
    fp8 = pytest.importorskip("transformers.integrations.finegrained_fp8")
    few = load_few(tmp_path / "blocks", "fp8 blocks")
    _, tensors, _ = quantized.written("fp8 blocks")
    name = "model.layers.0.mlp.down_proj.weight"
    numbers = torch.tensor(tensors[name].view(np.uint8)).view(torch.float8_e4m3fn)
    scale = torch.tensor(tensors[f"{name}_scale_inv"])
    means = fp8.Fp8Dequantize(None)._dequantize_one
    np.testing.assert_array_equal(few.down.values(), means(numbers, scale, torch.float32))
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    few = load_few(tmp_path / "mxfp4", "compressed mxfp4")
    _, tensors, _ = quantized.written("compressed mxfp4")
    packed = torch.tensor(tensors[f"{name}_packed"]).reshape(1, E, -1, 16)
    scale = torch.tensor(tensors[f"{name}_scale"])[None]
    wanted = mxfp4.convert_moe_packed_tensors(packed, scale, dtype=torch.float32)[0].T
    np.testing.assert_array_equal(few.down.values(), wanted)


@pytest.mark.parametrize("format_", KNOWN_TO_LIBRARY)
def test_compressed_tensors_means_the_same(tmp_path, format_):
    torch = pytest.importorskip("torch")
    library = pytest.importorskip("compressed_tensors", reason="install the hf extra")
    config = FORMATS[format_][0]
    few, own = load_few(tmp_path, format_).down, "model.layers.0.mlp.down_proj."
    stored = importlib.import_module("safetensors.torch").load_file(tmp_path / "model.safetensors")
    kind = library.compressors.BaseCompressor.get_value_from_registry(config["format"])
    (scheme,) = library.QuantizationConfig.model_validate(config).config_groups.values()
    module = {
        name.removeprefix(own): tensor.float() if tensor.dtype == torch.bfloat16 else tensor
        for name, tensor in stored.items()
        if name.startswith(own)
    }
    wanted = kind.decompress(module, scheme)["weight"].float()
    np.testing.assert_array_equal(few.values(), wanted)


@pytest.mark.parametrize("format_", ["gptq v1", "compressed int8 channels"])
def test_a_head_that_is_no_embedding_is_quantised_too(tmp_path, format_):
    own = SETTINGS | dict(vocab_size=64)
    settings, tensors, floats = quantized.written(format_, own, head=True)
    asked = dict(lm_head=True) if format_ == "gptq v1" else dict(ignore=["re:.*self_attn.*"])
    settings["quantization_config"] = settings["quantization_config"] | asked
    for name in [*tensors] * (format_ != "gptq v1"):
        if "self_attn" in name:
            del tensors[name]
    tensors |= {n: t for n, t in floats.items() if format_ != "gptq v1" and "self_attn" in n}
    params = load(tmp_path, settings, tensors)
    np.testing.assert_array_equal(params.head.values(), floats["lm_head.weight"])
    kinds = {type(params.layers[0].qkv), type(params.layers[0].down)}
    assert len(kinds) == 1 + (format_ != "gptq v1")
    tied = {n: t for n, t in tensors.items() if "lm_head" not in n}
    params = load(tmp_path / "tied", settings | dict(tie_word_embeddings=True), tied)
    assert params.head is None and isinstance(params.layers[0].down, QuantizedLinear)


def test_a_user_may_leave_inputs_as_they_are(tmp_path):
    settings, tensors, floats = quantized.written("fp8 tensor, static")
    tensors |= {"model.layers.0.self_attn.k_scale": np.ones(1, np.float32)}  # of a cache
    settings["quantization_config"] = settings["quantization_config"] | dict(
        activation_scheme="none"
    )
    w = load(tmp_path, settings, tensors).layers[0].down
    x = np.random.default_rng(0).normal(size=(3, 96)).astype(np.float32)
    want = x @ floats["model.layers.0.mlp.down_proj.weight"].T
    np.testing.assert_allclose(w.product(jnp.asarray(x)), want, rtol=2e-5, atol=2e-4)


def load_few(folder, format_):
    """Returns the layer of a checkpoint in a format."""
    settings, tensors, _ = quantized.written(format_)
    return load(folder, settings, tensors).layers[0]


def test_what_runs_a_product_is_told_with_the_reason(tmp_path):
    few, found = load_few(tmp_path, "awq"), []
    x = jax.ShapeDtypeStruct((3, E), jnp.float32)
    jax.eval_shape(lambda x, w: products.linear(x, w, note=found.append), x, few.qkv)
    jax.eval_shape(
        lambda x, w, v: products.mlp(x, w, v, note=found.append), x, few.gate_up, few.down
    )
    assert {chosen.name for chosen in found} == {"plain JAX", "two products"}
    reason = "wants weights that are Linear, got QuantizedLinear"
    known = (*quantized_products.WHOLE, *quantized_products.IN_PARTS, quantized_products.MLP)
    units = {f"two products, units {how}" for how in ("in fp8", "as pairs")}
    units |= {fp8_products.MLP.name, banded_products.MLP.name, "quantized_tile of units"}
    own = {one.name for one in known} | units
    assert {why for one in found for name, why in one.refused.items() if name not in own} == {
        reason
    }
    assert list(found[0].refused) == [
        "fp8_blocks", "fp8_blocks of pairs", "quantized_tile of pairs",
        "quantized_tile of words", "quantized_tile",
        "quantized_matmul", "fp8 product",
    ]  # fmt: skip
    assert found[0].refused["quantized_tile"] == "wants weights without zero points"
    assert found[0].refused["fp8 product"] == "wants weights and inputs in fp8"


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("format_", ["awq", "compressed int8 channels", "fp8 blocks"])
def test_products_in_half_precision_are_near(tmp_path, format_, dtype):
    w = load_few(tmp_path, format_).qkv
    x = np.random.default_rng(0).normal(size=(3, E)).astype(np.float32)
    want = np.asarray(w.product(jnp.asarray(x)))
    got = w.product(jnp.asarray(x, dtype))
    assert got.dtype == dtype
    np.testing.assert_allclose(got.astype(np.float32), want, atol=0.02 * abs(want).max())


def test_a_loop_widens_weights_in_each_turn(tmp_path):
    """Once for all turns would hold the model there whole, as floats."""
    few = load_few(tmp_path, "compressed packed 4 bits")

    def run(x, w, v):
        def back(_, x):
            return v.product(jax.nn.relu(w.product(x))[:, 0])

        return jax.lax.fori_loop(0, 4, back, x)

    program = jax.jit(run).lower(jnp.ones((3, E)), few.gate_up, few.down).compile().as_text()
    assert program is not None
    before, after = program.split("\nENTRY")
    assert re.search(r"f32\[2,96,64\]|f32\[192,64\]", before)
    assert not re.search(r"f32\[2,96,64\]|f32\[192,64\]", after.partition("\n}")[0])
