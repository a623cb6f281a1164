"""Quantised weights that are refused by name: settings, damaged tensors, sizes."""

import re

import numpy as np
import pytest

from jaxrunner.linear import Linear
from jaxrunner.loading.loader import load
from jaxrunner.loading.quantized import read_quantized
from jaxrunner.loading.weights import load_params
from jaxrunner.parallel.mesh import make_mesh
from jaxrunner.parallel.tensor import shard
from jaxrunner.pytree import host_value
from jaxrunner.quantization.per_channel import of_floats
from tests.support import quantized
from tests.support.quantized import SETTINGS
from tests.support.quantized_formats import FORMATS

UP, DOWN = (f"model.layers.0.mlp.{name}_proj" for name in ("up", "down"))
Q, K = (f"model.layers.0.self_attn.{name}_proj" for name in "qk")


def group(changes=None, weights=None, **more):
    """Returns the settings of a compressed-tensors checkpoint with others in its group."""
    config = FORMATS["compressed packed 4 bits"][0]
    (old,) = config["config_groups"].values()
    new = old | dict(weights=old["weights"] | (weights or {})) | (changes or {})
    return config | dict(config_groups=dict(group_0=new)) | more


def inputs(**changes):
    usual = dict(num_bits=8, type="int", strategy="token", dynamic=True, symmetric=True)
    return group(dict(input_activations=usual | changes))


def of(format_, **changes):
    return FORMATS[format_][0] | changes


BLOCK, AWQ, GPTQ = "fp8 blocks", "awq", "gptq v1"
BAD_SETTINGS = {
    "a format": (dict(quant_method="bitsandbytes"), "must have a quant_method among ['awq', "),
    "no dict": ("fp8", "quantization_config must have a quant_method among"),
    "a key": (of(BLOCK, smooth=1), "quantization_config: 1 unknown setting: smooth=1"),
    "e5m2": (of(BLOCK, fmt="e5m2"), "fmt='e5m2' is not supported, only 'e4m3'"),
    "experts of 4 bits": (of(BLOCK, expert_dtype="fp4"), "expert_dtype='fp4' is not supported, on"),
    "weights widened": (of(BLOCK, dequantize=True), "dequantize=True is not supported, only False"),
    "an embedding": (
        of(BLOCK, modules_to_convert=["embed"]), "modules_to_convert=['embed'] is not supported, on"
    ),
    "scales": (of(BLOCK, scale_fmt="int8"), "scale_fmt='int8' is not supported, only 'float32'"),
    "a block": (of(BLOCK, weight_block_size=[0, 1]), "weight_block_size must be two numbers over"),
    "activations": (of(BLOCK, activation_scheme="token"), "activation_scheme must be one of"),
    "ragged activations": (
        of(BLOCK, weight_block_size=[16, 40]),
        f"activation_scheme='dynamic' wants inputs in blocks of 40, {Q} has 64",
    ),
    "one of two": (
        of(BLOCK, modules_to_not_convert=["up_proj"]),
        "mlp.gate_proj and model.layers.0.mlp.up_proj must be quantised alike, as one product",
    ),
    "all": (
        of(BLOCK, modules_to_not_convert=["layers"]),
        "quantization='fp8' leaves all products of LlamaForCausalLM as they are",
    ),
    "a pattern": (
        of(BLOCK, modules_to_not_convert=["re:("]),
        "must name modules by regular expressions, got 're:('",
    ),
    "a long pattern": (
        of(BLOCK, modules_to_not_convert=["re:" + 201 * "a"]), "it has 201 characters, 200 at most"
    ),
    "awq of 3 bits": (of(AWQ, bits=3), "bits=3 is not supported, only 4"),
    "awq gemv": (of(AWQ, version="gemv"), "version='gemv' is not supported, only 'gemm'"),
    "awq format": (of(AWQ, format="gemv_fast"), "format='gemv_fast' is not supported, only 'gemm'"),
    "awq marlin": (of(AWQ, checkpoint_format="marlin"), "checkpoint_format='marlin' is not"),
    "awq in an order": (of(AWQ, desc_act=True), "desc_act=True is not supported, only False"),
    "awq group": (of(AWQ, group_size=0), "group_size must be over 0, or -1 for all inputs, got 0"),
    "awq ragged": (of(AWQ, group_size=48), "AWQ wants inputs in groups of 48 and outputs in words"),
    "gptq of 3 bits": (of(GPTQ, bits=3), "bits must be one of [4, 8], got 3"),
    "gptq group": (of(GPTQ, group_size=0), "group_size must be over 0, or -1 for all inputs"),
    "gptq marlin": (of(GPTQ, checkpoint_format="marlin"), "checkpoint_format must be 'gptq' or"),
    "gptq format": (of(GPTQ, format="marlin"), "format must be 'gptq' or 'gptq_v2', got 'marlin'"),
    "gptq formats": (
        of(GPTQ, format="gptq_v2", checkpoint_format="gptq"),
        "checkpoint_format='gptq' and format='gptq_v2' must be equal, as zero points are stored in",
    ),
    "gptq ragged": (of(GPTQ, group_size=48), "GPTQ of 4 bits wants inputs in groups of 48, and"),
    "gptq dynamic": (of(GPTQ, dynamic={"+:up": {"rank": 2}}), "unknown setting: rank=2"),
    "gptq dynamic bits": (of(GPTQ, dynamic={".*": {"bits": 2}}), "bits must be one of [4, 8]"),
    "gptq modules": (
        of(GPTQ, modules_in_block_to_quantize=[["self_attn.q_proj"], [3]]),
        "modules_in_block_to_quantize must hold names of modules or lists of them, got [['self_",
    ),
    "no groups": (group(config_groups={}), "config_groups must say how modules are quantised, got"),
    "no weights": (group(dict(weights=None)), "weights must say how they are quantised, got none"),
    "nvfp4": (group(format="nvfp4-pack-quantized"), "format must be one of ('naive-quantized',"),
    "sparsity": (group(sparsity_config={"format": "24"}), "sparsity_config={'format': '24'} is"),
    "outputs": (
        group(dict(output_activations={"num_bits": 8})), "output_activations={'num_bits': 8} is not"
    ),
    "a strategy": (group(weights=dict(strategy="tensor_group")), "strategy must be one of ('tenso"),
    "no size": (group(weights=dict(group_size=0)), "strategy='group' wants group_size, or block"),
    "ragged groups": (
        group(weights=dict(group_size=48)), "compressed-tensors wants whole groups of 48 inputs"
    ),
    "asymmetric": (
        group(weights=dict(symmetric=False, num_bits=8), format="int-quantized"),
        "symmetric=False wants format='pack-quantized', got 'int-quantized'",
    ),
    "an order": (group(weights=dict(actorder="best")), "actorder must be 'group', 'weight', 'stat"),
    "3 bits": (
        group(weights=dict(num_bits=3)), "weights must be of float 8, int 8 or packed int 4, or wit"
    ),
    "a batch's scale": (
        inputs(strategy="tensor"), "inputs must be of 8 bits, with one static scale for all, or dy"
    ),
    "4-bit inputs": (inputs(num_bits=4), "got int 4, dynamic=True, strategy='token'"),
    "inputs in an order": (inputs(actorder="group"), "actorder='group' is not supported, only N"),
    "asymmetric inputs": (inputs(symmetric=False), "symmetric=False is not supported, only True"),
}  # fmt: skip


@pytest.mark.parametrize("what", BAD_SETTINGS)
def test_a_setting_that_is_not_supported_is_refused_by_name(what):
    config, words = BAD_SETTINGS[what]
    with pytest.raises(ValueError, match=re.escape(words)):
        read_quantized(SETTINGS | dict(quantization_config=config), "config.json")


def test_a_users_wish_that_a_checkpoint_cannot_meet_is_refused():
    with pytest.raises(
        ValueError, match=r"must be one of \['fp8', 'int8'\] for a checkpoint of fl"
    ):
        read_quantized(SETTINGS, "config.json", "awq")
    few = SETTINGS | dict(quantization_config=of(BLOCK))
    with pytest.raises(ValueError, match=r"'int8' is not what config\.json says its weights are"):
        read_quantized(few, "config.json", "int8")
    odd = SETTINGS | dict(quantization_config=of(GPTQ, group_size=-1), intermediate_size=88)
    read_quantized(odd, "config.json", "gptq")
    odd |= dict(quantization_config=group(weights=dict(strategy="channel")), hidden_size=63)
    with pytest.raises(ValueError, match="int4 holds 2 weights in a byte, got 63 inputs along E"):
        read_quantized(odd, "config.json")


def first(value):
    """Returns what sets the first value of a tensor, in its bytes where they are of 8 bits."""

    def change(tensor):
        changed = tensor.copy()
        of = changed.view(np.uint8) if changed.itemsize == 1 else changed
        of.flat[0] = value
        return changed

    return change


nan = first(np.nan)


BAD_TENSORS = {
    "a block's scale": (BLOCK, {f"{UP}.weight_scale_inv": nan}, "1 of 12 scales that are NaN"),
    "a group's scale": (AWQ, {f"{UP}.scales": nan}, f"{UP}.scales holds 1 of 192 scales that are"),
    "a negative scale": (BLOCK, {f"{UP}.weight_scale_inv": first(-1)}, "1 of 12 scales that are"),
    "a channel's scale": (
        "compressed fp8 channels, by token", {f"{UP}.weight_scale": first(-1)}, "negative or all 0"
    ),
    "a tensor's scale": (
        "fp8 tensor, dynamic", {f"{UP}.weight_scale": np.zeros_like}, f"{UP}.weight_scale holds 1 "
    ),
    "an integer's scale": (
        "compressed int8 channels", {f"{UP}.weight_scale": np.zeros_like}, "infinite or all 0: do"
    ),
    "scales of zero": (GPTQ, {f"{UP}.scales": np.zeros_like}, f"{UP}.scales holds 192 of 192 sca"),
    "a code": (BLOCK, {f"{UP}.weight": first(0x7F)}, f"{UP}.weight holds NaN: download the check"),
    "a negative code": ("fp8 tensor, dynamic", {f"{UP}.weight": first(0xFF)}, "weight holds NaN"),
    "an exponent": (
        "compressed mxfp4", {f"{UP}.weight_scale": lambda x: x * 0 + 255}, "scales that are NaN"
    ),
    "a missing scale": (BLOCK, {f"{UP}.weight_scale_inv": None}, "weight_scale_inv [6, 2] is mis"),
    "floats": (
        BLOCK, {f"{UP}.weight": lambda x: x.astype(np.float32)},
        f"{UP}.weight in model.safetensors must be one of float8_e4m3fn, is float32",
    ),
    "words": (
        GPTQ, {f"{UP}.qweight": lambda x: x.astype(np.int64)}, "must be one of int32, is int64"
    ),
    "a cut tensor": (GPTQ, {f"{UP}.qweight": lambda x: x[1:].copy()}, "be [8, 96], is [7, 96]"),
    "inputs of two scales": (
        "fp8 tensor, static", {f"{K}.input_scale": lambda x: x * 2},
        f"input_scale of {K} and {Q} must be equal, as one product computes both",
    ),
    "inputs of scale 0": (
        "fp8 tensor, static", {f"{DOWN}.input_scale": lambda x: x * 0},
        f"{DOWN}.input_scale holds 1 of 1 scales that are NaN, infinite, negative or all 0",
    ),
    "a shape": (
        "compressed packed 4 bits", {f"{UP}.weight_shape": lambda x: x[::-1].copy()},
        f"{UP}.weight_shape must be [96, 64], got [64, 96]",
    ),
    "two orders": (
        "gptq, desc_act", {f"{K}.g_idx": np.zeros_like}, f"g_idx of {K}.g_idx and {Q}.g_idx must be"
    ),
    "a group of few inputs": (
        "gptq, desc_act", {f"{DOWN}.g_idx": lambda x: np.where(x == 2, 1, x)},
        f"{DOWN}.g_idx must name each group but the last 24 times, got group 1 48 times",
    ),
    "a group that is none": (
        "gptq, desc_act", {f"{DOWN}.g_idx": lambda x: x - 1}, "must name groups from 0 to 3, got"
    ),
    "groups in an order": (
        GPTQ, {f"{UP}.g_idx": lambda x: x[::-1].copy()}, f"{UP}.g_idx has groups that are no runs"
    ),
    "zero points": (
        GPTQ, {f"{UP}.qzeros": lambda x: x + 1}, f"{UP}.qzeros has zero points other than 8"
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", BAD_TENSORS)
def test_a_damaged_tensor_is_refused_by_name(tmp_path, what):
    format_, changes, words = BAD_TENSORS[what]
    settings, tensors, _ = quantized.written(format_)
    for name, change in changes.items():
        old = tensors.pop(name)
        if change is not None:
            tensors[name] = change(old)
    with pytest.raises(ValueError, match=re.escape(words)):
        read(quantized.save(tmp_path, settings, tensors), settings)


def read(folder, settings):
    model, config = read_quantized(settings, "config.json")
    return load_params(folder, model, config, dtype="float32", progress=False)


def test_scales_that_programs_do_write_are_read(tmp_path):
    """Negative ones of integers, as of AutoRound, and those that float16 rounds to 0."""
    settings, tensors, _ = quantized.written(GPTQ)
    scales = tensors[f"{DOWN}.scales"]
    scales[0, :2] = -0.25, 0
    scale = read(quantized.save(tmp_path, settings, tensors), settings).layers[0].down.scale
    np.testing.assert_array_equal(scale, scales.T.astype(np.float32))


def test_a_zero_point_past_8_bits_is_refused(tmp_path):
    settings, tensors, _ = quantized.written("gptq 8 bits")
    settings["quantization_config"] = of("gptq 8 bits", sym=False)
    tensors[f"{UP}.qzeros"] = np.full_like(tensors[f"{UP}.qzeros"], -1)
    with pytest.raises(
        ValueError, match=f"{UP}.qzeros has a zero point of 256, which 8 bits do no"
    ):
        read(quantized.save(tmp_path, settings, tensors), settings)


@pytest.mark.devices(2)
def test_blocks_that_devices_would_cut_are_refused():
    settings, *_ = quantized.written(BLOCK, SETTINGS | dict(num_attention_heads=8, vocab_size=64))
    model, config = read_quantized(settings, "config.json")
    words = "tensor_parallel_size=2 cuts intermediate_size=96 within runs of 32 weights that share"
    with pytest.raises(ValueError, match=words):
        shard(model, config, make_mesh(2))


def test_floats_are_rounded_for_their_own_format_alone(tmp_path):
    settings, tensors, _ = quantized.written(BLOCK)
    params = read(quantized.save(tmp_path, settings, tensors), settings)
    down = host_value(Linear, weight=params.layers[0].down.values(), bias=None)
    layer = host_value(type(params.layers[0]), **vars(params.layers[0]) | dict(down=down))
    floats = host_value(type(params), **vars(params) | dict(layers=(layer,)))
    with pytest.raises(ValueError, match="params hold float weights for a product in Scheme"):
        of_floats(floats, params)
    assert of_floats(params, params) is params or of_floats(params, params) == params


def test_the_memory_that_a_plan_counts_is_that_of_few_bits(tmp_path):
    settings, tensors, _ = quantized.written("awq")
    quantized.save(tmp_path, settings, tensors)
    loaded = load(tmp_path)
    down = loaded.params.layers[0].down
    assert down.weight.size == 64 * 96 // 2 and down.weight.dtype == np.uint8
    assert down.scale.shape == down.zero.shape == (64, 3)
