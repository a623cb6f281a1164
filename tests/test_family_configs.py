"""Config files of dense families: what is refused, what published and old ones say."""

from typing import Any

import numpy as np
import pytest

from jaxrunner.hf_config import Settings
from jaxrunner.models.blocks.description import BlockConfig
from jaxrunner.models.registry import read_model
from tests.support import dense_families

REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "activation": ("granite 3", dict(hidden_act="mish"), "hidden_act must be one of .*got 'mish'"),
    "kinds": ("gemma 2", dict(layer_types=["chunked_attention"] * 2), "layer_types must name full"),
    "cap": ("gemma 2", dict(final_logit_softcapping=-1.0), r"capping must be over 0, got -1\.0"),
    "cap of nothing": ("gemma 3", dict(attn_logit_softcapping=50.0), "attn_logit_.*not supported"),
    "scale": ("granite 3", dict(logits_scaling=0.0), r"logits_scaling must be over 0, got 0\.0"),
    "both ways": ("gemma 2", dict(use_bidirectional_attention=True), "use_bidir.*not supported"),
    "share": (
        "glm 4",
        dict(rope_parameters=dict(partial_rotary_factor=0.4)),
        r"partial_rotary_factor=0\.4 must be a share of head_dim=8 of whole pairs",
    ),
    "odd heads": ("gpt 2", dict(n_embd=42), "head_dim=7 must be even"),
    "factors": (
        "phi 4 mini",
        dict(rope_parameters=dense_families.LONG | dict(long_factor=[1.0])),
        r"long_factor must be 3 factors of 1e-9 to 1e9, got \[1\.0\]",
    ),
    "turned layers": ("smollm 3", dict(no_rope_layers=[1]), "must have a number for 2 layers"),
    "norms of queries": ("command r", dict(use_qk_norm=True), "use_qk_norm=True is not supported"),
    "layers unlike": (
        "gpt 2",
        dict(scale_attn_by_inverse_layer_idx=True),
        "scale_attn_by_inverse_layer_idx=True is not supported",
    ),
    "unknown": ("starcoder 2", dict(expert_count=3), "1 unknown setting: expert_count=3"),
    "text beside a tower": (
        "mistral small 3.1",
        dict(text_config=dict(model_type="llama")),
        r"text_config: model_type must be one of \['ministral3', 'mistral'\], got 'llama'",
    ),
    "pattern": (
        "exaone 4",
        dict(sliding_window_pattern="LLLG", layer_types=None),
        "no 'layer_types'",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("variant", "changes", "words"), REFUSED.values(), ids=REFUSED.keys())
def test_what_would_change_the_outputs_is_refused(variant, changes, words):
    with pytest.raises(ValueError, match=words):
        read_model(Settings(dense_families.settings(variant) | changes))


PUBLISHED = {  # keys beside those that transformers writes today
    "command r7b": dict(
        cache_implementation="hybrid", layer_switch=4, position_embedding_type="rope_gptj",
        order_of_interleaved_layers="local_attn_first", rotary_pct=1.0, sliding_window_pattern=4,
        use_embedding_sharing=True, use_gated_activation=True, use_parallel_block=True,
        use_parallel_embedding=False, use_qk_norm=False, head_dim=8,
    ),
    "exaone 4": dict(sliding_window_pattern="LLLG"),
    "gemma 2": dict(hidden_act="gelu", cache_implementation="hybrid"),
    "gpt 2": dict(n_ctx=128, task_specific_params={"text-generation": dict(max_length=50)}),
    "phi 3": dict(full_attn_mod=1, interpolate_factor=1, lm_head_bias=False, mlp_bias=False),
    "smollm 3": dict(max_window_layers=28, pretraining_tp=2),
    "starcoder 2": dict(
        activation_function="gelu", attention_softmax_in_fp32=True, layer_norm_epsilon=1e-5,
        mlp_type="default", norm_type="layer_norm", scale_attention_softmax_in_fp32=True,
        scale_attn_weights=True,
    ),
}  # fmt: skip


@pytest.mark.parametrize("variant", PUBLISHED)
def test_keys_of_published_configs_change_nothing(variant):
    values = dense_families.settings(variant)
    want, got = (read_model(Settings(v))[1] for v in (values, values | PUBLISHED[variant]))
    assert got == want


def test_a_published_config_may_leave_out_what_is_usual():
    text = dict(hidden_size=2560, intermediate_size=10240, model_type="gemma3_text",
                num_hidden_layers=34, rope_scaling=dict(factor=8.0, rope_type="linear"),
                sliding_window=1024)  # fmt: skip
    both = dict(architectures=["Gemma3ForConditionalGeneration"], eos_token_id=[1, 106],
                boi_token_index=255999, eoi_token_index=256000, image_token_index=262144,
                mm_tokens_per_image=256, vision_config=dict(hidden_size=1152),
                torch_dtype="bfloat16", text_config=text)  # fmt: skip
    config = read_model(Settings(both))[1]
    assert isinstance(config, BlockConfig)
    assert config.windows[:7] == (1024,) * 5 + (None, 1024) and config.dtype == "bfloat16"
    assert (config.vocab_size, config.head_dim, config.num_key_value_heads) == (262208, 256, 4)
    full, sliding = config.ropes[5].inv_freq[1], config.ropes[0].inv_freq[1]
    np.testing.assert_allclose([full, sliding], [1e6 ** (-2 / 256) / 8, 1e4 ** (-2 / 256)], 1e-6)
    assert config.eos_token_ids == (1, 106) and config.tie_word_embeddings


def test_a_published_config_of_ministral_3_says_all_in_its_text_half():
    rope = dict(beta_fast=32.0, beta_slow=1.0, factor=16.0, llama_4_scaling_beta=0.1, mscale=1.0,
                mscale_all_dim=1.0, original_max_position_embeddings=16384, rope_theta=1e6,
                rope_type="yarn", type="yarn")  # fmt: skip
    text = dict(attention_dropout=0.0, head_dim=128, hidden_act="silu", hidden_size=3072,
                initializer_range=0.02, intermediate_size=9216, max_position_embeddings=262144,
                model_type="ministral3", num_attention_heads=32, num_hidden_layers=26,
                num_key_value_heads=8, rms_norm_eps=1e-5, rope_parameters=rope,
                sliding_window=None, tie_word_embeddings=True, use_cache=True,
                vocab_size=131072)  # fmt: skip
    both = dict(architectures=["Mistral3ForConditionalGeneration"], dtype="bfloat16",
                image_token_index=10, model_type="mistral3", multimodal_projector_bias=False,
                projector_hidden_act="gelu", spatial_merge_size=2, vision_feature_layer=-1,
                vision_config=dict(model_type="pixtral"), text_config=text)  # fmt: skip
    config = read_model(Settings(both))[1]
    assert isinstance(config, BlockConfig)
    assert config.query_growth == (0.1, 16384) and config.tie_word_embeddings
    assert config.windows == (None,) * 26 and config.dtype == "bfloat16"
    untied = read_model(Settings(both | dict(tie_word_embeddings=False)))[1]
    assert isinstance(untied, BlockConfig) and not untied.tie_word_embeddings


SCALING = {key: value for key, value in dense_families.YARN.items() if key != "rope_theta"}
OLD = {  # config.json as the hub has it, and what transformers makes of it today
    "gemma 3": (
        dict(rope_theta=1e6, rope_local_base_freq=1e4, sliding_window_pattern=2),
        ("rope_parameters", "layer_types", "_sliding_window_pattern"),
    ),
    "olmo 3": (
        dict(rope_theta=1e4, rope_scaling=SCALING),
        ("rope_parameters",),
    ),
    "pythia": (dict(rotary_pct=0.25, rotary_emb_base=10000), ("rope_parameters",)),
    "phi 4 mini": (
        dict(rope_theta=1e4, partial_rotary_factor=0.75, rope_scaling=dict(
            type="longrope", short_factor=dense_families.PAIRS,
            long_factor=dense_families.LONG["long_factor"])),
        ("rope_parameters",),
    ),
}  # fmt: skip


@pytest.mark.parametrize("variant", OLD)
def test_old_keys_say_the_same(variant):
    values, (old, gone) = dense_families.settings(variant), OLD[variant]
    want, got = (
        read_model(Settings(v))[1]
        for v in (values, {k: v for k, v in values.items() if k not in gone} | old)
    )
    assert got == want
