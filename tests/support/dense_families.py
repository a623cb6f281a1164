"""Tiny random checkpoints of the families of `models.dense`, saved by transformers."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.checkpoints import NEEDS_TORCH

SIZES: dict[str, Any] = dict(
    vocab_size=62, hidden_size=36, intermediate_size=44, num_hidden_layers=2,
    num_attention_heads=6, num_key_value_heads=2, head_dim=8, max_position_embeddings=128,
)  # fmt: skip
NO_IDS = dict(bos_token_id=None, eos_token_id=None, pad_token_id=None)
WIDE = dict(hidden_size=48, head_dim=None)  # of families whose heads have hidden_size / heads
BOTH = ["sliding_attention", "full_attention"]
YARN = dict(rope_type="yarn", rope_theta=10000.0, factor=4.0, original_max_position_embeddings=32)
PAIRS = [1.0 + 0.5 * i for i in range(3)]
LONG = dict(
    rope_type="longrope", rope_theta=10000.0, partial_rotary_factor=0.75, short_factor=PAIRS,
    long_factor=[4 * x for x in PAIRS],
)  # fmt: skip
LLAMA3 = dict(rope_type="llama3", rope_theta=10000.0, factor=8.0, low_freq_factor=1.0,
              high_freq_factor=4.0, original_max_position_embeddings=16)  # fmt: skip
SCALES = dict(embedding_multiplier=3.0, attention_multiplier=0.5, residual_multiplier=0.3,
              logits_scaling=1.7)  # fmt: skip
TWO = dict(full_attention=YARN, sliding_attention=dict(rope_type="default", rope_theta=10000.0))
GPT2 = dict(n_embd=48, n_head=6, n_layer=2, n_positions=128, vocab_size=62)
# Name: (what classes of transformers begin with, changes of the config's keys).
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma 2": ("Gemma2", dict(
        sliding_window=9, query_pre_attn_scalar=12, attn_logit_softcapping=3.0,
        final_logit_softcapping=5.0)),
    "gemma 3": ("Gemma3", dict(sliding_window=9, query_pre_attn_scalar=12,
                               sliding_window_pattern=2)),
    "gemma 3, scaled, capped logits": ("Gemma3", dict(
        sliding_window=9, layer_types=BOTH, final_logit_softcapping=5.0, rope_parameters=dict(
            full_attention=dict(rope_type="linear", rope_theta=1e6, factor=8.0)))),
    "gemma 3, beside a tower": ("Gemma3Vision", dict(
        sliding_window=9, query_pre_attn_scalar=12, layer_types=BOTH)),
    "phi 3": ("Phi3", WIDE | dict(sliding_window=9)),
    "phi 4 mini": ("Phi3", WIDE | dict(rope_parameters=LONG, tie_word_embeddings=True,
                                       original_max_position_embeddings=32)),
    "olmo 2": ("Olmo2", dict(attention_bias=True)),
    "olmo 2, one key": ("Olmo2", dict(num_key_value_heads=1)),
    "glm 4": ("Glm", {}),
    "glm 4, 0414": ("Glm4", dict(rms_norm_eps=1e-3)),
    "smollm 3": ("SmolLM3", dict(no_rope_layers=[1, 0])),
    "granite 3": ("Granite", WIDE | SCALES),
    "command r": ("Cohere", WIDE),
    "command r7b": ("Cohere2", WIDE | dict(
        sliding_window=9, logit_scale=0.3, layer_types=BOTH)),
    "exaone 4": ("Exaone4", dict(
        sliding_window=9, rope_parameters=LLAMA3, layer_types=BOTH)),
    "exaone 4, no window": ("Exaone4", dict(sliding_window=None, tie_word_embeddings=True,
                                            layer_types=["full_attention"] * 2)),
    "starcoder 2": ("Starcoder2", WIDE | dict(sliding_window=9)),
    "gpt 2": ("GPT2", GPT2),
    "pythia": ("GPTNeoX", WIDE | dict(num_key_value_heads=None, rope_parameters=dict(
        rope_type="default", rope_theta=10000.0, partial_rotary_factor=0.25))),
    "neox, one after the other": ("GPTNeoX", WIDE | dict(
        num_key_value_heads=None, use_parallel_residual=False, tie_word_embeddings=True)),
    "olmo 3": ("Olmo3", dict(sliding_window=9, rope_parameters=TWO, layer_types=BOTH)),
    "ministral 3": ("Ministral3", dict(rope_parameters=YARN | dict(llama_4_scaling_beta=0.7))),
    "ministral 3, beside a tower": ("Mistral3", dict(
        model_type="ministral3", rope_parameters=YARN | dict(llama_4_scaling_beta=0.7))),
    "mistral small 3.1": ("Mistral3", dict(model_type="mistral", tie_word_embeddings=True)),
}  # fmt: skip
TOWER = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
             image_size=8, patch_size=4, model_type="siglip_vision_model")  # fmt: skip
PIXTRAL = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
               head_dim=8, image_size=8, patch_size=4, model_type="pixtral")  # fmt: skip
TOWER_IDS = dict(image_token_index=61, boi_token_index=61, eoi_token_index=61)
CONFIGS = dict(Gemma3="Gemma3TextConfig")


def config(variant: str) -> Any:
    """Returns a variant's config of transformers."""
    transformers = pytest.importorskip("transformers", reason=NEEDS_TORCH)
    family, changes = VARIANTS[variant]
    values = changes if family == "GPT2" else SIZES | changes
    if family == "Gemma3Vision":
        text = {**SIZES, **changes, **NO_IDS}
        both = dict(text_config=text, vision_config=TOWER, mm_tokens_per_image=1)
        return transformers.Gemma3Config(**both | TOWER_IDS)
    if family == "Mistral3":
        text = {**SIZES, **changes, **NO_IDS}
        tied = text.get("tie_word_embeddings", False)
        both = dict(text_config=text, vision_config=PIXTRAL, tie_word_embeddings=tied)
        return transformers.Mistral3Config(**both, image_token_index=61)
    derived = ("head_dim", "num_key_value_heads")
    values = {k: v for k, v in values.items() if v is not None or k not in derived}
    return getattr(transformers, CONFIGS.get(family, f"{family}Config"))(**values | NO_IDS)


def settings(variant: str) -> dict[str, Any]:
    """Returns the keys of a variant's `config.json`."""
    family = VARIANTS[variant][0]
    return config(variant).to_dict() | dict(architectures=[class_of(family)])


def class_of(family: str) -> str:
    """Returns the class of transformers that computes logits."""
    own = dict(
        GPT2="GPT2LMHeadModel",
        Gemma3Vision="Gemma3ForConditionalGeneration",
        Mistral3="Mistral3ForConditionalGeneration",
    )
    return own.get(family, f"{family}ForCausalLM")


def model(variant: str) -> Any:
    """Returns a variant's module of transformers, with random weights."""
    torch = pytest.importorskip("torch", reason=NEEDS_TORCH)
    transformers = pytest.importorskip("transformers", reason=NEEDS_TORCH)
    found = config(variant)
    found._attn_implementation = "eager"
    made = getattr(transformers, class_of(VARIANTS[variant][0]))(found).eval()
    torch.manual_seed(len(variant))
    for name, weight in made.named_parameters():
        norm = "norm" in name or ".ln_" in name
        torch.nn.init.normal_(weight, mean=1.0 if norm else 0.0, std=0.2 if norm else 0.3)
    return made


def save(variant: str, folder: Path) -> Any:
    """Writes a variant's checkpoint. Returns its module."""
    made = model(variant)
    made.save_pretrained(folder)
    return made


def logits(module: Any, texts: list[list[int]]) -> list[np.ndarray]:
    """Returns the logits of every position of sequences, [T, V] each, in the module's dtype."""
    import torch

    longest = max(map(len, texts))
    ids = torch.tensor([text + [0] * (longest - len(text)) for text in texts])
    with torch.no_grad():
        found = module(ids, use_cache=False).logits.numpy()
    return [found[i, : len(text)] for i, text in enumerate(texts)]
