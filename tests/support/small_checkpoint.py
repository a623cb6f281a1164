"""Tiny checkpoints: one that meshes of up to four devices can cut, with an `LLM` of it, and those
of any family."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from jaxrunner import LLM, SamplingParams
from jaxrunner.api.sampling_params import StructuredOutputsParams
from jaxrunner.hf_config import Settings
from jaxrunner.loading.weights import save_checkpoint
from jaxrunner.models.llama import llama
from jaxrunner.models.registry import read_model
from tests.support import processes, small_llm, tiny
from tests.support.checkpoints import random_params

SETTINGS: dict[str, Any] = tiny.SETTINGS | dict(
    hidden_size=24, intermediate_size=32, num_attention_heads=8, num_key_value_heads=4, head_dim=4,
    vocab_size=64, eos_token_id=63,
)  # fmt: skip
# Of an `LLM` of a checkpoint that `save_model` wrote.
SIZES: dict[str, Any] = small_llm.SIZES | dict(skip_tokenizer_init=True)
PROMPTS = "ABBA", "XYZ", "Q" * 9  # of the 64 characters that `processes.tokenizer` knows
CHOICE = StructuredOutputsParams(choice=["ABBA", "BAAB"]) if find_spec("llguidance") else None
PARAMS = [
    SamplingParams(temperature=0, max_tokens=14, ignore_eos=True),
    SamplingParams(temperature=0.9, seed=4, max_tokens=14, top_k=9, logprobs=2),
    SamplingParams(structured_outputs=CHOICE, max_tokens=14, seed=1),
]


def save(folder: Path, **settings: Any) -> Path:
    """Writes random weights and returns their folder. settings: that differ from `SETTINGS`."""
    config = tiny.config(**SETTINGS | settings)
    save_checkpoint(folder, llama, config, tiny.random_params(config, seed=3), SETTINGS | settings)
    return folder


def save_model(folder: Path, seed: int = 0, **changes: Any) -> Path:
    """Writes a checkpoint of the tiny decoder, with `changes` of its sizes."""
    settings = tiny.SETTINGS | dict(dtype="float32") | changes
    model, config = read_model(Settings(settings))
    save_checkpoint(folder, model, config, random_params(model, config, seed=seed), settings)
    return folder


def save_family(folder: Path, settings: dict[str, Any]) -> str:
    """Writes random weights of the family that `settings` name, and returns their folder."""
    model, config = read_model(Settings(settings))
    params = tiny.random_params(config, seed=5, params=model.params)
    save_checkpoint(folder, model, config, params, settings)
    return str(folder)


def start(folder: Path, **options: Any) -> LLM:
    """Returns an `LLM` of few small programs."""
    own: dict[str, Any] = dict(tokenizer=processes.tokenizer(), generation_config="vllm")
    return LLM(str(folder), **processes.SIZES | own | options)


def tokens(llm: LLM) -> list[list[int]]:
    """Returns what it answers `PROMPTS`."""
    outputs = llm.generate([*PROMPTS], PARAMS, on_error="raise", use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]
