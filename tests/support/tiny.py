"""A tiny decoder whose axes all differ, and a hand-driven runner, for tests."""

from dataclasses import replace
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tokenizers

from jaxrunner import pytree
from jaxrunner.api.sampling_params import SamplingParams
from jaxrunner.config import EngineConfig, ModelConfig
from jaxrunner.hf_config import Settings
from jaxrunner.loading.loader import LoadConfig, Loaded
from jaxrunner.models.decoder_config import DecoderConfig
from jaxrunner.models.llama import llama
from jaxrunner.models.registry import read_model
from jaxrunner.ops.backends import dense
from jaxrunner.programs.build import build
from jaxrunner.runner.model_runner import ModelRunner
from jaxrunner.scheduling.request import NewRequest, SchedulerOutput
from jaxrunner.text.tokenizer import Tokenizer
from jaxrunner.types import Inputs

SETTINGS: dict[str, Any] = dict(
    architectures=["LlamaForCausalLM"],
    hidden_size=20,
    intermediate_size=28,
    num_hidden_layers=2,
    num_attention_heads=6,
    num_key_value_heads=2,
    head_dim=8,
    vocab_size=61,
    max_position_embeddings=128,
)
LATENTS: dict[str, Any] = dict(  # settings beside these, for latent attention
    architectures=["DeepseekV3ForCausalLM"], model_type="deepseek_v3", first_k_dense_replace=1,
    moe_intermediate_size=12, n_routed_experts=4, num_experts_per_tok=2, n_shared_experts=1,
    n_group=2, topk_group=1, kv_lora_rank=10, q_lora_rank=14, qk_nope_head_dim=6,
    qk_rope_head_dim=4, v_head_dim=5,
)  # fmt: skip
GREEDY = SamplingParams(temperature=0.0)


def config(**changes) -> DecoderConfig:
    """Returns the config of the tiny decoder."""
    config = read_model(Settings(SETTINGS | changes))[1]
    assert isinstance(config, DecoderConfig)
    return config


def random_params(config: ModelConfig, seed: int = 0, params: type = llama.params):
    """Returns weights, of llama or a class, so large that tokens depend on all of the context."""
    rng = np.random.default_rng(seed)  # JAX's would compile a program for each shape
    dims = config.dims | {"param": jnp.float32}

    def make(axes, shape, dtype):
        return jnp.asarray(rng.standard_normal(shape, np.float32) * 0.4, dtype)

    return pytree.build(make, params, dims)


def engine_config(**changes) -> EngineConfig:
    """Returns the sizes of a tiny engine, with few buckets."""
    sizes: dict[str, Any] = dict(
        max_model_len=48,
        num_blocks=60,
        block_size=4,
        max_num_seqs=5,
        max_num_batched_tokens=32,
        token_buckets=(32,),
        decode_buckets=(5,),
    )
    return EngineConfig(**sizes | changes)


def loaded(model_config: DecoderConfig | None = None, params=()) -> Loaded:
    """Returns the tiny decoder as a loader gives it, by default without weights."""
    model_config, defaults = model_config or config(), (SamplingParams(), LoadConfig("tiny"))
    return Loaded(llama, model_config, params, "float32", None, frozenset(), *defaults)


@functools.cache
def model_and_params():
    """Returns the tiny config and its weights, made once."""
    return config(), random_params(config())


def poisoned(token: int, value: float):
    """Returns weights that make logits `value` once a request has said `token`."""
    _, params = model_and_params()
    embed = params.embed.at[token].set(value)
    return replace(params, embed=embed)


def tokenizer() -> Tokenizer:
    """Returns one whose tokens are characters, 0 to 60 for "A" to "}"."""
    ids = {chr(ord("A") + i): i for i in range(SETTINGS["vocab_size"])}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(ids, unk_token="A"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    inner.decoder = tokenizers.decoders.Fuse()
    return Tokenizer(inner)


def runner(*, trusted: bool = False, **changes) -> ModelRunner:
    """Returns a runner of the tiny decoder."""
    model_config, params = model_and_params()
    built = build(llama, model_config, engine_config(**changes), params)
    return ModelRunner(built, params, trusted=trusted)


def new_request(
    name: str, prompt, *, blocks, params=GREEDY, seed=7, max_tokens=20, computed=0, prompt_len=None
) -> NewRequest:
    """Returns a request as a scheduler would send it."""
    prompt_len = len(prompt) if prompt_len is None else prompt_len
    return NewRequest(
        request_id=name,
        token_ids=list(prompt),
        prompt_len=prompt_len,
        params=params,
        seed=seed,
        max_len=prompt_len + max_tokens,
        stop_ids=frozenset(params.stop_token_ids or ()),
        block_ids=(list(blocks),),
        num_computed=computed,
    )


def scheduled(counts: dict[str, int], new=(), **rest) -> SchedulerOutput:
    """Returns the output of a hand-made scheduler."""
    return SchedulerOutput(scheduled_new_reqs=list(new), num_scheduled_tokens=counts, **rest)


def generate(runner: ModelRunner, request: NewRequest, count: int, *, chunk: int = 32) -> list[int]:
    """Drives one request by hand until it has `count` tokens."""
    name, done, out = request.request_id, request.num_computed, []
    new = [request]
    while len(out) < count:
        tokens = min(chunk, len(request.token_ids) + len(out) - done)
        output = runner.step(scheduled({name: tokens}, new)).get()
        new, done = [], done + tokens
        out += output.sampled_token_ids[output.req_ids.index(name)]
    runner.step(scheduled({}, finished_req_ids={name}))
    return out


def dense_logits(config: ModelConfig, params, ids) -> np.ndarray:
    """Returns the logits of every position, by dense attention without a cache."""
    count = len(ids)
    padded = np.zeros(-(-count // 64) * 64, np.int32)  # few lengths, few compilations
    padded[:count] = ids
    return np.asarray(_dense(params, padded, count, config))[:count]


@functools.partial(jax.jit, static_argnames="config")
def _dense(params, ids, count, config: ModelConfig):
    inputs = Inputs(ids, jnp.arange(ids.size), jnp.full(ids.size, count))
    none = (None,) * config.num_hidden_layers
    hidden, _ = llama.forward(config, params, none, inputs, dense(1))
    return llama.logits(config, params, hidden)
