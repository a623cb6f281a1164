"""Tiny random checkpoints of hybrids, whose layers keep states, saved by transformers."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.checkpoints import NEEDS_TORCH

SIZES: dict[str, Any] = dict(
    vocab_size=62, hidden_size=48, intermediate_size=44, num_hidden_layers=2,
    num_attention_heads=6, num_key_value_heads=2, max_position_embeddings=128,
    bos_token_id=None, eos_token_id=None, pad_token_id=None,
)  # fmt: skip
# Of an `LLM`: chunks of 24 tokens beside rows that decode, blocks for half of the requests.
LLM_SIZES: dict[str, Any] = dict(
    skip_tokenizer_init=True, dtype="float32", max_model_len=80, block_size=4, num_blocks=40,
    max_num_seqs=4, max_num_batched_tokens=24, token_buckets=(24,), decode_buckets=(4,),
    warm_up=False, cache_dir=None,
)  # fmt: skip
LFM2 = dict(layer_types=["conv", "full_attention"], block_auto_adjust_ff_dim=False)
MAMBA = dict(
    mamba_n_heads=8, mamba_n_groups=2, mamba_d_state=10, mamba_expand=2, mamba_d_conv=4,
    mamba_chunk_size=16,
)  # fmt: skip
GRANITE = MAMBA | dict(
    layer_types=["linear_attention", "full_attention"],
    shared_intermediate_size=20, embedding_multiplier=3.0, attention_multiplier=0.2,
    residual_multiplier=0.7, logits_scaling=2.0,
)  # fmt: skip
QWEN = dict(
    layer_types=["linear_attention", "full_attention"], head_dim=8,
    linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=6,
    linear_value_head_dim=10, num_experts=6, num_experts_per_tok=2, moe_intermediate_size=12,
    shared_expert_intermediate_size=20,
)  # fmt: skip
FALCON = MAMBA | dict(
    mamba_d_ssm=80, mamba_rms_norm=False, head_dim=10, embedding_multiplier=3.0,
    lm_head_multiplier=0.4, mlp_multipliers=[0.7, 1.6], key_multiplier=0.6,
    attention_in_multiplier=1.3, attention_out_multiplier=0.8, ssm_in_multiplier=1.2,
    ssm_out_multiplier=0.9, ssm_multipliers=[0.5, 1.4, 0.8, 1.1, 0.6], time_step_limit=[0.1, 2.0],
)  # fmt: skip
NEMOTRON = dict(
    layers_block_type=["linear_attention", "mlp", "full_attention", "moe"], head_dim=8,
    mamba_num_heads=6, mamba_head_dim=10, n_groups=2, ssm_state_size=10, chunk_size=16,
    n_routed_experts=6, num_experts_per_tok=2, moe_intermediate_size=12, n_group=3, topk_group=2,
    moe_shared_expert_intermediate_size=20, routed_scaling_factor=1.7,
    # Transformers clips steps of prompts there, and none of the tokens that follow.
    time_step_min=1e-12,
)  # fmt: skip
QWEN_3_5 = {key: x for key, x in QWEN.items() if key.startswith(("layer", "linear", "head"))}
# Name: (what classes of transformers begin with, changes of the config's keys).
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "lfm 2": ("Lfm2", LFM2),
    "lfm 2, biases, wide": ("Lfm2", dict(
        conv_bias=True, conv_L_cache=5, full_attn_idxs=[1], num_hidden_layers=3,
        tie_word_embeddings=False, block_multiple_of=16)),
    "bamba": ("Bamba", MAMBA | dict(attn_layer_indices=[1], mamba_proj_bias=True)),
    "granite 4": ("GraniteMoeHybrid", GRANITE | dict(num_local_experts=6, num_experts_per_tok=2)),
    "granite 4, dense, rotated": ("GraniteMoeHybrid", GRANITE | dict(
        num_local_experts=0, position_embedding_type="rope", mamba_conv_bias=False)),
    "falcon h1": ("FalconH1", FALCON),
    "falcon h1, normed": ("FalconH1", FALCON | dict(
        mamba_rms_norm=True, mamba_d_ssm=None, mamba_norm_before_gate=False)),
    "falcon h1, normed before, biases": ("FalconH1", FALCON | dict(
        mamba_rms_norm=True, attention_bias=True, mlp_bias=True, mamba_proj_bias=True,
        projectors_bias=True)),
    "nemotron h": ("NemotronH", NEMOTRON),
    "nemotron h, latent experts, biases": ("NemotronH", NEMOTRON | dict(
        moe_latent_size=14, mlp_bias=True, use_bias=True, n_group=1, topk_group=1)),
    "qwen 3.5": ("Qwen3_5", QWEN_3_5 | dict(tie_word_embeddings=True)),
    "qwen 3.5, experts": ("Qwen3_5Moe", QWEN | dict(linear_num_value_heads=6)),
    "qwen 3 next": ("Qwen3Next", QWEN),
    "qwen 3 next, dense layers, biases": ("Qwen3Next", QWEN | dict(
        mlp_only_layers=[1], attention_bias=True, head_dim=16, linear_conv_kernel_dim=3)),
}  # fmt: skip


TOWER = dict(
    depth=1, hidden_size=16, intermediate_size=16, num_heads=2, patch_size=4, out_hidden_size=48,
    num_position_embeddings=16,
)  # fmt: skip
# Families that have a vision tower, and the variant of their text model.
BESIDE_TOWERS = dict(Qwen3_5="qwen 3.5", Qwen3_5Moe="qwen 3.5, experts")
CONFIGS = dict(Qwen3_5="Qwen3_5TextConfig", Qwen3_5Moe="Qwen3_5MoeTextConfig")


def config(variant: str, **more: Any) -> Any:
    """Returns a variant's config of transformers. more: keys that differ from the variant's."""
    transformers = pytest.importorskip("transformers", reason=NEEDS_TORCH)
    family, changes = VARIANTS[variant]
    return getattr(transformers, CONFIGS.get(family, f"{family}Config"))(**SIZES | changes | more)


def settings(variant: str) -> dict[str, Any]:
    """Returns the keys of a variant's `config.json`."""
    return config(variant).to_dict() | dict(architectures=[f"{VARIANTS[variant][0]}ForCausalLM"])


def save(variant: str, folder: Path, **more: Any) -> Any:
    """Writes a variant's checkpoint, with weights that make tokens depend on all before them.

    more: as `config` has it. Returns its module.
    """
    return _save(variant, f"{VARIANTS[variant][0]}ForCausalLM", config(variant, **more), folder)


def save_beside_tower(family: str, variant: str, folder: Path) -> Any:
    """Does what `save` does, of a model that has a vision tower beside the text model."""
    transformers = pytest.importorskip("transformers", reason=NEEDS_TORCH)
    text = config(variant)
    both = getattr(transformers, f"{family}Config")(
        text_config=text.to_dict(), vision_config=TOWER,
        tie_word_embeddings=text.tie_word_embeddings,
    )  # fmt: skip
    return _save(variant, f"{family}ForConditionalGeneration", both, folder)


def _save(variant: str, name: str, found: Any, folder: Path) -> Any:
    torch = pytest.importorskip("torch", reason=NEEDS_TORCH)
    transformers = pytest.importorskip("transformers", reason=NEEDS_TORCH)
    found._attn_implementation = "eager"
    made = getattr(transformers, name)(found).eval()
    if {"num_local_experts", "num_experts", "n_routed_experts"} & VARIANTS[variant][1].keys():
        made.set_experts_implementation("eager")  # others have no float64
    torch.manual_seed(len(variant))
    of_products = 0.15 if "Qwen" in type(made).__name__ else 0.25  # as much as float32 tells apart
    buffers = (pair for pair in made.named_buffers() if "correction" in pair[0])
    for name, weight in (*made.named_parameters(), *buffers):
        middle, spread = (1.0, 0.2) if "norm" in name else (0.0, of_products)
        torch.nn.init.normal_(weight.data, middle, spread)
    made.save_pretrained(folder)
    return made


def is_ungrouped(part: Any) -> bool:
    """Returns whether a module is a gated norm of Bamba's or Granite 4's that knows no groups."""
    names = "BambaRMSNormGated", "GraniteMoeHybridRMSNormGated"
    return type(part).__name__ in names and not hasattr(part, "group_size")


def logits(module: Any, ids: list[int]) -> np.ndarray:
    """Returns the logits of every position of a sequence, [T, V], in the module's dtype.

    Skips the test where transformers, before the release that gave these norms a group size, takes
    all groups of a state-space layer for one.
    """
    import torch

    if any(is_ungrouped(part) for part in module.modules()):
        pytest.skip("this transformers norms all groups of Mamba-2 together: it wants a newer one")
    with torch.no_grad():
        return module(torch.tensor([ids]), use_cache=False).logits[0].numpy()
