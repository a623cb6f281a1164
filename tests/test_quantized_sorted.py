"""Products whose inputs are held sorted by their groups, as those of `desc_act` are."""

from dataclasses import replace
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrunner.operation import unnoted
from jaxrunner.ops import fp8_products, products
from jaxrunner.ops.quantized_products import MATMUL, TILES
from jaxrunner.quantization.quantized_linear import QuantizedLinear
from jaxrunner.quantization.scheme import Scheme
from tests.support.lowering import cuda, lowers
from tests.support.quantized_shapes import BOTH_IN_BLOCKS, mlp_weights, shaped, weights

SORTED = Scheme("int4", (1, 128), has_order=True)
WITH_ZEROS = replace(SORTED, has_zero=True)
AS_THEY_COME = "wants inputs that are held as they come"


@lowers
@pytest.mark.parametrize(
    ("run", "tokens", "scheme", "outputs", "name"),
    [
        (products.linear, 8, SORTED, 6144, "quantized_matmul"),
        (products.linear, 1, WITH_ZEROS, 512, "quantized_matmul"),
        (products.linear, 256, SORTED, 6144, "quantized_tile"),
        (products.project, 8, SORTED, 4096, "quantized_matmul in parts"),
        (products.project, 64, SORTED, 4096, "quantized_tile in parts"),
        (products.linear, 512, SORTED, 6144, "plain JAX"),
        (products.linear, 8, replace(SORTED, block=(1, 96)), 6144, "plain JAX"),
    ],
)
def test_kernels_run_what_they_do_of_inputs_as_they_come(run, tokens, scheme, outputs, name):
    found: list[Any] = []
    y = jax.eval_shape(
        lambda x, w: run(x, w, note=found.append), shaped(tokens, 1024), weights(scheme, outputs)
    )
    assert found[-1].name == name
    assert y.shape[name.endswith("parts") :] == (tokens, outputs)


@lowers
@pytest.mark.parametrize("tokens", [1, 8, 64, 256])
def test_products_of_sorted_inputs_lower(tokens):
    def run(x: Any, w: QuantizedLinear, v: QuantizedLinear) -> tuple[Any, Any]:
        return products.linear(x, w, note=unnoted), products.project(x, v, note=unnoted)

    with cuda():
        given = shaped(tokens, 4096), weights(SORTED, 6144, 4096), weights(SORTED, 4096, 4096)
        text = jax.jit(run).trace(*given).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("mosaic_gpu") >= 2 and "gather" in text


@lowers
def test_an_mlp_of_sorted_inputs_is_two_products():
    found: list[Any] = []
    with cuda():
        jax.eval_shape(
            lambda x, *w: products.mlp(x, *w, note=found.append),
            shaped(8, 4096), *mlp_weights(SORTED),
        )  # fmt: skip
    names = {one.operation: one.name for one in found}
    assert names == dict(
        gate_up="quantized_matmul", project="quantized_matmul in parts", mlp="two products"
    )
    (mlp,) = (one for one in found if one.operation == "mlp")
    assert mlp.refused["quantized_mlp"] == AS_THEY_COME


def test_what_is_not_served_is_refused_in_words():
    ragged = weights(replace(SORTED, block=(1, 96)))
    for one in MATMUL, TILES:
        assert one.refuses(shaped(64, 1024), ragged) == "wants whole groups of inputs"
    blocks = weights(replace(BOTH_IN_BLOCKS, has_order=True))
    assert fp8_products.BLOCKS.refuses(shaped(512, 1024), blocks) == AS_THEY_COME


@pytest.mark.parametrize("axes", [(256,), (4, 64)], ids=["inputs", "heads"])
@pytest.mark.parametrize("size", [64, 128])
def test_kernels_take_inputs_and_scales_in_one_order(axes, size):
    """Each run of inputs has its own scale and zero point, and its sum is that of plain JAX."""
    rng, inputs = np.random.default_rng(0), math.prod(axes)
    w = QuantizedLinear(
        jnp.asarray(rng.integers(-100, 100, (48, *axes)), jnp.int8),
        jnp.asarray(rng.uniform(0.005, 0.015, (48, inputs // size)), jnp.float32),
        jnp.asarray(rng.integers(-9, 9, (48, inputs // size)), jnp.int8),
        jnp.asarray(rng.permutation(inputs).reshape(axes), jnp.int32),
        None, None, Scheme("int8", (1, size), has_zero=True, has_order=True), len(axes),
    )  # fmt: skip
    x = rng.normal(size=(5, *axes)).astype(np.float32)
    (tokens, _), of_weights = w.inputs(jnp.asarray(x)), w.matrices()
    numbers, *of_runs = (np.asarray(a, np.float32) for a in of_weights)
    scale, zero = (np.repeat(a, size, axis=1) for a in of_runs)
    want = np.asarray(tokens) @ ((numbers - zero) * scale).T
    np.testing.assert_allclose(jax.jit(lambda x: w.product(x))(x), want, rtol=1e-5, atol=1e-4)
    values = np.asarray(w.values())
    np.testing.assert_allclose(x.reshape(5, -1) @ values.T, want, rtol=1e-5, atol=1e-4)
    assert (np.asarray(tokens) != x.reshape(5, -1)).mean() > 0.9
