"""Quantised checkpoints as transformers writes them: settings, names of tensors, and values."""

import json
from typing import Any

import numpy as np
import pytest

from jaxrunner.loading import tensors
from jaxrunner.loading.quantized import read_quantized
from jaxrunner.loading.weights import load_params
from tests.outside import checkpoint
from tests.support import quantized
from tests.support.quantized import SETTINGS

torch: Any = pytest.importorskip("torch")
save_file: Any = pytest.importorskip("safetensors.torch").save_file
transformers: Any = pytest.importorskip("transformers")
fp8: Any = pytest.importorskip("transformers.integrations.finegrained_fp8")

CONFIGS = {
    "fp8": ("FineGrainedFP8Config", dict(weight_block_size=(16, 32))),
    "fp8, powers of two": (
        "FineGrainedFP8Config", dict(weight_block_size=(16, 32), scale_fmt="ue8m0"),
    ),
    "fp8, static": (
        "FineGrainedFP8Config", dict(weight_block_size=(16, 32), activation_scheme="static"),
    ),
    "fp8 tensor": ("FineGrainedFP8Config", dict(weight_block_size=None)),
    "fp8 tensor, static": (
        "FineGrainedFP8Config", dict(weight_block_size=None, activation_scheme="static"),
    ),
    "awq": ("AwqConfig", dict(group_size=32)),
    "awq without zero points": ("AwqConfig", dict(group_size=32, zero_point=False)),
    "gptq": ("GPTQConfig", dict(bits=4, group_size=32)),
    "gptq, desc_act": ("GPTQConfig", dict(bits=8, group_size=32, desc_act=True, sym=False)),
}  # fmt: skip
FP8 = [name for name in CONFIGS if name.startswith("fp8")]


def settings_of(name: str) -> dict[str, Any]:
    """Returns config.json with the settings that a class of transformers writes there."""
    kind, asked = CONFIGS[name]
    config = getattr(transformers, kind)(**asked).to_dict()
    return SETTINGS | dict(quantization_config=json.loads(json.dumps(config)))


@pytest.mark.parametrize("name", CONFIGS)
def test_settings_as_transformers_writes_them_are_read(name: str):
    _, config = read_quantized(settings_of(name), "config.json")
    assert vars(config)["method"].name == name.split()[0].rstrip(",")


@pytest.mark.parametrize("name", FP8)
def test_modules_of_transformers_are_read_as_it_dequantises_them(tmp_path: Any, name: str):
    settings = settings_of(name)
    asked = settings["quantization_config"]
    block, scheme = asked["weight_block_size"], asked["activation_scheme"]
    means = fp8.Fp8Dequantize(None)._dequantize_one
    _, _, floats = quantized.written("awq")
    stored, wanted = {name: torch.tensor(tensor) for name, tensor in floats.items()}, {}
    for at, (N, K) in quantized.modules(SETTINGS).items():
        module = fp8.FP8Linear(K, N, block, scheme, asked["scale_fmt"])
        module.weight.data = torch.tensor(checkpoint.weight(at, (N, K)) * 100).to(
            torch.float8_e4m3fn
        )
        scale = module.weight_scale_inv
        values = torch.tensor(0.01 + checkpoint.weight(f"{at}.", scale.shape) ** 2)
        scale.data = values.to(scale.dtype)
        del stored[f"{at}.weight"]
        stored |= {f"{at}.{key}": value for key, value in module.state_dict().items()}
        wanted[at] = means(module.weight.data, scale.data, torch.float32)
    save_file(stored, tmp_path / "model.safetensors")
    model, config = read_quantized(settings, "config.json")
    layer = load_params(tmp_path, model, config, dtype="float32", progress=False).layers[0]
    at = "model.layers.0.mlp."
    np.testing.assert_array_equal(layer.down.values(), wanted[f"{at}down_proj"])
    for i, part in enumerate(("gate", "up")):
        np.testing.assert_array_equal(layer.gate_up.values()[i], wanted[f"{at}{part}_proj"])
    held = layer.down.scheme.activation
    assert held is not None and held.static == (layer.down.input_scale is not None)
    assert held.static == (scheme == "static")


def test_scales_of_powers_of_two_are_taken_from_torch():
    kind = "float8_e8m0fnu"
    given = torch.tensor([0.5, 8.0]).to(torch.float8_e8m0fnu)
    got = tensors.read("weights", {"scale": given}, {"scale": (kind,)})["scale"]
    assert got.dtype == kind and got.astype(np.float32).tolist() == [0.5, 8.0]
