"""Latent attention and its cache: against float64, what it takes, what is refused."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrunner.bench.presets import PRESETS
from jaxrunner.caches.latent import LatentCache
from jaxrunner.config import EngineConfig
from jaxrunner.device.operations import operations
from jaxrunner.device.program_key import Key
from jaxrunner.hf_config import Settings
from jaxrunner.loading.declared import abstract_params
from jaxrunner.model import AttentionSpec
from jaxrunner.models.registry import read_model
from jaxrunner.ops import backends
from jaxrunner.program.bucket import Bucket
from jaxrunner.program.program import Program
from jaxrunner.program.state import abstract_state
from jaxrunner.sampling import RULES
from jaxrunner.worker.kv_cache_spec import kv_cache_specs
from jaxrunner.worker.memory_plan import num_bytes
from tests.support import oracles
from tests.support.lowering import cuda, lowers
from tests.support.paged_attention import CASES, Problem

SPEC = AttentionSpec(0, None, 0.3, value_dim=5)
# Keys and values of each of six heads are the latents themselves: [N + V, H, R].
UP = np.tile(np.eye(5, dtype=np.float32)[:, None], (2, 6, 1))
LITE = PRESETS["deepseek_v2_lite"].config


@partial(jax.jit, static_argnames="spec")
def run(batch, q, latents, cache, spec):
    ops = backends.paged(batch)
    return ops.attend_latent(q, latents, jnp.asarray(UP), cache, spec)


@pytest.mark.parametrize(
    ("case", "kept"), [*((case, "float32") for case in CASES), ("prefill", "int8")]
)
def test_latent_attention_equals_its_oracle(case, kept):
    """Prompts, decode, both; what was there before are rows of other tokens, and NaN."""
    problem = Problem(case, "float32")
    before = problem.cache[0][:, 0]
    cache = LatentCache(latents=jnp.asarray(before), scale=None)
    if kept == "int8":
        zero = jnp.zeros(before.shape, jnp.int8)
        cache = LatentCache(latents=zero, scale=jnp.full(before.shape[:2], jnp.nan))
    new = problem.k[:, 0]
    out, after = run(problem.batch, *map(jnp.asarray, (problem.q, new)), cache, SPEC)
    rows = np.asarray(after.latents, np.float64)
    if after.scale is not None:
        rows *= np.asarray(after.scale, np.float64)[..., None]
    expected, loose = before.copy(), 0 if kept == "float32" else np.abs(new).max() / 254
    for b, tokens, positions in problem.rows():
        keys = np.concatenate([problem.history[b, 0, : problem.computed[b], 0], new[tokens]])
        q, keys = problem.q[tokens].astype(np.float64), keys[None].astype(np.float64)
        none: dict[str, Any] = dict(window=None, soft_cap=None, sinks=None)
        want = oracles.one_row(q, keys, keys, positions, scale=SPEC.scale, **none)[..., :5]
        np.testing.assert_allclose(out[tokens], want, atol=1e-5 if not loose else 5e-2)
        for t, p in enumerate(positions, tokens.start):
            block, _, offset = problem.cell(b, p)
            np.testing.assert_allclose(rows[block, offset], new[t], atol=1.02 * loose)
            expected[block, offset] = new[t]
    if kept == "float32":  # every other cell holds what it held
        np.testing.assert_array_equal(rows.astype(np.float32), expected)


def engine(**sizes: Any) -> EngineConfig:
    return EngineConfig(max_model_len=256, num_blocks=10, **sizes)


@pytest.mark.parametrize(("kv_dtype", "scales"), [("bfloat16", 0), ("int8", 4)])
def test_plans_count_latents(kv_dtype, scales):
    """DeepSeek-V2-Lite has 15.7 billion weights, and keeps 576 numbers of a token and layer."""
    model, config = read_model(Settings(LITE))
    assert num_bytes(abstract_params(model, config, "bfloat16")) == 2 * 15_706_484_224
    program = Program(model, config, engine(kv_dtype=kv_dtype, dtype="bfloat16"), backends.paged)
    of_token = 576 * jnp.dtype(kv_dtype).itemsize + scales
    assert num_bytes(abstract_state(program).kv) == 27 * 10 * 64 * of_token
    spec = kv_cache_specs(config, program.engine)["model.layers.3.self_attn.attn"]
    assert (spec.num_kv_heads, spec.head_size, spec.page_size_bytes) == (1, 576, 64 * of_token)


@lowers
def test_operations_say_what_runs_latent_attention():
    model, config = read_model(Settings(LITE | dict(num_hidden_layers=2)))
    program = Program(
        model, config, engine(dtype="bfloat16", kv_dtype="bfloat16"), backends.fused, tuple(RULES)
    )
    params = abstract_params(model, config, "bfloat16")
    with cuda():
        told = [operations(program, params, Key("step", Bucket(8, 8, n))) for n in (1, 0)]
        decode, prompt = ([one for one in of if one.operation == "attention"] for of in told)
    assert {one.name for one in (*decode, *prompt)} == {"latent_decode"}


def test_what_tells_of_a_published_config():
    """Keys as the authors write them, and as transformers does."""
    lite: Any = read_model(Settings(LITE))[1]
    assert lite.softmax_scale == pytest.approx(192**-0.5 * (0.0707 * np.log(40) + 1) ** 2)
    assert lite.rope.scale == 1 and lite.router.n_group == 1 and not lite.q_lora_rank
    new = {k: v for k, v in LITE.items() if k not in ("rope_scaling", "rope_theta")}
    rope = dict(LITE["rope_scaling"], rope_type="yarn", rope_theta=10000.0)
    rope.pop("type")
    assert read_model(Settings(new | dict(rope_parameters=rope, head_dim=64)))[1] == lite
    moonlight = LITE | dict(
        architectures=["DeepseekV3ForCausalLM"], scoring_func="sigmoid", topk_method="noaux_tc",
        norm_topk_prob=True, routed_scaling_factor=2.446, rope_scaling=None, ep_size=1,
        aux_loss_alpha=0.001, seq_aux=True, num_nextn_predict_layers=1,
    )  # fmt: skip
    moon: Any = read_model(Settings(moonlight))[1]
    assert moon.softmax_scale == 192**-0.5 and moon.rope_interleave
    assert moon.choice_bias and moon.router.routed_scaling_factor == 2.446


V3, FLASH = (dict(architectures=[f"{name}ForCausalLM"]) for name in ("DeepseekV3", "Glm4MoeLite"))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (dict(num_key_value_heads=4), "num_key_value_heads=4 is not supported, only 16"),
        (dict(head_dim=128), "head_dim=128 is not supported, only 64"),
        (dict(qk_head_dim=128), "qk_head_dim=128 is not supported, only 192"),
        (dict(norm_topk_prob=True), "norm_topk_prob=True is not supported, only False"),
        (dict(topk_method="noaux_tc"), "topk_method='noaux_tc' is not supported, only 'greedy'"),
        (dict(moe_layer_freq=2), "moe_layer_freq=2 is not supported, only 1"),
        (V3, "scoring_func='softmax' is not supported, only 'sigmoid'"),
        (FLASH | dict(scoring_func=None, topk_method=None, mlp_layer_types=["sparse"] * 26),
         "mlp_layer_types must name dense or sparse for 27 layers"),
        (dict(kv_lora_rank=0), "'kv_lora_rank' must be at least 1, got 0"),
    ],
    ids=lambda value: [*value][-1] if isinstance(value, dict) else None,
)  # fmt: skip
def test_what_latent_attention_does_not_honour_is_refused(changes, words):
    with pytest.raises(ValueError, match=words):
        read_model(Settings(LITE | changes))
