"""Decode context parallelism on fake devices of a CPU: what one device gives, with tokens dealt
out to several."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrunner import LLM, SamplingParams, embedded
from jaxrunner.caches.interleave import Interleave, Part
from jaxrunner.engine.engine import Engine
from jaxrunner.loading.weights import load_params, save_checkpoint
from jaxrunner.models.llama import llama
from jaxrunner.parallel.context import merge
from jaxrunner.parallel.mesh import make_mesh
from jaxrunner.parallel.tensor import shard
from tests.support import tiny

SIZES: dict[str, Any] = dict(
    hidden_size=24, intermediate_size=32, num_attention_heads=8, vocab_size=64, head_dim=4
)
PARAMS = [
    SamplingParams(temperature=0, max_tokens=14),
    SamplingParams(temperature=0.9, seed=4, max_tokens=14, top_k=9, logprobs=2),
    SamplingParams(temperature=0.8, seed=7, max_tokens=12, logprobs=3, prompt_logprobs=1),
]
WINDOWS = dict(architectures=["MistralForCausalLM"], model_type="mistral", sliding_window=6)


def answers(model, config, params, **sizes):
    """Returns tokens and logprobs of requests that crowd each other, the last like the first."""
    e = Engine(model, config, tiny.engine_config(**sizes), params)
    prompts = [3, 1, 4, 1, 5, 9, 2, 6] * 2, [9, 2], list(range(1, 38)), [7] * 9, [3, 1, 4, 1] * 4
    requests = [e.add(f"{i}", prompt, PARAMS[i % 3]) for i, prompt in enumerate(prompts)]
    while e.has_unfinished:
        e.step()
    again = e.add("again", [*prompts[0], *requests[0].output_token_ids], PARAMS[0])
    while e.has_unfinished:
        e.step()
    requests.append(again)
    return [r.output_token_ids for r in requests], [r.logprobs for r in requests], e


@pytest.mark.parametrize(
    "num,parts,kv_heads,size,extra,sizes",
    [
        (2, 2, 1, 1, {}, dict(block_size=4, num_blocks=24)),
        (4, 2, 2, 2, {}, dict(block_size=4, num_blocks=24)),
        (4, 4, 1, 1, {}, dict(block_size=3, num_blocks=24)),
        (8, 4, 2, 1, {}, dict(block_size=2, num_blocks=24)),
    ],
)
def test_tokens_are_those_of_one_device(num, parts, kv_heads, size, extra, sizes, tmp_path):
    settings = tiny.SETTINGS | SIZES | extra | dict(num_key_value_heads=kv_heads)
    config = tiny.config(**settings)
    save_checkpoint(tmp_path, llama, config, tiny.random_params(config, seed=3), settings)
    params = load_params(tmp_path, llama, config, dtype="float32", progress=False)
    want, logprobs, _ = answers(llama, config, params, num_blocks=40)
    model, on_mesh = shard(llama, config, make_mesh(num), Interleave(parts, size))
    params = load_params(tmp_path, model, on_mesh, dtype="float32", progress=False)
    got, told, engine = answers(model, on_mesh, params, **sizes)
    assert got == want
    for ours, theirs in zip(jax.tree.leaves(told), jax.tree.leaves(logprobs), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-4)
