"""Config files of mixtures as published: no key is refused, and the weights are as many."""

from typing import Any

import pytest

from jaxrunner.hf_config import Settings
from jaxrunner.loading.declared import abstract_params
from jaxrunner.loading.quantized import read_quantized
from jaxrunner.models.registry import read_model
from jaxrunner.worker.memory_plan import num_bytes

COMMON: dict[str, Any] = dict(
    attention_dropout=0.0, hidden_act="silu", initializer_range=0.02, rms_norm_eps=1e-6,
    tie_word_embeddings=False, torch_dtype="bfloat16", transformers_version="4.51.0",
    use_cache=True,
)  # fmt: skip
ROUTED = dict(output_router_logits=False, router_aux_loss_coef=0.001)
QWEN = ROUTED | dict(
    bos_token_id=151643, decoder_sparse_step=1, eos_token_id=151643, norm_topk_prob=False,
    rope_theta=1e6, use_sliding_window=False, vocab_size=151936,
)  # fmt: skip
GLM = dict(
    attention_bias=True, eos_token_id=[151329, 151336, 151338], head_dim=128,
    max_position_embeddings=131072, model_type="glm4_moe", n_group=1, n_shared_experts=1,
    norm_topk_prob=True, num_attention_heads=96, num_experts_per_tok=8, num_key_value_heads=8,
    num_nextn_predict_layers=1, pad_token_id=151329, partial_rotary_factor=0.5, rms_norm_eps=1e-5,
    rope_scaling=None, rope_theta=1000000, topk_group=1, vocab_size=151552,
)  # fmt: skip
BLOCKS = dict(activation_scheme="dynamic", fmt="e4m3", quant_method="fp8",
              weight_block_size=[128, 128])  # fmt: skip
YARN = dict(beta_fast=32, beta_slow=1, mscale=1.0, mscale_all_dim=1.0,
            original_max_position_embeddings=4096, type="yarn")  # fmt: skip
CODE = dict(AutoConfig="configuration_deepseek.DeepseekV3Config",
            AutoModelForCausalLM="modeling_deepseek.DeepseekV3ForCausalLM")  # fmt: skip
DEEPSEEK = dict(
    attention_bias=False, auto_map=CODE, ep_size=1, kv_lora_rank=512, moe_layer_freq=1,
    norm_topk_prob=True, qk_nope_head_dim=128, qk_rope_head_dim=64, scoring_func="sigmoid",
    topk_method="noaux_tc", v_head_dim=128,
)  # fmt: skip
KIMI = DEEPSEEK | dict(
    aux_loss_alpha=0.001, bos_token_id=163584, eos_token_id=163585, first_k_dense_replace=1,
    n_group=1, num_nextn_predict_layers=0, pretraining_tp=1, rope_theta=50000.0, seq_aux=True,
    topk_group=1, vocab_size=163840,
)  # fmt: skip
# By name: the architecture, billions of weights without layers that draft, and keys beside COMMON.
PUBLISHED: dict[str, tuple[str, float, dict[str, Any]]] = {
    "Mixtral 8x7B": ("Mixtral", 46.7, dict(
        bos_token_id=1, eos_token_id=2, hidden_size=4096, intermediate_size=14336,
        max_position_embeddings=32768, model_type="mixtral", num_attention_heads=32,
        num_experts_per_tok=2, num_hidden_layers=32, num_key_value_heads=8, num_local_experts=8,
        output_router_logits=False, rms_norm_eps=1e-5, rope_theta=1e6, router_aux_loss_coef=0.02,
        sliding_window=None, vocab_size=32000)),
    "Qwen1.5 MoE A2.7B": ("Qwen2Moe", 14.3, QWEN | dict(
        hidden_size=2048, intermediate_size=5632, max_position_embeddings=8192,
        max_window_layers=21, model_type="qwen2_moe", moe_intermediate_size=1408,
        num_attention_heads=16, num_experts=60, num_experts_per_tok=4, num_hidden_layers=24,
        num_key_value_heads=16, shared_expert_intermediate_size=5632, sliding_window=32768)),
    "Qwen2 57B A14B": ("Qwen2Moe", 57.4, QWEN | dict(
        hidden_size=3584, intermediate_size=18944, max_position_embeddings=131072,
        max_window_layers=28, model_type="qwen2_moe", moe_intermediate_size=2560,
        num_attention_heads=28, num_experts=64, num_experts_per_tok=8, num_hidden_layers=28,
        num_key_value_heads=4, shared_expert_intermediate_size=20480, sliding_window=65536)),
    "Qwen3 30B A3B": ("Qwen3Moe", 30.5, QWEN | dict(
        attention_bias=False, eos_token_id=151645, head_dim=128, hidden_size=2048,
        intermediate_size=6144, max_position_embeddings=40960, max_window_layers=48,
        mlp_only_layers=[], model_type="qwen3_moe", moe_intermediate_size=768,
        norm_topk_prob=True, num_attention_heads=32, num_experts=128, num_experts_per_tok=8,
        num_hidden_layers=48, num_key_value_heads=4, rope_scaling=None, sliding_window=None)),
    "OLMoE 1B 7B": ("Olmoe", 6.9, ROUTED | dict(
        attention_bias=False, clip_qkv=None, eos_token_id=50279, hidden_size=2048,
        intermediate_size=1024, max_position_embeddings=4096, model_type="olmoe",
        norm_topk_prob=False, num_attention_heads=16, num_experts=64, num_experts_per_tok=8,
        num_hidden_layers=16, num_key_value_heads=16, pad_token_id=1, rms_norm_eps=1e-5,
        rope_scaling=None, rope_theta=10000.0, vocab_size=50304)),
    "gpt-oss 20B": ("GptOss", 20.9, ROUTED | dict(
        attention_bias=True, eos_token_id=200002, experts_per_token=4, head_dim=64,
        hidden_size=2880, initial_context_length=4096, intermediate_size=2880,
        layer_types=["sliding_attention", "full_attention"] * 12, max_position_embeddings=131072,
        model_type="gpt_oss", num_attention_heads=64, num_experts_per_tok=4, num_hidden_layers=24,
        num_key_value_heads=8, num_local_experts=32, pad_token_id=199999, quantization_config=dict(
            modules_to_not_convert=["model.layers.*.self_attn", "model.layers.*.mlp.router",
                                    "model.embed_tokens", "lm_head"], quant_method="mxfp4"),
        rms_norm_eps=1e-5, rope_scaling=dict(
            beta_fast=32.0, beta_slow=1.0, factor=32.0, original_max_position_embeddings=4096,
            rope_type="yarn", truncate=False),
        rope_theta=150000, router_aux_loss_coef=0.9, sliding_window=128, swiglu_limit=7.0,
        vocab_size=201088)),
    "GLM-4.5": ("Glm4Moe", 352.8, GLM | dict(
        first_k_dense_replace=3, hidden_size=5120, intermediate_size=12288,
        moe_intermediate_size=1536, n_routed_experts=160, num_hidden_layers=92,
        routed_scaling_factor=2.5, use_qk_norm=True)),
    "GLM-4.5 Air": ("Glm4Moe", 106.9, GLM | dict(
        first_k_dense_replace=1, hidden_size=4096, intermediate_size=10944,
        moe_intermediate_size=1408, n_routed_experts=128, num_hidden_layers=46,
        routed_scaling_factor=1.0, use_qk_norm=False)),
    "DeepSeek-V3": ("DeepseekV3", 671.0, DEEPSEEK | dict(
        bos_token_id=0, eos_token_id=1, first_k_dense_replace=3, hidden_size=7168,
        intermediate_size=18432, max_position_embeddings=163840, model_type="deepseek_v3",
        moe_intermediate_size=2048, n_group=8, n_routed_experts=256, n_shared_experts=1,
        num_attention_heads=128, num_experts_per_tok=8, num_hidden_layers=61,
        num_key_value_heads=128, num_nextn_predict_layers=1, q_lora_rank=1536,
        quantization_config=BLOCKS, rope_scaling=YARN | dict(factor=40), rope_theta=10000,
        routed_scaling_factor=2.5, topk_group=4, vocab_size=129280)),
    "Kimi K2": ("DeepseekV3", 1026.4, KIMI | dict(
        hidden_size=7168, intermediate_size=18432, max_position_embeddings=131072,
        model_type="kimi_k2", moe_intermediate_size=2048, n_routed_experts=384, n_shared_experts=1,
        num_attention_heads=64, num_experts_per_tok=8, num_hidden_layers=61,
        num_key_value_heads=64, q_lora_rank=1536, quantization_config=BLOCKS,
        rope_scaling=YARN | dict(factor=32.0), routed_scaling_factor=2.827)),
    "Moonlight 16B A3B": ("DeepseekV3", 16.0, KIMI | dict(
        hidden_size=2048, intermediate_size=11264, max_position_embeddings=8192,
        model_type="deepseek_v3", moe_intermediate_size=1408, n_routed_experts=64,
        n_shared_experts=2, num_attention_heads=16, num_experts_per_tok=6, num_hidden_layers=27,
        num_key_value_heads=16, q_lora_rank=None, rms_norm_eps=1e-5, rope_scaling=None,
        routed_scaling_factor=2.446)),
    "Granite 3 1B A400M": ("GraniteMoe", 1.3, ROUTED | dict(
        attention_bias=False, attention_dropout=0.1, attention_multiplier=0.015625, bos_token_id=0,
        embedding_multiplier=12.0, eos_token_id=0, hidden_size=1024, intermediate_size=512,
        logits_scaling=6.0, max_position_embeddings=4096, model_type="granitemoe",
        num_attention_heads=16, num_experts_per_tok=8, num_hidden_layers=24,
        num_key_value_heads=8, num_local_experts=32, pad_token_id=0, residual_multiplier=0.22,
        rope_scaling=None, rope_theta=10000, tie_word_embeddings=True, vocab_size=49155)),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_config_is_read_whole(name):
    family, billions, keys = PUBLISHED[name]
    values = COMMON | keys | dict(architectures=[f"{family}ForCausalLM"])
    read_quantized(values, "config.json")
    plain = {key: value for key, value in values.items() if key != "quantization_config"}
    made = abstract_params(*read_model(Settings(plain)), "bfloat16")
    assert num_bytes(made) / 2e9 == pytest.approx(billions, abs=0.05)
