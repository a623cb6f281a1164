"""Formats of quantised checkpoints: what is loaded, and what a product of it gives."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrunner.linear import Linear
from jaxrunner.loading.quantized import read_quantized
from jaxrunner.loading.weights import load_params
from jaxrunner.quantization.quantized_linear import QuantizedLinear
from tests.support import quantized
from tests.support.quantized import SETTINGS
from tests.support.quantized_formats import E4M3, FORMATS

E = SETTINGS["hidden_size"]


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


def rounded(x, activation, scale):
    """Returns inputs, [T, inputs], as the format's definition rounds them, in float64."""
    x = np.asarray(x, np.float32).reshape(len(x), -1, activation.group or x.shape[1])
    most = dict(int8=127, float8_e4m3fn=448)[activation.code]
    if scale is None:
        scale = np.abs(x).max(-1, keepdims=True) / np.float32(most)
    numbers = np.clip(x / scale, -most - (activation.code == "int8"), most)
    numbers = np.round(numbers) if activation.code == "int8" else numbers.astype(E4M3)
    return (numbers.astype(np.float64) * scale).reshape(len(x), -1)


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
