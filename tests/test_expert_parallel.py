"""Whole experts on devices of their own: the tokens are those of one device."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrunner import LLM, SamplingParams
from jaxrunner.hf_config import Settings
from jaxrunner.mixtures.experts import Routes
from jaxrunner.model import Ops
from jaxrunner.models.registry import read_model
from jaxrunner.operation import Note, unnoted
from jaxrunner.parallel.mesh import make_mesh
from jaxrunner.parallel.parallel_config import ParallelConfig
from jaxrunner.parallel.tensor import all_reduce_ops, shard
from jaxrunner.types import Batch

pytest.importorskip("torch", reason="the checkpoints need PyTorch: install the hf extra")
pytest.importorskip("transformers", reason="the checkpoints need transformers")

PROMPTS = [np.random.default_rng(n).integers(1, 62, n).tolist() for n in (1, 5, 17, 40)]
SIZES: dict[str, Any] = dict(
    max_num_batched_tokens=64, max_num_seqs=8, max_model_len=128, block_size=8, num_blocks=200,
    token_buckets=(64,), decode_buckets=(8,), skip_tokenizer_init=True, warm_up=False,
    cache_dir=None,
)  # fmt: skip
DENSE = dict(
    architectures=["LlamaForCausalLM"], vocab_size=64, hidden_size=16, intermediate_size=32,
    num_hidden_layers=1, num_attention_heads=2, max_position_embeddings=64, hidden_act="silu",
)  # fmt: skip
MIXTURE = DENSE | dict(
    architectures=["Qwen3MoeForCausalLM"], num_experts=7, num_experts_per_tok=2,
    moe_intermediate_size=16,
)  # fmt: skip
PARAMS = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True, detokenize=False)


def generate(llm: LLM) -> list[list[int]]:
    outputs = llm.generate([dict(prompt_token_ids=p) for p in PROMPTS], PARAMS, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.mark.devices(2)
def test_tokens_are_those_of_one_device(tmp_path):
    """Of experts with biases; shared ones, which are cut, are in `test_mesh_mixtures.py`."""
    from tests.support import mixtures

    mixtures.model("gpt-oss").save_pretrained(tmp_path)
    with LLM(str(tmp_path), **SIZES) as llm:
        want = generate(llm)
    two: dict[str, Any] = dict(tensor_parallel_size=2, enable_expert_parallel=True)
    with LLM(str(tmp_path), **SIZES | two) as llm:
        assert generate(llm) == want
        layer = llm.engine.runner.params.layers[1]
        X = layer.router.weight.shape[0]
        for array, own in (layer.experts.down, X // 2), (layer.router.weight, X):
            assert {shard.data.shape[0] for shard in array.addressable_shards} == {own}


@pytest.mark.devices(2)
def test_parts_of_other_devices_experts_count_nothing():
    """As a kernel leaves them: what is of no expert of a device is anything."""
    mesh, T, X = make_mesh(2), 5, 4
    experts = jnp.asarray([[0, 3], [1, 2], [3, 2], [0, 1], [X, X]], jnp.int32)

    def parts(x: Any, routes: Routes, w: Any) -> jax.Array:
        own = routes.experts.T[..., None]
        return jnp.where(own < w.num_experts, own.astype(jnp.float32) + 1, jnp.nan)

    def make(batch: Batch, *, note: Note = unnoted) -> Ops:
        fields: dict[str, Any] = dict.fromkeys(field.name for field in dataclasses.fields(Ops))
        fields["experts"] = parts
        return Ops(**fields)

    def run(experts: jax.Array) -> jax.Array:
        batch: Any = None
        w: Any = SimpleNamespace(num_experts=X // 2)
        ops = all_reduce_ops(make, batch, expert_parallel=True)
        return ops.experts(jnp.zeros((T, 1)), Routes(experts, jnp.ones((T, 2))), w)

    whole = jax.sharding.PartitionSpec()
    on_all = jax.shard_map(run, mesh=mesh, in_specs=(whole,), out_specs=whole, check_vma=False)
    # A device numbers its own from 0: experts 0 and 2 give 1, experts 1 and 3 give 2.
    assert on_all(experts)[:, 0].tolist() == [3, 3, 3, 3, 0]


@pytest.mark.devices(2)
def test_what_cannot_be_is_refused():
    model, config = read_model(Settings(MIXTURE))
    with pytest.raises(ValueError, match=r"does not divide Qwen3Moe.*num_experts=7"):
        shard(model, config, make_mesh(2), expert_parallel=True)
    dense = ParallelConfig(enable_expert_parallel=True)
    with pytest.raises(ValueError, match=r"True wants a mixture of experts, Llama.* is none"):
        dense.cut(*read_model(Settings(DENSE)))
