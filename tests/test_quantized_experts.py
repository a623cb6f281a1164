"""Experts of few bits: weights and products by each format's definition, and what memory has."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrunner.loading.quantized import read_quantized
from jaxrunner.loading.weights import load_params
from jaxrunner.mixtures.eplb_config import EplbConfig
from jaxrunner.mixtures.experts import Experts, Routes
from jaxrunner.ops import experts as ops
from jaxrunner.parallel.parallel_config import ParallelConfig
from jaxrunner.quantization.per_channel import of_floats
from jaxrunner.quantization.quantized_experts import QuantizedExperts
from jaxrunner.quantization.quantized_linear import QuantizedLinear
from tests.outside import checkpoint
from tests.support import quantized
from tests.support.rounded_inputs import rounded

X, E, F = 5, 64, 128
SETTINGS: dict[str, Any] = quantized.SETTINGS | dict(
    architectures=["Qwen3MoeForCausalLM"], num_experts=X, num_experts_per_tok=2,
    intermediate_size=F, moe_intermediate_size=F, num_attention_heads=4, vocab_size=62,
)  # fmt: skip
FORMATS = (
    "fp8 blocks", "fp8 tensor, dynamic", "compressed int8 channels", "compressed packed 4 bits",
    "compressed mxfp4", "awq", "gptq v2, zero points", "gptq, desc_act", "fp8 tensor, static",
    "compressed packed 4 bits, zero points, order", "compressed fp8 tensor, static",
)  # fmt: skip


def load(folder: Any, settings: Any, tensors: Any, quantization: str | None = None) -> Any:
    """Returns the experts of a checkpoint that is written to a folder."""
    quantized.save(folder, settings, tensors)
    model, config = read_quantized(settings, "config.json", quantization)
    return load_params(folder, model, config, dtype="float32", progress=False).layers[0].experts


def routes_of(num_tokens: int, rng: np.random.Generator) -> Routes:
    """Returns routes of which one expert has most, one has none and some are padding."""
    chosen = np.stack([rng.permutation(X - 1)[:2] for _ in range(num_tokens)]).astype(np.int32)
    chosen[: num_tokens // 2, 0] = 0
    chosen[: num_tokens // 2, 1] = 1 + chosen[: num_tokens // 2, 1] % (X - 2)
    chosen[-1] = X
    weights = rng.uniform(0.1, 1, chosen.shape).astype(np.float32)
    return Routes(jnp.asarray(chosen), jnp.asarray(np.where(chosen < X, weights, 0)))


def defined(
    x: np.ndarray, routes: Routes, floats: Experts, activations: Any, tensors: Any
) -> np.ndarray:
    """Returns the weighted sums, [T, E], in float64, route by route.

    tensors: of the checkpoint, with the scales of inputs.
    """

    def inputs(x: np.ndarray, of: Any, module: str) -> np.ndarray:
        if of is None:
            return x.astype(np.float64)
        name = f"model.layers.0.mlp.experts.{module}_proj.input_scale"
        scale = tensors[name].reshape(()) if of.static else None
        return rounded(x[None], of, scale)[0]

    out = np.zeros(x.shape)
    for t, j in np.ndindex(*routes.experts.shape):
        expert, weight = int(routes.experts[t, j]), float(routes.weights[t, j])
        if expert < X:
            own = inputs(x[t], activations[0], f"{expert}.gate")
            gate, up = np.asarray(floats.gate_up[expert], np.float64) @ own
            h = (gate / (1 + np.exp(-gate)) * up).astype(np.float32)
            down = np.asarray(floats.down[expert], np.float64)
            out[t] += weight * (down @ inputs(h, activations[1], f"{expert}.down"))
    return out


@pytest.mark.parametrize("format_", FORMATS)
def test_weights_and_sums_are_those_of_the_definition(tmp_path: Any, format_: str):
    settings, tensors, floats = quantized.written(format_, SETTINGS)
    few = load(tmp_path / "few", settings, tensors)
    want = load(tmp_path / "float", SETTINGS, floats)
    assert isinstance(few, QuantizedExperts) and isinstance(want, Experts)
    for name in ("gate_up", "down"):
        weight = np.asarray(getattr(want, name))
        values = np.asarray(getattr(few, name).values()).reshape(weight.shape)
        np.testing.assert_array_equal(values, weight, name)
    assert sum(x.nbytes for x in jax.tree.leaves(few)) < 0.4 * (want.gate_up.nbytes * 1.5)
    rng = np.random.default_rng(0)
    x, routes = rng.normal(size=(21, E)).astype(np.float32), routes_of(21, rng)
    products: list[Any] = [few.gate_up, few.down]
    activations = [w.scheme.activation for w in products]
    sums = defined(x, routes, want, activations, tensors)
    told: list[Any] = []

    def run(x: Any, routes: Routes, w: Any) -> Any:
        return ops.experts(x, routes, w, note=lambda *of: told.append(of))

    got = jax.jit(run)(jnp.asarray(x), routes, few)
    # Inputs that are rounded may fall on the other side of a middle.
    close = 0.02 if activations[0] else 2e-4
    np.testing.assert_allclose(got, sums, err_msg=format_, atol=close, rtol=close)
    if not activations[0]:
        np.testing.assert_allclose(few.differentiable(jnp.asarray(x), routes), sums, atol=2e-4)
    assert "plain JAX" in str(told)


def test_float_weights_become_8_bits_as_they_load(tmp_path: Any):
    _, _, floats = quantized.written("awq", SETTINGS)
    want = load(tmp_path / "float", SETTINGS, floats)
    few = load(tmp_path / "few", SETTINGS, floats, "int8")
    for name in ("gate_up", "down"):
        weight, w = np.asarray(getattr(want, name)), getattr(few, name)
        assert isinstance(w, QuantizedLinear) and w.weight.dtype == jnp.int8
        most = np.abs(weight).max(-1, keepdims=True) / 127
        assert (np.abs(np.asarray(w.values()) - weight) <= 0.5001 * most).all()
    # And so do those of a trainer, whose tree has none of few bits.
    rounded_ones = of_floats((want, 1), (few, 1))[0]
    assert jax.tree.structure(rounded_ones) == jax.tree.structure(few)
    for got, leaf in zip(jax.tree.leaves(rounded_ones), jax.tree.leaves(few), strict=True):
        assert abs(np.asarray(got, np.float32) - np.asarray(leaf, np.float32)).max() <= 1
    assert of_floats((few, 1), (few, 1))[0] is few


def test_one_expert_at_a_time_is_widened(tmp_path: Any):
    settings, tensors, _ = quantized.written("compressed packed 4 bits", SETTINGS)
    few = load(tmp_path, settings, tensors)
    many = jax.tree.map(lambda w: jax.ShapeDtypeStruct((99, *w.shape[1:]), w.dtype), few)
    kinds: Any = (jnp.int32, jnp.float32)
    routes = Routes(*(jnp.zeros((8, 2), kind) for kind in kinds))
    x = jax.ShapeDtypeStruct((8, E), jnp.float32)
    product = jax.jit(lambda x, routes, w: w.product(x, routes)).lower(x, routes, many).compile()
    memory: Any = product.memory_analysis()
    wide = 4 * 3 * F * E
    assert memory.argument_size_in_bytes > 99 * wide / 8
    assert memory.temp_size_in_bytes < 4 * wide  # of 99


@pytest.mark.slow
@pytest.mark.devices(2)
@pytest.mark.parametrize(
    ("format_", "parallel"),
    [
        ("gptq, desc_act", {}),
        ("gptq, desc_act", dict(enable_expert_parallel=True)),
        ("fp8 tensor, static", dict(enable_expert_parallel=True)),
    ],
    ids=["cut units and their order", "cut experts", "cut scales of inputs"],
)
def test_tokens_are_those_of_the_floats_on_one_device_and_on_two(
    tmp_path: Any, format_: str, parallel: dict[str, Any]
):
    own = SETTINGS | dict(num_experts=6)
    settings, tensors, floats = quantized.written(format_, own)
    few = quantized.save(tmp_path / "few", settings, tensors)
    whole = quantized.save(tmp_path / "float", own, floats)
    asked, found = checkpoint.prompts(5, 9, 7), []
    of_two = dict(tensor_parallel_size=2) | parallel
    for folder, devices in ((whole, {}), (few, {}), (few, of_two)):
        with checkpoint.start(folder, **devices) as llm:
            found.append(checkpoint.answers(llm, asked, checkpoint.greedy(6)))
            if folder == few:
                assert settings["quantization_config"]["quant_method"] in llm.report()
    assert found[1] == found[2]
    assert (found[0] == found[1]) == (format_ != "fp8 tensor, static")  # whose inputs are rounded


@pytest.mark.parametrize(
    ("format_", "tensor"), [("gptq, desc_act", "g_idx"), ("fp8 tensor, static", "input_scale")]
)
def test_gate_and_up_of_an_expert_read_the_same_inputs(tmp_path: Any, format_: str, tensor: str):
    settings, tensors, _ = quantized.written(format_, SETTINGS)
    at = "model.layers.0.mlp.experts"
    gates = [tensors[f"{at}.{i}.gate_proj.{tensor}"] for i in range(X)]
    assert not any(np.array_equal(gates[0], other) for other in gates[1:])
    tensors[f"{at}.2.up_proj.{tensor}"] = gates[3]
    with pytest.raises(ValueError, match=rf"{tensor} of {at}\.2\.up_proj.* and {at}\.2\.gate_proj"):
        load(tmp_path, settings, tensors)


def test_experts_that_are_balanced_are_floats():
    settings, _, _ = quantized.written("fp8 blocks", SETTINGS)
    model, config = read_quantized(settings, "config.json")
    asked = ParallelConfig(2, enable_expert_parallel=True, eplb=EplbConfig())
    with pytest.raises(ValueError, match="enable_eplb=True moves experts of the dtype that is com"):
        asked.cut(model, config)
