"""A tiny checkpoint in a folder, an LLM of it, and an engine: what is attacked, and canaries."""

import atexit
from collections.abc import Iterator
import functools
import json
from pathlib import Path
import shutil
import tempfile
from typing import Any

import jax
import numpy as np

from jaxrunner import LLM, SamplingParams
from jaxrunner.engine.engine import Engine
from jaxrunner.models.llama import llama
from tests.support import checkpoints, features, tiny

SIZES: dict[str, Any] = dict(
    max_model_len=48, max_num_seqs=5, max_num_batched_tokens=32, token_buckets=(32,),
    decode_buckets=(5,), num_blocks=60, block_size=4, use_tqdm=False, warm_up=False, cache_dir=None,
)  # fmt: skip
TEMPLATE = "{% for m in messages %}{{ m['role'] }}:{{ m['content'] }};{% endfor %}"
# Of a checkpoint, those that are no weights.
FILES = ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json")
PROMPT = [3, 1, 4, 1, 5]
PARAMS = SamplingParams(temperature=0.9, seed=5, max_tokens=9)


@functools.cache
def scratch() -> Path:
    """Returns a folder of this process, which goes with it."""
    folder = Path(tempfile.mkdtemp(prefix="attack"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def write_checkpoint(folder: Path) -> Path:
    """Writes the tiny decoder as Hugging Face's libraries save one."""
    folder.mkdir(parents=True)
    config, params = tiny.model_and_params()
    more = dict(dtype="float32", hidden_act="silu", rope_theta=10000.0, rms_norm_eps=1e-6)
    ids = dict(bos_token_id=1, eos_token_id=2)
    (folder / "config.json").write_text(json.dumps(tiny.SETTINGS | more | ids))
    checkpoints.write(folder / "model.safetensors", checkpoints.split(llama, config, params))
    tiny.tokenizer().inner.save(str(folder / "tokenizer.json"))
    tokens = dict(bos_token="B", eos_token="C", chat_template=TEMPLATE)
    (folder / "tokenizer_config.json").write_text(json.dumps(tokens))
    (folder / "generation_config.json").write_text(json.dumps(dict(temperature=0.7, top_p=0.95)))
    return folder


@functools.cache
def checkpoint() -> Path:
    """Returns the folder of a good checkpoint."""
    return write_checkpoint(scratch() / "good")


def llm(**changes: Any) -> LLM:
    """Returns an LLM of the good checkpoint."""
    return LLM(str(checkpoint()), **SIZES | changes)


def engine(**changes: Any) -> Engine:
    """Returns an engine of the tiny decoder."""
    config, params = tiny.model_and_params()
    sizes = tiny.engine_config(**changes)
    return Engine(llama, config, sizes, params, make_compiler=features.ParityCompiler)


@functools.cache
def calm() -> Engine:
    """Returns an engine that nothing is thrown at itself."""
    return engine()


def neighbour(e: Engine, name: str = "canary") -> Iterator[Any]:
    """Yields after each step of a request, and last its tokens and why it ended."""
    request = e.add(name, PROMPT, PARAMS)
    while request.finish_reason is None:
        yield None
        e.step()
    yield request.output_token_ids, request.finish_reason, request.error


def streamed(model: LLM) -> Iterator[Any]:
    """Yields after each part of a stream, and last its tokens and why it ended."""
    tokens, part = [], None
    for part in model.stream({"prompt_token_ids": PROMPT}, PARAMS):
        tokens += part.outputs[0].token_ids
        if not part.finished:
            yield None
    assert part is not None
    yield tokens, part.outputs[0].finish_reason, part.error


def digest(params: Any) -> list[bytes]:
    """Returns the bytes of weights."""
    return [np.asarray(x).tobytes() for x in jax.tree.leaves(params)]
