"""Checkpoint folders with random weights, and an `LLM` of one that compiles little."""

from collections.abc import Sequence
import json
from pathlib import Path
from typing import Any
import zlib

import jax
import numpy as np
from safetensors.numpy import save_file

from jaxrunner import LLM, SamplingParams
from jaxrunner.hf_config import Settings
from jaxrunner.model import Model, Source

SIZES: dict[str, Any] = dict(
    max_model_len=48, max_num_seqs=3, max_num_batched_tokens=8, token_buckets=(8,),
    decode_buckets=(3,), num_blocks=64, block_size=4, dtype="float32", use_tqdm=False,
    warm_up=False, cache_dir=None, skip_tokenizer_init=True,
)  # fmt: skip
LLAMA: dict[str, Any] = dict(
    hidden_size=20, intermediate_size=28, num_hidden_layers=2, num_attention_heads=6,
    num_key_value_heads=2, head_dim=8, vocab_size=61, max_position_embeddings=64,
    rms_norm_eps=1e-5, tie_word_embeddings=False, hidden_act="silu", dtype="float32",
)  # fmt: skip


def weight(name: str, shape: Sequence[int]) -> np.ndarray:
    """Returns a random tensor, large enough that tokens depend on all of the context."""
    noise = np.random.default_rng(zlib.crc32(name.encode())).normal(size=shape)
    middle, spread = (1.0, 0.2) if "norm" in name else (0.0, 0.4)
    return (middle + spread * noise).astype(np.float32)


def write(folder: Path, model: Model, settings: dict[str, Any]) -> dict[str, np.ndarray]:
    """Writes config.json and the tensors that a model's sources name. Returns the tensors."""
    config = model.read(Settings(settings))
    sources = jax.tree.leaves(model.sources(config), is_leaf=lambda x: isinstance(x, Source))
    shapes = {n: s for x in sources for n, s in zip(x.names, x.shapes, strict=True)}
    tensors = {name: weight(name, shape) for name, shape in shapes.items()}
    save_file(tensors, str(folder / "model.safetensors"))
    (folder / "config.json").write_text(json.dumps(settings))
    return tensors


def start(folder: Path, **changes: Any) -> LLM:
    """Returns an `LLM` of a folder."""
    return LLM(str(folder), **SIZES | changes)


def answers(llm: LLM, prompts: list[list[int]], params: Any) -> list[list[int]]:
    """Returns the tokens of each answer, of all its completions."""
    asked = [{"prompt_token_ids": ids} for ids in prompts]
    outputs = llm.generate(asked, params, use_tqdm=False)
    assert not [o.error for o in outputs if o.error]
    return [list(one.token_ids) for output in outputs for one in output.outputs]


def greedy(count: int, **changes: Any) -> SamplingParams:
    """Returns parameters without a choice."""
    return SamplingParams(temperature=0.0, max_tokens=count, detokenize=False, **changes)


def prompts(*lengths: int, seed: int = 0) -> list[list[int]]:
    """Returns random prompts."""
    rng = np.random.default_rng(seed)
    return [rng.integers(0, LLAMA["vocab_size"], n).tolist() for n in lengths]
