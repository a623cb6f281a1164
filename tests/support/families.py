"""Every family and variant that models are tested in, with weights anyone can make again."""

from typing import Any
import zlib

import jax
import jax.numpy as jnp
import numpy as np

from jaxrunner.hf_config import Settings
from jaxrunner.model import Source
from jaxrunner.models.decoder_config import DecoderConfig
from jaxrunner.models.registry import read_model

BASE: dict[str, Any] = dict(
    hidden_size=36, intermediate_size=44, num_hidden_layers=3, num_attention_heads=6,
    num_key_value_heads=2, head_dim=8, vocab_size=61, max_position_embeddings=256,
    hidden_act="silu", rms_norm_eps=1e-5, tie_word_embeddings=False,
)  # fmt: skip


def rope(**parameters):
    return dict(rope_parameters=dict(rope_theta=10000.0) | parameters)


LLAMA3 = rope(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
              original_max_position_embeddings=16)  # fmt: skip
YARN = rope(rope_type="yarn", factor=4.0, original_max_position_embeddings=16)
VARIANTS = {
    "llama": ("Llama", {}),
    "llama, tied": ("Llama", dict(tie_word_embeddings=True)),
    "llama, biases": ("Llama", dict(attention_bias=True, mlp_bias=True)),
    "llama, all heads have a key": ("Llama", dict(num_key_value_heads=6)),
    "llama, one key": ("Llama", dict(num_key_value_heads=1)),
    "llama, derived head size": ("Llama", dict(hidden_size=48, head_dim=None)),
    "llama, llama3 rope": ("Llama", LLAMA3),
    "llama, linear rope": ("Llama", rope(rope_type="linear", factor=2.0)),
    "llama, dynamic rope": ("Llama", rope(rope_type="dynamic", factor=4.0)
                            | dict(max_position_embeddings=32)),
    "llama, yarn": ("Llama", YARN),
    "mimo": ("MiMo", dict(hidden_size=48, head_dim=None, num_nextn_predict_layers=1)),
    "mistral": ("Mistral", dict(sliding_window=7)),
    "mistral, no window": ("Mistral", dict(sliding_window=None)),
    "qwen2": ("Qwen2", dict(hidden_size=48, head_dim=None)),
    "qwen2, some windows": ("Qwen2", dict(hidden_size=48, head_dim=None, use_sliding_window=True,
                                          sliding_window=5, max_window_layers=1)),
    "qwen3": ("Qwen3", {}),
    "qwen3, tied": ("Qwen3", dict(tie_word_embeddings=True)),
}  # fmt: skip


def settings(variant: str) -> dict:
    """Returns the keys of a variant's `config.json`."""
    family, changes = VARIANTS[variant]
    values = BASE | changes | dict(architectures=[f"{family}ForCausalLM"])
    return {k: v for k, v in values.items() if v is not None or k == "sliding_window"}


def weight(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Returns the weight of a tensor: random, the same everywhere."""
    noise = np.random.default_rng(zlib.crc32(name.encode())).normal(size=shape)
    middle, spread = (1.0, 0.2) if "norm" in name else (0.0, 0.3)
    return (middle + spread * noise).astype(np.float32)


def model_and_params(variant: str):
    """Returns the family, the config and the weights of a variant."""
    model, config = read_model(Settings(settings(variant)))
    assert isinstance(config, DecoderConfig)

    def join(source: Source):
        parts = [weight(n, s) for n, s in zip(source.names, source.shapes, strict=True)]
        return jnp.asarray(source.join(parts))

    sources = model.sources(config)
    return model, config, jax.tree.map(join, sources, is_leaf=lambda x: isinstance(x, Source))


def ids(count: int, seed: int = 0) -> list[int]:
    """Returns random token ids."""
    return np.random.default_rng(seed).integers(0, BASE["vocab_size"], count).tolist()
