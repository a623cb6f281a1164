"""Model shapes, and the sizes of the workloads that they are measured with."""

from dataclasses import dataclass
from typing import Any


def _config(architecture: str, model_type: str, sizes: str, **rest: Any) -> dict[str, Any]:
    """Returns a `config.json`; `sizes` are hidden, MLP, layers, heads, KV heads, vocabulary."""
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
             "num_key_value_heads", "vocab_size")  # fmt: skip
    return dict(
        architectures=[architecture], model_type=model_type, hidden_act="silu",
        torch_dtype="bfloat16", attention_bias=False, max_position_embeddings=8192,
        **dict(zip(names, map(int, sizes.split()), strict=True)), **rest,
    )  # fmt: skip


@dataclass(frozen=True)
class Preset:
    """A model shape and the sizes of its workloads, in tokens and requests."""

    config: dict[str, Any]
    engine: dict[str, Any]
    batches: tuple[int, ...] = (1, 8, 32, 64, 128, 256)
    sampled_batches: tuple[int, ...] = (1, 64, 256)
    context: int = 1024
    new: int = 144  # outputs of the runs whose decode steps are timed
    prefill: tuple[int, int] = (8, 4096)  # requests, tokens
    ttft: tuple[int, ...] = (128, 1024)
    offline: tuple[int, int, int] = (512, 512, 256)  # requests, tokens in, tokens out
    mixed: tuple[tuple[int, int], tuple[int, int]] = ((32, 1024), (32, 512))  # in, out
    embed: tuple[int, int] = (512, 512)  # texts, tokens
    host_batches: tuple[int, ...] = (1, 8, 64, 256)
    host_steps: int = 100


GPU_ENGINE = dict(
    max_model_len=8192, max_num_seqs=256, max_num_batched_tokens=8192, gpu_memory_utilization=0.85,
    token_buckets=(128, 512, 1024, 2048, 4096, 8192),
)  # fmt: skip
# A launch costs the host about as much as a step of few bits the GPU, or of a small model.
SEVERAL_STEPS = GPU_ENGINE | dict(decode_buckets=(1, 8, 32, 64, 128, 256), num_decode_steps=8)

LLAMA8B = _config("LlamaForCausalLM", "llama", "4096 14336 32 32 8 128256", head_dim=128,
                  rms_norm_eps=1e-5, rope_theta=500000.0, tie_word_embeddings=False)  # fmt: skip
_FP8_BLOCKS = dict(quant_method="fp8", fmt="e4m3", weight_block_size=[128, 128])
_FP8_INPUTS = dict(quant_method="fp8", fmt="e4m3", activation_scheme="dynamic")
_GPTQ = dict(quant_method="gptq", bits=4, group_size=128, desc_act=False, sym=True)

PRESETS = {
    "llama8b": Preset(LLAMA8B, GPU_ENGINE),
    "llama8b_fp8": Preset(LLAMA8B | dict(quantization_config=_FP8_BLOCKS), SEVERAL_STEPS),
    "llama8b_fp8_block_inputs": Preset(
        LLAMA8B | dict(quantization_config=_FP8_BLOCKS | dict(activation_scheme="dynamic")),
        SEVERAL_STEPS,
    ),
    "llama8b_fp8_inputs": Preset(LLAMA8B | dict(quantization_config=_FP8_INPUTS), GPU_ENGINE),
    "llama8b_4bit": Preset(LLAMA8B | dict(quantization_config=_GPTQ), SEVERAL_STEPS),
    "llama70b": Preset(  # for several GPUs
        LLAMA8B | dict(hidden_size=8192, intermediate_size=28672, num_hidden_layers=80,
                       num_attention_heads=64),
        GPU_ENGINE,
    ),
    "qwen06b": Preset(
        _config("Qwen3ForCausalLM", "qwen3", "1024 3072 28 16 8 151936", head_dim=128,
                rms_norm_eps=1e-6, rope_theta=1000000.0, tie_word_embeddings=True),
        SEVERAL_STEPS,
    ),
    "qwen3_30b_a3b": Preset(
        _config("Qwen3MoeForCausalLM", "qwen3_moe", "2048 6144 48 32 4 151936", head_dim=128,
                rms_norm_eps=1e-6, rope_theta=1000000.0, tie_word_embeddings=False,
                num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768,
                norm_topk_prob=True, decoder_sparse_step=1, mlp_only_layers=[]),
        # The many small kernels of a step of one request take the host longer than the GPU.
        SEVERAL_STEPS,
    ),
    "deepseek_v2_lite": Preset(
        _config("DeepseekV2ForCausalLM", "deepseek_v2", "2048 10944 27 16 16 102400",
                rms_norm_eps=1e-6, rope_theta=10000.0, tie_word_embeddings=False,
                rope_scaling=dict(type="yarn", factor=40, mscale=0.707, mscale_all_dim=0.707,
                                  beta_fast=32, beta_slow=1,
                                  original_max_position_embeddings=4096),
                kv_lora_rank=512, q_lora_rank=None, qk_nope_head_dim=128, qk_rope_head_dim=64,
                v_head_dim=128, n_routed_experts=64, num_experts_per_tok=6, n_shared_experts=2,
                moe_intermediate_size=1408, first_k_dense_replace=1, moe_layer_freq=1,
                topk_method="greedy", scoring_func="softmax", norm_topk_prob=False, n_group=1,
                topk_group=1, routed_scaling_factor=1.0),
        SEVERAL_STEPS,
    ),
    "gemma3_12b": Preset(
        _config("Gemma3ForCausalLM", "gemma3_text", "3840 15360 48 16 8 262208", head_dim=256,
                hidden_activation="gelu_pytorch_tanh", rms_norm_eps=1e-6, rope_theta=1000000.0,
                rope_local_base_freq=10000.0, rope_scaling=dict(rope_type="linear", factor=8.0),
                sliding_window=1024, sliding_window_pattern=6, query_pre_attn_scalar=256,
                tie_word_embeddings=True),
        GPU_ENGINE,
    ),
    "granite4_h_tiny": Preset(
        _config("GraniteMoeHybridForCausalLM", "granitemoehybrid", "1536 512 40 12 4 100352",
                layer_types=[*["mamba"] * 5, *(["attention"] + ["mamba"] * 9) * 3, "attention",
                             *["mamba"] * 4],
                rms_norm_eps=1e-5, position_embedding_type="nope", tie_word_embeddings=True,
                mamba_n_heads=48, mamba_d_head=64, mamba_d_state=128, mamba_n_groups=1,
                mamba_d_conv=4, mamba_expand=2, mamba_conv_bias=True, mamba_proj_bias=False,
                num_local_experts=64, num_experts_per_tok=6, shared_intermediate_size=1024,
                attention_multiplier=1 / 128, embedding_multiplier=12, logits_scaling=6,
                residual_multiplier=0.22),
        SEVERAL_STEPS,
    ),
    "qwen35_9b": Preset(  # texts
        _config("Qwen3_5ForCausalLM", "qwen3_5_text", "4096 12288 32 16 4 248320", head_dim=256,
                layer_types=[*["linear_attention"] * 3, "full_attention"] * 8, rms_norm_eps=1e-6,
                rope_parameters=dict(rope_type="default", rope_theta=10000000.0,
                                     partial_rotary_factor=0.25),
                tie_word_embeddings=False, linear_conv_kernel_dim=4, linear_key_head_dim=128,
                linear_value_head_dim=128, linear_num_key_heads=16, linear_num_value_heads=32),
        GPU_ENGINE | dict(decode_buckets=(1, 8, 32, 64, 128, 256)),
    ),
    "tiny": Preset(
        _config("LlamaForCausalLM", "llama", "256 768 8 4 2 4096", head_dim=64,
                rope_theta=10000.0, tie_word_embeddings=True),
        dict(max_model_len=1024, max_num_seqs=16, max_num_batched_tokens=512, dtype="float32",
             token_buckets=(64, 512), decode_buckets=(1, 16)),
        batches=(1, 16), sampled_batches=(1, 16), context=128, new=36,
        prefill=(4, 256), ttft=(64, 128), offline=(32, 64, 32), mixed=((8, 128), (8, 64)),
        embed=(32, 64), host_batches=(1, 16),
    ),
}  # fmt: skip
