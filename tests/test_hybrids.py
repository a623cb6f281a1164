"""Hybrids, whose layers keep states: what is read, saved and refused."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxrunner import LLM
from jaxrunner.hf_config import Settings
from jaxrunner.loading.checkpoint import WHOLE
from jaxrunner.loading.loader import load
from jaxrunner.loading.weights import save_checkpoint
from jaxrunner.models.registry import read_model
from jaxrunner.ops.routing import with_routes
from tests.support import hybrids

SIZES: dict[str, Any] = hybrids.LLM_SIZES | dict(max_num_seqs=6, decode_buckets=(6,))


@pytest.mark.parametrize(
    "variant", ["falcon h1, normed", "nemotron h", "qwen 3.5, experts", "bamba"]
)
def test_weights_are_saved_as_they_were_read(variant, tmp_path):
    hybrids.save(variant, tmp_path)
    loaded = load(tmp_path)
    params = loaded.read_params(progress=False)
    save_checkpoint(tmp_path / "again", loaded.model, loaded.config, params, {})
    want, got = (load_file(folder / WHOLE) for folder in (tmp_path, tmp_path / "again"))
    assert want.keys() == got.keys() and all((want[name] == got[name]).all() for name in want)


@pytest.mark.parametrize("variant", ["nemotron h", "qwen 3.5, experts"])
def test_stacked_experts_are_those_of_published_checkpoints(variant, tmp_path):
    module = hybrids.save(variant, tmp_path)
    module.save_pretrained(tmp_path / "stacked", save_original_format=False)
    want, got = (load(at).read_params(progress=False) for at in (tmp_path, tmp_path / "stacked"))
    assert all(map(np.array_equal, jax.tree.leaves(want), jax.tree.leaves(got)))


def test_routes_are_replayed_by_the_layers_that_have_experts(tmp_path):
    """The classes of the others have no router at all."""
    hybrids.save("nemotron h", tmp_path)
    params = load(tmp_path).read_params(progress=False)
    routers = [
        getattr(layer, "router", None)
        for layer in with_routes(params, jnp.zeros((3, 4, 2), jnp.int32)).layers
    ]
    assert [router is not None for router in routers] == [False, False, False, True]
    shapes = [router.replayed.shape for router in routers if router is not None]
    assert shapes == [(3, 2)]


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "prefixes": (
        dict(mamba_block_size=8),
        "mamba_block_size=8 needs prefix caching: set enable_prefix",
    ),
    "kinds": (
        dict(hf_overrides=dict(layer_types=["conv", "mamba"])),
        "layer_types must name full_attention or conv for 2 layers, got",
    ),
    "sizes": (dict(hf_overrides=dict(conv_dim=32)), "conv_dim=32 is not supported, only 48"),
}


def test_what_states_cannot_do_is_refused(tmp_path):
    hybrids.save("lfm 2", tmp_path)
    for changes, words in REFUSED.values():
        with pytest.raises(ValueError, match=words):
            LLM(tmp_path, **SIZES | changes)


WRONG: dict[str, tuple[str, dict[str, Any], str]] = {
    "heads": ("bamba", dict(mamba_d_head=7), "mamba_n_heads=8 heads of mamba_d_head=7 must be"),
    "groups": ("bamba", dict(mamba_n_groups=3), "numbers, in mamba_n_groups=3 equal groups"),
    "limits": ("bamba", dict(time_step_limit=[0.1]), r"time_step_limit must be two numbers, got"),
    "positions": (
        "granite 4",
        dict(position_embedding_type="alibi"),
        "position_embedding_type must be 'nope' or 'rope', got 'alibi'",
    ),
    "shared": (
        "qwen 3 next",
        dict(linear_num_key_heads=3),
        "linear_num_value_heads=4 must be a multiple of linear_num_key_heads=3",
    ),
    "scales": (
        "falcon h1",
        dict(ssm_multipliers=[1.0, 2.0]),
        r"ssm_multipliers must be 5 numbers, got \[1.0, 2.0\]",
    ),
    "two biases": (
        "falcon h1",
        dict(projectors_bias=True),
        "projectors_bias=True is not supported, only False",
    ),
    "pattern": (
        "nemotron h",
        dict(layers_block_type=None, hybrid_override_pattern="M-x"),
        "layers_block_type must name linear_attention, .* or hybrid_override_pattern be of M",
    ),
    "layers": (
        "nemotron h",
        dict(num_hidden_layers=5),
        "num_hidden_layers=5 is not supported, only 4",
    ),
    "residuals": (
        "nemotron h",
        dict(residual_in_fp32=True),
        "residual_in_fp32=True is not supported, only False",
    ),
    "gate": (
        "qwen 3.5",
        dict(attn_output_gate=False),
        "attn_output_gate=False is not supported, only True",
    ),
    "weights of experts": (
        "qwen 3.5, experts",
        dict(norm_topk_prob=False),
        "norm_topk_prob=False is not supported, only True",
    ),
    "dtype": ("granite 4", dict(mamba_ssm_cache_dtype="int8"), "ssm_cache_dtype must be one of"),
}


@pytest.mark.parametrize(("variant", "changes", "words"), WRONG.values(), ids=WRONG.keys())
def test_a_config_that_cannot_be_is_refused(variant, changes, words):
    with pytest.raises(ValueError, match=words):
        read_model(Settings(hybrids.settings(variant) | changes))


PUBLISHED = {  # keys beside those that transformers writes today
    "lfm 2": dict(
        block_dim=48, block_mlp_init_scale=1.0, block_norm_eps=1e-5, block_out_init_scale=1.0,
        block_use_swiglu=True, block_use_xavier_init=True, conv_dim=48, conv_dim_out=48,
        conv_use_xavier_init=True, num_heads=6, use_pos_enc=True, full_attn_idxs=[1],
    ),
    "bamba": dict(num_logits_to_keep=1, time_step_min=0.001, time_step_limit=[0.0, float("inf")]),
    "falcon h1": dict(
        attn_layer_indices=None, mamba_use_mlp=True, mlp_expansion_factor=8, num_logits_to_keep=1,
        time_step_rank=256, time_step_floor=0.0001, rope_scaling=None, mamba_d_head=10,
    ),
    "granite 4": dict(
        layer_types=["mamba", "attention"], position_embedding_type="nope",
        normalization_function="rmsnorm", init_method="mup", mamba_d_head=12,
    ),
    "nemotron h": dict(
        layers_block_type=None, hybrid_override_pattern="M-*E", attention_head_dim=8, expand=2,
        mtp_hybrid_override_pattern="*E", num_nextn_predict_layers=1, num_hidden_layers=4,
        rms_norm_eps=1e-5, norm_eps=1e-5, rescale_prenorm_residual=True, time_step_rank=16,
        partial_rotary_factor=1.0, rope_theta=10000, use_mamba_kernels=True, n_shared_experts=1,
    ),
    "qwen 3.5": dict(
        full_attention_interval=4, attn_output_gate=True, mamba_ssm_dtype="float32",
        mtp_num_hidden_layers=1, mtp_use_dedicated_embeddings=False, mlp_only_layers=[],
        output_gate_type="swish", partial_rotary_factor=0.25,
        rope_parameters=dict(
            mrope_interleaved=True, mrope_section=[11, 11, 10], rope_type="default",
            rope_theta=10000.0, partial_rotary_factor=0.25,
        ),
    ),
    "qwen 3 next": dict(
        full_attention_interval=4, mamba_ssm_dtype="float32", use_sliding_window=False
    ),
}  # fmt: skip


@pytest.mark.parametrize("variant", PUBLISHED)
def test_keys_of_published_configs_change_nothing(variant):
    values = hybrids.settings(variant)
    want, got = (read_model(Settings(v))[1] for v in (values, values | PUBLISHED[variant]))
    assert got == want


def test_an_old_config_of_lfm2_may_leave_out_what_is_usual():
    values = dict(
        architectures=["Lfm2ForCausalLM"], block_auto_adjust_ff_dim=True, block_ff_dim=12288,
        full_attn_idxs=[2, 5, 8, 10, 12, 14], hidden_size=2048, max_position_embeddings=128000,
        num_attention_heads=32, num_hidden_layers=16, num_key_value_heads=8, vocab_size=65536,
        torch_dtype="bfloat16",
    )  # fmt: skip
    config: Any = read_model(Settings(values))[1]
    assert config.intermediate_size == 8192 and config.tie_word_embeddings
    assert [i for i, attends in enumerate(config.attends) if attends] == [2, 5, 8, 10, 12, 14]
    assert config.rope.inv_freq[1] == pytest.approx(1e6 ** (-2 / 64))
