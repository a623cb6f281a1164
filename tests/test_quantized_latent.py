"""Quantised checkpoints of latent attention, one of whose matrices a family holds as floats."""

import re
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxrunner.loading.quantized import read_quantized
from jaxrunner.loading.weights import load_params, with_tensors
from jaxrunner.models.mixtures.deepseek import deepseek_v3
from jaxrunner.quantization.quantized_linear import QuantizedLinear
from tests.outside import checkpoint
from tests.support import quantized

torch: Any = pytest.importorskip("torch")
transformers: Any = pytest.importorskip("transformers")

H, RANK, STILL, VALUE = 4, 32, 16, 40
SETTINGS: dict[str, Any] = dict(
    architectures=["DeepseekV3ForCausalLM"], model_type="deepseek_v3", hidden_size=64,
    intermediate_size=96, moe_intermediate_size=32, num_hidden_layers=2, num_attention_heads=H,
    num_key_value_heads=H, vocab_size=62, max_position_embeddings=64, rms_norm_eps=1e-5,
    tie_word_embeddings=False, dtype="float32", n_routed_experts=4, num_experts_per_tok=2,
    n_shared_experts=1, first_k_dense_replace=1, routed_scaling_factor=1.7, n_group=2,
    topk_group=1, kv_lora_rank=RANK, q_lora_rank=64, qk_nope_head_dim=STILL, qk_rope_head_dim=8,
    v_head_dim=VALUE, attention_bias=False, rope_theta=10000.0,
)  # fmt: skip
# Of each method one; others differ in tensors that products share.
FORMATS = (
    "fp8 blocks", "fp8 blocks across heads, ragged", "fp8 tensor of transformers, static",
    "compressed packed 4 bits, zero points, order", "compressed packed 8 bits", "awq",
    "gptq, desc_act", "compressed mxfp4",
)  # fmt: skip
IDS = np.random.default_rng(0).integers(0, 62, 19)


def made(format_: str, **changes: int) -> Any:
    own = SETTINGS | changes
    settings, tensors, floats = quantized.written_by_sources(format_, deepseek_v3, own)
    config = settings["quantization_config"]
    if config["quant_method"] == "fp8":  # so that products are those of floats
        settings["quantization_config"] = config | dict(activation_scheme="none")
    return settings, tensors, floats


def load(folder: Any, settings: Any, tensors: Any, dtype: str = "float32") -> Any:
    quantized.save(folder, settings, tensors)
    model, config = read_quantized(settings, "config.json")
    return model, config, load_params(folder, model, config, dtype=dtype, progress=False)


def module_of(folder: Any, settings: Any, floats: Any) -> Any:
    """Returns the module of transformers with these weights."""
    quantized.save(folder, settings, floats)
    kind = transformers.DeepseekV3ForCausalLM
    module = kind.from_pretrained(folder, dtype=torch.float32).eval()
    module.set_experts_implementation("eager")
    return module


@pytest.mark.parametrize("format_", FORMATS)
def test_the_absorbed_matrix_is_what_its_numbers_stand_for(tmp_path: Any, format_: str):
    settings, tensors, floats = made(format_)
    _, _, params = load(tmp_path, settings, tensors, "bfloat16")
    for i, layer in enumerate(params.layers):
        assert isinstance(layer.kv_down, QuantizedLinear)
        stored = floats[f"model.layers.{i}.self_attn.kv_b_proj.weight"]
        want = stored.reshape(H, STILL + VALUE, RANK).swapaxes(0, 1)
        np.testing.assert_array_equal(layer.kv_up, want.astype(jnp.bfloat16))


@pytest.mark.parametrize("format_", FORMATS)
def test_logits_are_those_of_transformers_with_the_weights_that_are_meant(
    tmp_path: Any, format_: str
):
    settings, tensors, floats = made(format_)
    model, config, params = load(tmp_path / "few", settings, tensors)
    got = quantized.logits(model, config, params, jnp.asarray(IDS, jnp.int32))
    own = {name: value for name, value in settings.items() if name != "quantization_config"}
    reference = module_of(tmp_path / "float", own, floats)
    with torch.no_grad():
        want = reference(torch.tensor(IDS)[None]).logits[0].numpy()
    assert want.std() > 1
    np.testing.assert_allclose(got, want, atol=2e-4 * want.std())


def test_float_checkpoints_keep_it_as_it_is(tmp_path: Any):
    settings, _, floats = made("awq")
    del settings["quantization_config"]
    quantized.save(tmp_path, settings, floats)
    model, config = read_quantized(settings, "config.json", "int8")
    layer = load_params(tmp_path, model, config, dtype="float32", progress=False).layers[0]
    stored = floats["model.layers.0.self_attn.kv_b_proj.weight"]
    want = stored.reshape(H, STILL + VALUE, RANK).swapaxes(0, 1)
    np.testing.assert_array_equal(layer.kv_up, want)
    assert isinstance(layer.o, QuantizedLinear)


def test_new_weights_of_it_come_together(tmp_path: Any):
    settings, tensors, _ = made("fp8 blocks")
    model, config, params = load(tmp_path, settings, tensors)
    at = "model.layers.0.self_attn.kv_b_proj.weight"
    new = {name: tensors[name] for name in (at, f"{at}_scale_inv")}
    new[f"{at}_scale_inv"] = new[f"{at}_scale_inv"] * np.float32(2)
    after = with_tensors(model, config, params, new)
    np.testing.assert_array_equal(after.layers[0].kv_up, 2 * params.layers[0].kv_up)
    with pytest.raises(ValueError, match=re.escape("kv_up does not hold the tensors that it was")):
        with_tensors(model, config, params, {at: tensors[at]})


def test_blocks_that_rotated_dimensions_lie_across_are_refused(tmp_path: Any):
    settings, tensors, _ = made("fp8 blocks")
    settings["quantization_config"] |= dict(weight_block_size=[4, 32])
    for name in [name for name in tensors if name.endswith("_scale_inv")]:
        N, K = tensors[name.removesuffix("_scale_inv")].shape
        values = np.random.default_rng(N).uniform(0.1, 1, (-(-N // 4), -(-K // 32)))
        tensors[name] = values.astype(np.float32)
    with pytest.raises(ValueError, match=r"q_b_proj has blocks of 4 outputs that lie in another"):
        load(tmp_path, settings, tensors)


@pytest.mark.slow
@pytest.mark.devices(2)
def test_tokens_are_those_of_the_floats_on_one_device_and_on_two(tmp_path: Any):
    sizes = dict(intermediate_size=128, moe_intermediate_size=64)  # in whole groups on each
    settings, tensors, floats = made("awq", **sizes)
    few = quantized.save(tmp_path / "few", settings, tensors)
    del settings["quantization_config"]
    reference = module_of(tmp_path / "float", settings, floats)
    asked = checkpoint.prompts(5, 9, 7)
    for num_devices in (1, 2):
        with checkpoint.start(few, tensor_parallel_size=num_devices) as llm:
            told = checkpoint.answers(llm, asked, checkpoint.greedy(6))
        for prompt, tokens in zip(asked, told, strict=True):
            with torch.no_grad():
                logits = reference(torch.tensor([prompt + tokens])).logits[0].numpy()
            assert tokens == logits[len(prompt) - 1 : -1].argmax(-1).tolist()
            assert len(tokens) == 6
