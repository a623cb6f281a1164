"""Dense families: shards, what kernels run, weights that are read and saved."""

from collections.abc import Iterator, Sequence
import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from jaxrunner import LLM, SamplingParams, pytree
from jaxrunner.device.operations import operations
from jaxrunner.device.program_key import Key
from jaxrunner.hf_config import Settings
from jaxrunner.loading.weights import load_params, save_checkpoint
from jaxrunner.models.blocks.description import BlockConfig
from jaxrunner.models.registry import read_model
from jaxrunner.ops import backends
from jaxrunner.ops.backends import dense
from jaxrunner.program.bucket import Bucket
from jaxrunner.program.program import Program
from jaxrunner.sampling import RULES
from tests.support import dense_families, tiny
from tests.support.lowering import cuda, lowers

LENGTHS = (1, 9, 16, 33, 60)  # windows hold 9 tokens, blocks 8, a step 64
ON_SHARDS = (
    "command r7b",
    "gpt 2",
    "gemma 3",
    "phi 4 mini",
    "glm 4, 0414",
    "starcoder 2",
    "pythia",
    "olmo 2, one key",
)
LARGE = dict(hidden_size=1024, intermediate_size=3072, num_attention_heads=8, head_dim=128)
SIZES: dict[str, Any] = dict(
    skip_tokenizer_init=True, dtype="float32", max_model_len=128, block_size=8, num_blocks=400,
    max_num_seqs=16, max_num_batched_tokens=64, token_buckets=(64,), decode_buckets=(16,),
    warm_up=False,
)  # fmt: skip


def prompts(lengths: Sequence[int]) -> list[list[int]]:
    return [np.random.default_rng(n).integers(0, 61, n).tolist() for n in lengths]


def generate(llm: LLM, asked: list[list[int]], max_tokens: int) -> list[Any]:
    greedy = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    return llm.generate([dict(prompt_token_ids=ids) for ids in asked], greedy, use_tqdm=False)


def tokens(outputs: list[Any]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


def behind(module: Any, asked: list[list[int]], told: list[list[int]]) -> Iterator[np.ndarray]:
    """Yields what transformers makes of each request: the logits of its tokens, [N, V]."""
    texts = [prompt + new for prompt, new in zip(asked, told, strict=True)]
    # LongRoPE turns short sequences otherwise: transformers asks for the longest of a batch.
    halves = [text for text in texts if len(text) <= 32], [text for text in texts if len(text) > 32]
    found = {
        tuple(text): logits
        for half in halves
        if half
        for text, logits in zip(half, dense_families.logits(module, half), strict=True)
    }
    for prompt, text in zip(asked, texts, strict=True):
        yield found[tuple(text)][len(prompt) - 1 : -1]


@pytest.mark.slow
@pytest.mark.devices(2)
@pytest.mark.parametrize("variant", ON_SHARDS)
def test_two_devices_tell_the_tokens_of_transformers(variant, tmp_path):
    module, asked = dense_families.save(variant, tmp_path), prompts(LENGTHS)
    with LLM(tmp_path, tensor_parallel_size=2, **SIZES) as llm:
        told = tokens(generate(llm, asked, 12))
    assert told == [logits.argmax(-1).tolist() for logits in behind(module, asked, told)]


# What runs an operation on a GPU, in bfloat16, for 64 requests; "" where it is not asked for.
ROPE, NORM, MLP = "rope_write", "add_rms_norm", "gated_mlp"
RUNS = {
    "phi 3": (ROPE, NORM, MLP),
    "granite 3": (ROPE, NORM, MLP),
    "olmo 2": ("", NORM, MLP),  # whose one norm is that behind the last layer
    "ministral 3": ("", NORM, MLP),
    "command r7b": (ROPE, "", MLP),
    "gemma 2": (ROPE, NORM, MLP),
    "gemma 3": (ROPE, NORM, MLP),
    "pythia": (ROPE, "", ""),
}


@lowers
@pytest.mark.parametrize("variant", RUNS)
def test_kernels_run_where_their_maths_is_the_familys(variant):
    keys = LARGE | dict(num_key_value_heads=8 if variant == "pythia" else 4)
    model, config = read_model(Settings(dense_families.settings(variant) | keys))
    assert isinstance(config, BlockConfig)
    engine = tiny.engine_config(block_size=64, dtype="bfloat16", kv_dtype="bfloat16")
    params = pytree.abstract(model.params, config.dims | dict(param=jnp.dtype("bfloat16")))
    program = Program(model, config, engine, backends.fused, RULES)
    with cuda():
        told = operations(program, params, Key("step", Bucket(64, 64, 1)))
    names = {one.operation: one.name for one in told}
    assert tuple(names.get(x, "") for x in ("rotate and write", "add_norm", "mlp")) == RUNS[variant]
    assert names["attention"] == "decode_attention"


def test_unknown_extras_are_refused():
    model, config = read_model(Settings(dense_families.settings("gemma 2")))
    params = pytree.abstract(model.params, config.dims | dict(param=jnp.dtype("float32")))
    run = functools.partial(model.layers, config, kv=(), inputs=None, ops=dense(1), extras=("x",))
    with pytest.raises(ValueError, match=r"extras .* are none of these layers': take some of"):
        run(params, None)


def read_file(folder: Path) -> dict[str, np.ndarray]:
    return safetensors.numpy.load_file(folder / "model.safetensors")


@pytest.mark.parametrize("variant", ["gpt 2", "pythia", "glm 4, 0414", "phi 3", "olmo 2"])
def test_weights_are_saved_as_they_were_read(variant, tmp_path):
    """Turned dimensions lie in another order here, and products are packed."""
    dense_families.save(variant, tmp_path)
    model, config = read_model(Settings(dense_families.settings(variant)))
    params = load_params(tmp_path, model, config, dtype="float32", progress=False)
    save_checkpoint(tmp_path / "again", model, config, params, {})
    want, got = read_file(tmp_path), read_file(tmp_path / "again")
    assert want.keys() == got.keys() and all((want[name] == got[name]).all() for name in want)


def test_names_without_their_beginning_and_masks_are_read(tmp_path):
    """As the first checkpoints of GPT-2 have them."""
    dense_families.save("gpt 2", tmp_path)
    model, config = read_model(Settings(dense_families.settings("gpt 2")))
    want = load_params(tmp_path, model, config, dtype="float32", progress=False)
    short = {name.removeprefix("transformer."): x for name, x in read_file(tmp_path).items()}
    short |= {f"h.{i}.attn.bias": np.ones((1, 1, 128, 128), np.uint8) for i in range(2)}
    safetensors.numpy.save_file(short, tmp_path / "model.safetensors")
    got = load_params(tmp_path, model, config, dtype="float32", progress=False)
    assert all(map(np.array_equal, jax.tree.leaves(want), jax.tree.leaves(got)))
