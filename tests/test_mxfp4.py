"""gpt-oss with experts in MXFP4, which stay in 4 bits."""

from dataclasses import replace
import json
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxrunner import LLM
from jaxrunner.loading.loader import load
from jaxrunner.loading.quantized import read_quantized
from jaxrunner.loading.weights import save_checkpoint
from jaxrunner.mixtures.experts import Experts
from jaxrunner.quantization.quantized_config import plain_config
from tests.support.mixture_answers import PROMPTS, SIZES, greedy, run, tokens

pytest.importorskip("torch", reason="the reference needs PyTorch: install the hf extra")
mixtures = pytest.importorskip("tests.support.mixtures", reason="it needs transformers")

MXFP4 = dict(quant_method="mxfp4", modules_to_not_convert=["model.layers.*.self_attn", "lm_head"])


def widened(params):
    """Returns weights whose experts are the numbers that those of 4 bits stand for."""

    def one(layer):
        few = layer.experts
        products = {name: getattr(few, name).values() for name in ("gate_up", "down")}
        return replace(layer, experts=Experts(**vars(few) | products))

    return replace(params, layers=tuple(map(one, params.layers)))


def wider(tensors):
    """Returns the shapes of a tiny model's tensors with hidden states of 64 and experts of 32."""
    sizes: dict[int, int] = {36: 64, 44: 32, 88: 64}
    return {n: tuple(sizes.get(s, s) for s in map(int, t.shape)) for n, t in tensors.items()}


@pytest.mark.slow
def test_experts_in_4_bits_are_read(tmp_path):
    """gpt-oss as it is published: the weights are the products of the numbers in its files."""
    mixtures.model("gpt-oss").save_pretrained(tmp_path)
    tensors, rng = load_file(tmp_path / "model.safetensors"), np.random.default_rng(0)
    config = json.loads((tmp_path / "config.json").read_text())
    config |= dict(hidden_size=64, intermediate_size=32, quantization_config=MXFP4)
    for name, shape in wider(tensors).items():
        tensors[name] = rng.normal(size=shape).astype(np.float32)
    want = {}
    for name in [n for n in tensors if n.endswith(("gate_up_proj", "down_proj"))]:
        X, inner, out = tensors.pop(name).shape
        codes = rng.integers(0, 16, (X, out, inner // 32, 32), np.uint8)
        scales = rng.integers(115, 130, (X, out, inner // 32), np.uint8)
        tensors[f"{name}_blocks"] = codes[..., ::2] | codes[..., 1::2] << 4
        tensors[f"{name}_scales"] = scales
        sign, exponent, half = codes >> 3, codes >> 1 & 3, codes & 1
        value = np.where(exponent == 0, half / 2, 2.0 ** (exponent - 1.0) * (1 + half / 2))
        value = (1 - 2.0 * sign) * value * 2.0 ** (scales[..., None] - 127.0)
        want[name] = value.reshape(X, out, inner)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))
    loaded = load(tmp_path)
    for i, layer in enumerate(loaded.read_params(progress=False).layers):
        at = f"model.layers.{i}.mlp.experts."
        gate_up = want[f"{at}gate_up_proj"]
        down, both = layer.experts.down, layer.experts.gate_up
        assert down.weight.dtype == both.weight.dtype == np.uint8  # two numbers each
        np.testing.assert_array_equal(down.values(), want[f"{at}down_proj"])
        np.testing.assert_array_equal(both.values()[:, 0], gate_up[:, ::2])
        np.testing.assert_array_equal(both.values()[:, 1], gate_up[:, 1::2])
    ids = jnp.asarray(PROMPTS[5])
    got = run(loaded.model, loaded.config, loaded.read_params(progress=False), ids)
    floats = plain_config(loaded.config), widened(loaded.read_params(progress=False))
    np.testing.assert_allclose(got, run(loaded.model, *floats, ids), atol=1e-4, rtol=1e-4)
    sizes: dict[str, Any] = SIZES | dict(max_num_seqs=1, decode_buckets=(1,))
    with LLM(str(tmp_path), **sizes) as llm:
        (output,) = tokens(greedy(llm, [PROMPTS[5]], 4))
    logits = run(loaded.model, *floats, jnp.asarray(PROMPTS[5] + output))
    assert output == logits[len(PROMPTS[5]) - 1 : -1].argmax(-1).tolist()
    name = "model.layers.1.mlp.experts.down_proj_scales"
    save_file(tensors | {name: np.full_like(tensors[name], 255)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=f"{name} holds .* scales that are NaN"):
        loaded.read_params(progress=False)
    save_file(tensors, tmp_path / "model.safetensors")
    words = "tensors that it was made of.*gate_up_proj_blocks"
    with pytest.raises(ValueError, match=words):
        params = loaded.read_params(progress=False)
        save_checkpoint(tmp_path / "x", loaded.model, loaded.config, params, config)


def test_sizes_that_runs_do_not_divide_are_refused():
    told = json.loads(mixtures.model("gpt-oss").config.to_json_string())
    told |= dict(quantization_config=MXFP4, architectures=["GptOssForCausalLM"])
    model, config = read_quantized(told, "config.json")
    match = "gate_up_proj must have inputs in runs of 32, as MXFP4 has scales, got 36"
    with pytest.raises(ValueError, match=match):
        model.sources(config)
