"""gpt-oss with experts in MXFP4, which stay in 4 bits."""

import json

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxrunner import LLM
from jaxrunner.loading.loader import load
from jaxrunner.loading.quantized import read_quantized
from jaxrunner.loading.weights import save_checkpoint
from tests.support.mixture_answers import PROMPTS, SIZES, greedy, logits_of, run, tokens

pytest.importorskip("torch", reason="the reference needs PyTorch: install the hf extra")
transformers = pytest.importorskip("transformers", reason="the reference needs transformers")
mixtures = pytest.importorskip("tests.support.mixtures", reason="it needs transformers")

MXFP4 = dict(quant_method="mxfp4", modules_to_not_convert=["model.layers.*.self_attn", "lm_head"])


def wider(tensors):
    """Returns the shapes of a tiny model's tensors with hidden states of 64 and experts of 32."""
    sizes: dict[int, int] = {36: 64, 44: 32, 88: 64}
    return {n: tuple(sizes.get(s, s) for s in map(int, t.shape)) for n, t in tensors.items()}


@pytest.mark.slow
def test_experts_in_4_bits_are_those_of_transformers(tmp_path):
    """gpt-oss as it is published, which transformers dequantises: weights, and 12 tokens each."""
    mixtures.model("gpt-oss").save_pretrained(tmp_path)
    tensors, rng = load_file(tmp_path / "model.safetensors"), np.random.default_rng(0)
    config = json.loads((tmp_path / "config.json").read_text())
    config |= dict(hidden_size=64, intermediate_size=32, quantization_config=MXFP4)
    for name, shape in wider(tensors).items():
        tensors[name] = 0.3 * rng.normal(size=shape).astype(np.float32)
    for name in [n for n in tensors if n.endswith(("gate_up_proj", "down_proj"))]:
        X, inner, out = tensors.pop(name).shape
        tensors[f"{name}_blocks"] = rng.integers(0, 256, (X, out, inner // 32, 16), np.uint8)
        tensors[f"{name}_scales"] = rng.integers(122, 127, (X, out, inner // 32), np.uint8)
    save_file(tensors, tmp_path / "model.safetensors", dict(format="pt"))
    (tmp_path / "config.json").write_text(json.dumps(config))
    theirs = transformers.GptOssForCausalLM.from_pretrained(tmp_path, dtype="float32")
    theirs.set_experts_implementation("eager")  # others have no float64
    loaded = load(tmp_path)
    for layer, own in zip(
        loaded.read_params(progress=False).layers, theirs.model.layers, strict=True
    ):
        both, down = layer.experts.gate_up, layer.experts.down
        assert down.weight.dtype == both.weight.dtype == np.uint8  # two numbers each
        gate_up, want = (
            w.detach().numpy().swapaxes(1, 2)
            for w in (own.mlp.experts.gate_up_proj, own.mlp.experts.down_proj)
        )
        np.testing.assert_array_equal(down.values(), want)
        np.testing.assert_array_equal(both.values()[:, 0], gate_up[:, ::2])
        np.testing.assert_array_equal(both.values()[:, 1], gate_up[:, 1::2])
    with LLM(str(tmp_path), **SIZES) as llm:
        found = tokens(greedy(llm, PROMPTS, 12))
    theirs.double()
    for prompt, new in zip(PROMPTS, found, strict=True):
        logits = logits_of(theirs, prompt + new)[len(prompt) - 1 : -1]
        assert new == logits.argmax(-1).tolist()
    ids = PROMPTS[-1]
    got = run(loaded.model, loaded.config, loaded.read_params(progress=False), jnp.asarray(ids))
    np.testing.assert_allclose(got, logits_of(theirs, ids), atol=1e-4)
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
