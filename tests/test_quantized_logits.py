"""Whole models in each format of quantised weights, against transformers with what they stand for.

It holds float weights, which the formats' definitions make, in float64, and rounds the inputs of
products as these say.
"""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrunner.loading.quantized import read_quantized
from jaxrunner.loading.weights import load_params
from jaxrunner.quantization.scheme import Activation
from tests.support import quantized
from tests.support.quantized_formats import FORMATS, compressed, gptq
from tests.support.rounded_inputs import rounded

torch: Any = pytest.importorskip("torch")
transformers: Any = pytest.importorskip("transformers")

DENSE: dict[str, Any] = quantized.SETTINGS | dict(
    model_type="llama", num_hidden_layers=2, num_attention_heads=4, head_dim=24
)  # fmt: skip
MIXTURE = DENSE | dict(
    architectures=["Qwen3MoeForCausalLM"], model_type="qwen3_moe", num_experts=5,
    num_experts_per_tok=2, moe_intermediate_size=DENSE["intermediate_size"], norm_topk_prob=True,
)  # fmt: skip
IDS = np.random.default_rng(0).integers(0, DENSE["vocab_size"], 19)
E4M3 = "float8_e4m3fn"
CLOSE = 5e-5  # of float32, in the deviation of logits
# A GPU divides less exactly: an input between two numbers of 8 bits may become the other one.
OTHER = CLOSE if jax.default_backend() == "cpu" else 1e-2
ROUNDED = {
    "fp8 blocks": Activation(E4M3, group=32),
    "fp8 blocks, static": Activation(E4M3, static=True),
    "fp8 tensor, dynamic": Activation(E4M3),
    "fp8 tensor, static": Activation(E4M3, static=True),
    "fp8 tensor of transformers, static": Activation(E4M3, static=True),
    "compressed fp8 tensor, static": Activation(E4M3, static=True),
    "compressed fp8 channels, by token": Activation(E4M3),
    "compressed fp8 blocks, by group": Activation(E4M3, group=32),
    "compressed int8 channels, by token": Activation("int8"),
}
PACKED = FORMATS["compressed packed 4 bits"][0]["config_groups"]["group_0"]
EIGHT = FORMATS["compressed packed 8 bits"][0]["config_groups"]["group_0"]
# By name: a format, more of quantization_config, the modules that it means, and how these are held
# where they are no floats.
EXCLUDED: dict[str, tuple[str, dict[str, Any], str, Any]] = {
    "fp8, modules": (
        "fp8 blocks across heads, ragged",
        dict(modules_to_not_convert=["lm_head", "model.layers.0.self_attn", "down_proj"]),
        r"0\.self_attn|down_proj", None,
    ),
    "fp8, layers": (
        "fp8 blocks across heads, ragged",
        dict(ignored_layers=[f"model.layers.1.mlp.{x}_proj" for x in ("gate", "up")]),
        r"1\.mlp\.(gate|up)", None,
    ),
    "awq, parts of names": (
        "awq", dict(modules_to_not_convert=["ers.1.self", "down"]), r"1\.self_attn|down_proj", None,
    ),
    "gptq, excluded": (
        "gptq v1", dict(dynamic={"-:.*down_proj": {}, r"-:model\.layers\.0\.self_attn": {}}),
        r"0\.self_attn|down_proj", None,
    ),
    "gptq, bits of modules": (
        "gptq v1", dict(dynamic={r"+:.*\.mlp\.": dict(bits=8, group_size=16, sym=False)}),
        r"\.mlp\.", functools.partial(gptq, bits=8, size=16, sym=False, v1=True),
    ),
    "gptq, modules of a block": (
        "gptq v1", dict(modules_in_block_to_quantize=[
            [f"self_attn.{x}_proj" for x in "qkv"], ["mlp.down_proj"],
        ]),
        r"o_proj|gate_proj|up_proj", None,
    ),
    "compressed, targets, actorder static": (
        "compressed packed 4 bits",
        dict(config_groups=dict(group_0=PACKED | dict(
            targets=["re:.*self_attn"], weights=PACKED["weights"] | dict(actorder="static"),
        ))),
        r"\.mlp\.", None,
    ),
    "compressed, two groups": (
        "compressed packed 4 bits",
        dict(config_groups=dict(
            group_0=PACKED, group_1=EIGHT | dict(targets=[r"re:.*1\.mlp\.down_proj"])
        )),
        r"1\.mlp\.down_proj",
        functools.partial(compressed, bits=8, size=0, zero=False, ordered=False),
    ),
    "compressed, ignored": (
        "compressed packed 4 bits", dict(ignore=["lm_head", "model.layers.0.mlp.down_proj"]),
        r"0\.mlp\.down_proj", None,
    ),
}  # fmt: skip
OF_EXPERTS = [name for name in FORMATS if name not in ROUNDED]  # whose inputs no module reads


def ours(
    folder: Any, format_: str, dims: dict[str, Any], change: Any = lambda *made: made
) -> tuple[np.ndarray, Any, Any]:
    """Returns the logits of a checkpoint, its tensors, and the float weights that are meant."""
    settings, tensors, floats = change(*quantized.written(format_, dims))
    quantized.save(folder, settings, tensors)
    model, config = read_quantized(settings, "config.json")
    params = load_params(folder, model, config, dtype="float32", progress=False)
    return quantized.logits(model, config, params, jnp.asarray(IDS, jnp.int32)), tensors, floats


def reference(folder: Any, dims: dict[str, Any], floats: Any) -> Any:
    """Returns transformers' model of float weights."""
    quantized.save(folder, dims, floats)
    (kind,) = dims["architectures"]
    model = getattr(transformers, kind).from_pretrained(folder, dtype=torch.float64)
    model.set_experts_implementation("eager")  # others have no float64
    return model.eval()


def run(model: Any) -> np.ndarray:
    with torch.no_grad():
        return model(torch.tensor(IDS)[None]).logits[0].numpy()


def round_inputs(model: Any, activation: Activation, tensors: Any) -> None:
    """Makes products of a model round what they read. tensors: with the scales of static ones."""

    def before(scale: Any, _: Any, inputs: Any) -> Any:
        return torch.from_numpy(rounded(inputs[0][0].numpy(), activation, scale))[None]

    for name in quantized.modules(DENSE):
        told = [tensors.get(f"{name}.{kind}_scale") for kind in ("input", "activation")]
        scale = next((scale.reshape(()) for scale in told if scale is not None), None)
        hook = functools.partial(before, scale)
        model.get_submodule(name).register_forward_pre_hook(hook)


@pytest.mark.parametrize("format_", FORMATS)
def test_logits_are_those_of_what_the_weights_stand_for(tmp_path: Any, format_: str):
    got, tensors, floats = ours(tmp_path / "few", format_, DENSE)
    model = reference(tmp_path / "float", DENSE, floats)
    want, close = run(model), CLOSE
    if format_ in ROUNDED:
        plain, close = want, OTHER
        round_inputs(model, ROUNDED[format_], tensors)
        want = run(model)
        assert abs(want - plain).max() > 0.1 * want.std()
    np.testing.assert_allclose(got, want, rtol=0, atol=close * want.std())


@pytest.mark.parametrize("name", EXCLUDED)
def test_a_list_of_modules_says_which_are_quantised_and_how(tmp_path: Any, name: str):
    format_, asked, part, writer = EXCLUDED[name]

    def change(settings: Any, tensors: Any, floats: Any) -> Any:
        """Has `part` of the modules as floats, or as another writer makes them."""
        held = settings["quantization_config"] | asked
        own = {at: shape for at, shape in quantized.modules(DENSE).items() if re.search(part, at)}
        kept = {at: x for at, x in tensors.items() if at.rpartition(".")[0] not in own}
        made = meant = {f"{at}.weight": floats[f"{at}.weight"] for at in own}
        if writer is not None:
            made, meant = quantized.with_few({}, own, writer)
        return settings | dict(quantization_config=held), kept | made, floats | meant

    got, _, floats = ours(tmp_path / "few", format_, DENSE, change)
    want = run(reference(tmp_path / "float", DENSE, floats))
    np.testing.assert_allclose(got, want, rtol=0, atol=CLOSE * want.std())


@pytest.mark.parametrize(
    "format_", ["compressed fp8 tensor, static", "compressed fp8 channels, by token"]
)
def test_logits_are_those_of_compressed_tensors(tmp_path: Any, format_: str):
    """Which reads config.json and all tensors, and rounds inputs; int8 ones it divides by 127.5."""
    pytest.importorskip("compressed_tensors", reason="install the hf extra")
    got, _, _ = ours(tmp_path, format_, DENSE)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    want = run(model.eval())
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-3 * want.std())


@pytest.mark.slow
@pytest.mark.parametrize("format_", OF_EXPERTS)
def test_logits_of_mixtures_are_those_of_what_the_weights_stand_for(tmp_path: Any, format_: str):
    got, _, floats = ours(tmp_path / "few", format_, MIXTURE)
    want = run(reference(tmp_path / "float", MIXTURE, floats))
    np.testing.assert_allclose(got, want, rtol=0, atol=CLOSE * want.std())
