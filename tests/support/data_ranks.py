"""A mixture over data ranks: its settings, sizes of an `LLM` of it, and its engine."""

from pathlib import Path
from typing import Any

import jax

from jaxrunner import SamplingParams
from jaxrunner.engine.engine import Engine
from jaxrunner.hf_config import Settings
from jaxrunner.loading.weights import load_params
from jaxrunner.models.registry import read_model
from jaxrunner.parallel.mesh import make_mesh
from jaxrunner.parallel.tensor import shard
from tests.support import tiny
from tests.support.features import ParityCompiler

D = 3  # ranks
MIXTURE: dict[str, Any] = tiny.SETTINGS | dict(
    architectures=["Qwen3MoeForCausalLM"], num_experts=6, num_experts_per_tok=2,
    moe_intermediate_size=12, vocab_size=62,
)  # fmt: skip
SIZES: dict[str, Any] = dict(
    max_num_seqs=2, max_num_batched_tokens=16, token_buckets=(16,), decode_buckets=(2,),
    max_model_len=48, num_blocks=14, block_size=4, dtype="float32", warm_up=False, use_tqdm=False,
    cache_dir=None, skip_tokenizer_init=True,
)  # fmt: skip
RANKS: dict[str, Any] = dict(data_parallel_size=D, enable_expert_parallel=True)
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


def engine(folder: str, tensor: int = 0, speculator: Any = None, **sizes: Any) -> Engine:
    """Returns the engine of a mixture, over ranks of so many devices, or on one device."""
    model, config = read_model(Settings(MIXTURE))
    model = model._replace(speculator=speculator)
    if tensor:
        mesh = make_mesh(tensor, jax.local_devices(), D)
        model, config = shard(model, config, mesh, expert_parallel=True)
    params = load_params(Path(folder), model, config, dtype="float32", progress=False)
    made = tiny.engine_config(**sizes)
    return Engine(model, config, made, params, make_compiler=ParityCompiler)
