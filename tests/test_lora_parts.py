"""Adapters with other parts of an engine: meshes, drafts, several steps, quantised weights."""

import functools
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxrunner import LoRARequest, pytree
from jaxrunner.device.operations import operations
from jaxrunner.device.program_key import Key
from jaxrunner.lora.products import find_products
from jaxrunner.lora.table import ADAPTERS
from jaxrunner.models.llama import llama
from jaxrunner.ops import backends
from jaxrunner.ops.adapters.adapted import adapted
from jaxrunner.program.bucket import Bucket
from jaxrunner.program.program import Program
from jaxrunner.sampling import RULES
from tests.outside import checkpoint, float64_llama
from tests.support import lora, tiny
from tests.support.lowering import cuda, lowers

SETTINGS: dict[str, Any] = checkpoint.LLAMA | dict(
    architectures=["LlamaForCausalLM"], hidden_size=24, intermediate_size=32, vocab_size=64,
    num_attention_heads=4, num_key_value_heads=1,
)  # fmt: skip
PROMPTS = checkpoint.prompts(5, 11, 7)
SIZES: dict[str, Any] = dict(enable_lora=True, max_loras=2, max_lora_rank=8)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder of a checkpoint, its tensors, and two adapters as PEFT has them."""
    folder = tmp_path_factory.mktemp("lora")
    base = checkpoint.write(folder, llama, SETTINGS)
    return folder, base, [lora.make(base, 1, rank=5), lora.make(base, 2, targets=("up_proj",))]


def greedy(tensors, prompt, count=8):
    of = functools.partial(float64_llama.logits, tensors, SETTINGS)
    return float64_llama.greedy(of, prompt, count)


def rounded(tensors):
    """Returns the weights that fp8 with a scale for each output makes of a model's products."""

    def one(name, tensor):
        if "_proj" not in name:
            return tensor
        scale = np.abs(tensor).max(1, keepdims=True) / np.float32(448)
        return (tensor / scale).astype(ml_dtypes.float8_e4m3fn).astype(np.float64) * scale

    return {name: one(name, tensor) for name, tensor in tensors.items()}


PARTS: dict[str, dict[str, Any]] = {
    "drafts and several steps": dict(
        num_decode_steps=2, max_num_batched_tokens=16, token_buckets=(16,),
        speculative_config=dict(method="draft_model", num_speculative_tokens=2),
    ),
    "fp8": dict(quantization="fp8"),
    "two engines, a KV head on both devices of each": dict(
        data_parallel_size=2, tensor_parallel_size=2
    ),
    "two stages": dict(pipeline_parallel_size=2),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    "part",
    [pytest.param(p, marks=[pytest.mark.devices(4)] * p.startswith("two")) for p in PARTS],
)
def test_tokens_are_those_of_merged_models(saved, part):
    folder, base, made = saved
    options: dict[str, Any] = dict(PARTS[part])
    if "speculative_config" in options:
        options["speculative_config"] = options["speculative_config"] | dict(model=str(folder))
    tensors = rounded(base) if part == "fp8" else base
    with checkpoint.start(folder, **SIZES | options) as llm:
        asked = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
        requests = [
            LoRARequest(f"{i}", i, lora_tensors=of[0], lora_config=of[1])
            for i, of in enumerate(made, 1)
        ]
        outputs = llm.generate(
            asked, checkpoint.greedy(8), lora_request=[*requests, None], use_tqdm=False
        )
        got = [list(output.outputs[0].token_ids) for output in outputs]
        if part == "two stages":  # the last one's head is the model's
            params = checkpoint.greedy(8, prompt_logprobs=0)
            again = llm.generate(asked, params, lora_request=[*requests, None], use_tqdm=False)
            assert got == [list(output.outputs[0].token_ids) for output in again]
        if part == "fp8":
            with pytest.raises(ValueError, match="has weights of QuantizedLinear, no adapter can"):
                llm.merge_lora(1)
    want = [greedy(lora.merge(tensors, *of), p) for of, p in zip(made, PROMPTS, strict=False)]
    assert got == [*want, greedy(tensors, PROMPTS[2])]


@lowers
def test_base_products_stay_with_their_kernels():
    """A step with adapters is the kernels of one without, but for the MLP's, which is split, and
    kernels of what the adapters add."""
    sizes = dict(hidden_size=4096, intermediate_size=14336, num_attention_heads=32, head_dim=128)
    config = tiny.config(**sizes, num_key_value_heads=8)
    given: dict[str, Any] = dict(SIZES, block_size=64, max_lora_rank=16)
    engine = tiny.engine_config(dtype="bfloat16", kv_dtype="bfloat16", **given)
    params = pytree.abstract(llama.params, config.dims | dict(param=jnp.dtype("bfloat16")))
    model = llama._replace(tables=(ADAPTERS,))
    program = Program(
        model, config, engine, adapted(backends.fused), RULES, lora=find_products(model, config)
    )

    def told(bucket: Bucket) -> dict[str, str]:
        with cuda():
            found = operations(program, params, Key("step", bucket))
        return {one.operation: one.name for one in found}

    without, adapters = told(Bucket(64, 64, 1)), told(Bucket(64, 64, 1, lora=True))
    assert without == dict(
        add_norm="add_rms_norm", linear="matmul", attention="decode_attention",
        mlp="gated_mlp", project="plain JAX in parts",
    ) | {"rotate and write": "rope_write"}  # fmt: skip
    without.pop("mlp")
    own = {
        "linear with adapters": "a product, then adapters",
        "adapters": "lora_shrink, lora_expand",
        "project with adapters": "lora_shrink, add_rms_norm",
        "units": "lora_shrink, lora_units",
    }
    assert adapters == without | own
    assert told(Bucket(1024, 8, lora=True))["units"] == "prefill_units"
    few = told(Bucket(8, 8, 1, lora=True))
    for name in ("linear with adapters", "project with adapters"):
        assert few[name] == "lora_shrink, lora_expand of parts"
