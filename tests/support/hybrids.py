"""Tiny random checkpoints of hybrids, whose layers keep states, saved by transformers."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.checkpoints import NEEDS_TORCH

SIZES: dict[str, Any] = dict(
    vocab_size=62, hidden_size=48, intermediate_size=44, num_hidden_layers=3,
    num_attention_heads=6, num_key_value_heads=2, max_position_embeddings=128,
    bos_token_id=None, eos_token_id=None, pad_token_id=None,
)  # fmt: skip
LFM2 = dict(layer_types=["conv", "full_attention", "conv"], block_auto_adjust_ff_dim=False)
# Name: (what classes of transformers begin with, changes of the config's keys).
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "lfm 2": ("Lfm2", LFM2),
    "lfm 2, biases, wide": ("Lfm2", dict(
        conv_bias=True, conv_L_cache=5, full_attn_idxs=[0], tie_word_embeddings=False,
        block_multiple_of=16)),
}  # fmt: skip


def config(variant: str) -> Any:
    """Returns a variant's config of transformers."""
    transformers = pytest.importorskip("transformers", reason=NEEDS_TORCH)
    family, changes = VARIANTS[variant]
    return getattr(transformers, f"{family}Config")(**SIZES | changes)


def settings(variant: str) -> dict[str, Any]:
    """Returns the keys of a variant's `config.json`."""
    return config(variant).to_dict() | dict(architectures=[f"{VARIANTS[variant][0]}ForCausalLM"])


def save(variant: str, folder: Path) -> Any:
    """Writes a variant's checkpoint, with weights that make tokens depend on all before them.

    Returns its module.
    """
    torch = pytest.importorskip("torch", reason=NEEDS_TORCH)
    transformers = pytest.importorskip("transformers", reason=NEEDS_TORCH)
    found = config(variant)
    found._attn_implementation = "eager"
    made = getattr(transformers, f"{VARIANTS[variant][0]}ForCausalLM")(found).eval()
    torch.manual_seed(len(variant))
    for name, weight in made.named_parameters():
        middle, spread = (1.0, 0.2) if "norm" in name else (0.0, 0.3)
        torch.nn.init.normal_(weight, middle, spread)
    made.save_pretrained(folder)
    return made


def logits(module: Any, ids: list[int]) -> np.ndarray:
    """Returns the logits of every position of a sequence, [T, V], in the module's dtype."""
    import torch

    with torch.no_grad():
        return module(torch.tensor([ids]), use_cache=False).logits[0].numpy()
