"""Tiny mixtures of every family, made by transformers with weights that spread the routes."""

from pathlib import Path
from typing import Any

import pytest

from tests.support.checkpoints import NEEDS_TORCH

BASE: dict[str, Any] = dict(
    hidden_size=36, intermediate_size=44, num_hidden_layers=2, num_attention_heads=6,
    num_key_value_heads=2, head_dim=8, vocab_size=62, max_position_embeddings=128,
    num_experts_per_tok=2, bos_token_id=None, eos_token_id=None, pad_token_id=0,
)  # fmt: skip
FEW = dict(num_experts=6, moe_intermediate_size=12)
WIDE = dict(hidden_size=48)  # heads times their dimensions, as some derive it
LOCAL = dict(num_local_experts=6)
GLM = dict(
    n_routed_experts=6, moe_intermediate_size=12, n_shared_experts=2, first_k_dense_replace=1,
    routed_scaling_factor=1.7,
)  # fmt: skip
YARN = dict(rope_type="yarn", rope_theta=10000.0, factor=8.0, beta_fast=32.0, beta_slow=1.0,
            truncate=False, original_max_position_embeddings=16)  # fmt: skip
LATENT = GLM | dict(
    num_key_value_heads=6, kv_lora_rank=10, q_lora_rank=14, qk_nope_head_dim=6,
    qk_rope_head_dim=8, v_head_dim=5, rms_norm_eps=0.01,
)  # fmt: skip
STEEP = dict(rope_type="llama3", rope_theta=10000.0, factor=8.0, low_freq_factor=1.0,
             high_freq_factor=1.0, original_max_position_embeddings=32)  # fmt: skip
CHUNKS = dict(
    attention_chunk_size=16, no_rope_layers=[1, 0], intermediate_size_mlp=20, floor_scale=10,
    attn_scale=0.6,
)  # fmt: skip
GAINS = YARN | dict(mscale=0.7, mscale_all_dim=0.9)
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("Qwen3Moe", FEW | dict(norm_topk_prob=True)),
    "qwen3, dense layers, windows": ("Qwen3Moe", FEW | dict(
        mlp_only_layers=[1], attention_bias=True, use_sliding_window=True, sliding_window=5)),
    "qwen3, every second layer": ("Qwen3Moe", FEW | dict(decoder_sparse_step=2)),
    "qwen2": ("Qwen2Moe", FEW | WIDE | dict(
        shared_expert_intermediate_size=20, use_sliding_window=True, sliding_window=5)),
    "qwen2, dense layers, no biases": ("Qwen2Moe", FEW | WIDE | dict(
        shared_expert_intermediate_size=20, decoder_sparse_step=2, norm_topk_prob=True,
        qkv_bias=False)),
    "mixtral": ("Mixtral", LOCAL | dict(sliding_window=7)),
    "mixtral, no window": ("Mixtral", LOCAL | dict(sliding_window=None)),
    "olmoe": ("Olmoe", WIDE | dict(num_experts=6, clip_qkv=1.5)),
    "olmoe, one key": ("Olmoe", WIDE | dict(
        num_experts=6, num_key_value_heads=1, norm_topk_prob=True)),
    "granite": ("GraniteMoe", LOCAL | WIDE | dict(
        embedding_multiplier=3.0, attention_multiplier=0.2, residual_multiplier=0.7,
        logits_scaling=2.0, tie_word_embeddings=True)),
    "granite, biases, own head": ("GraniteMoe", LOCAL | WIDE | dict(
        logits_scaling=2.0, attention_bias=True, tie_word_embeddings=False)),
    "glm4": ("Glm4Moe", GLM | dict(use_qk_norm=True, n_group=3, topk_group=2)),
    "glm4, biases, all experts": ("Glm4Moe", GLM | dict(attention_bias=True)),
    "deepseek v2": ("DeepseekV2", LATENT | dict(
        topk_method="group_limited_greedy", n_group=3, topk_group=2, rope_parameters=GAINS)),
    "deepseek v2 lite": ("DeepseekV2", LATENT | dict(q_lora_rank=None)),
    "deepseek v3": ("DeepseekV3", LATENT | dict(
        n_group=3, topk_group=2, attention_bias=True, rope_parameters=GAINS)),
    "deepseek v3, halves": ("DeepseekV3", LATENT | dict(
        n_group=1, topk_group=1, q_lora_rank=None, rope_interleave=False)),
    "glm flash": ("Glm4MoeLite", LATENT),
    "llama 4": ("Llama4", LOCAL | CHUNKS | dict(
        num_experts_per_tok=1, interleave_moe_layer_step=2, rope_parameters=STEEP)),
    "llama 4, ragged chunks, two experts": ("Llama4", LOCAL | CHUNKS | dict(
        attention_chunk_size=12, num_key_value_heads=1, use_qk_norm=False,
        attn_temperature_tuning=False, attention_bias=True,
        layer_types=["full_attention", "chunked_attention"])),
    "gpt-oss, one key": ("GptOss", LOCAL | dict(sliding_window=6, num_key_value_heads=1)),
    "gpt-oss": ("GptOss", LOCAL | dict(sliding_window=6, rope_parameters=YARN)),
}  # fmt: skip
CONFIGS = dict(Llama4="Llama4TextConfig")
TOWER = dict(
    hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, image_size=8,
    patch_size=4, vision_output_dim=16, projector_input_dim=16, projector_output_dim=16,
)  # fmt: skip


def model(variant: str) -> Any:
    """Returns the model of a variant, whose weights are large enough that experts matter."""
    torch = pytest.importorskip("torch", reason=NEEDS_TORCH)
    transformers = pytest.importorskip("transformers", reason=NEEDS_TORCH)
    family, changes = VARIANTS[variant]
    torch.manual_seed(0)
    name = CONFIGS.get(family, f"{family}Config")
    config = getattr(transformers, name)(**BASE | changes)
    return _with_weights(getattr(transformers, f"{family}ForCausalLM")(config).eval())


def _with_weights(made: Any) -> Any:
    torch = pytest.importorskip("torch", reason=NEEDS_TORCH)
    made.set_experts_implementation("eager")  # others have no float64
    buffers = (pair for pair in made.named_buffers() if "correction" in pair[0])
    for name, weight in (*made.named_parameters(), *buffers):
        middle, spread = (1.0, 0.2) if "norm" in name else (0.0, 0.3)
        torch.nn.init.normal_(weight.data, middle, spread)
    return made


def save(variant: str, folder: Path) -> Any:
    """Writes a variant's checkpoint. Returns its module."""
    made = model(variant)
    made.save_pretrained(folder)
    return made


def save_beside_tower(folder: Path) -> Any:
    """Writes a Llama 4 that has a vision tower. Returns the module of its text model."""
    torch = pytest.importorskip("torch", reason=NEEDS_TORCH)
    transformers = pytest.importorskip("transformers", reason=NEEDS_TORCH)
    text = transformers.Llama4TextConfig(**BASE | VARIANTS["llama 4"][1]).to_dict()
    torch.manual_seed(0)
    config = transformers.Llama4Config(text_config=text, vision_config=TOWER)
    made = _with_weights(transformers.Llama4ForConditionalGeneration(config).eval())
    made.save_pretrained(folder)
    return made.language_model
