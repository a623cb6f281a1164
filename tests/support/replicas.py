"""A checkpoint for engines side by side, and an `LLM` of these."""

from pathlib import Path
from typing import Any

import pytest

from jaxrunner import LLM, SamplingParams
from jaxrunner.loading.weights import save_checkpoint
from jaxrunner.models.llama import llama
from tests.support import tiny

MODEL: dict[str, Any] = dict(
    hidden_size=24, intermediate_size=32, num_attention_heads=8, vocab_size=64, head_dim=4,
    num_key_value_heads=2, num_hidden_layers=1,
)  # fmt: skip
SIZES: dict[str, Any] = dict(
    max_model_len=48, num_blocks=14, block_size=4, max_num_seqs=4, max_num_batched_tokens=32,
    token_buckets=(32,), decode_buckets=(4,), dtype="float32", use_tqdm=False, warm_up=False,
    cache_dir=None, generation_config="vllm",
)  # fmt: skip
TWO: dict[str, Any] = dict(data_parallel_size=2)
GREEDY = SamplingParams(temperature=0, max_tokens=6)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Returns a checkpoint; `other` in it has weights of another seed."""
    folder, config = tmp_path_factory.mktemp("checkpoint"), tiny.config(**MODEL)
    for path, seed in ((folder, 3), (folder / "other", 4)):
        params = tiny.random_params(config, seed=seed)
        save_checkpoint(path, llama, config, params, tiny.SETTINGS | MODEL | dict(eos_token_id=63))
    return folder


def open_llm(folder: Path, **sizes: Any) -> LLM:
    """Returns an `LLM` of the checkpoint."""
    return LLM(folder, tokenizer=tiny.tokenizer(), **SIZES | sizes)


def ids(prompts: list[list[int]]) -> list[dict[str, list[int]]]:
    """Returns prompts as an `LLM` takes them."""
    return [{"prompt_token_ids": prompt} for prompt in prompts]
