"""The KV caches of layers, in vLLM's words, for a scheduler of one's own."""

from typing import Any, NamedTuple

import jax.numpy as jnp

from jaxrunner import pytree
from jaxrunner.caches.interleave import token_dims
from jaxrunner.config import EngineConfig, ModelConfig
from jaxrunner.parallel.stages import held_caches, stages_of
from jaxrunner.program.program import engine_groups
from jaxrunner.worker.cache_costs import num_bytes


class KVCacheSpec(NamedTuple):
    """The KV cache of one layer."""

    block_size: int  # tokens
    num_kv_heads: int
    head_size: int
    dtype: str
    sliding_window: int | None  # keys a token sees, None for all before it
    page_size_bytes: int  # of one block, scales included
    num_blocks: int  # that it has where the engine has those that were planned
    attention_chunk_size: int | None  # of runs whose tokens see their own run alone


def kv_cache_specs(model: ModelConfig, config: EngineConfig) -> dict[str, KVCacheSpec]:
    """Returns what each layer in this process keeps, by its name in vLLM."""
    kv: dict[str, Any] = dict(kv=jnp.dtype(config.kv_dtype), scaled=config.scaled)
    dims, specs = model.dims | kv, dict[int, KVCacheSpec]()
    for group in engine_groups(model, config):
        sizes = dims | group.kind.dims | token_dims(model, group.block_size) | dict(N=1, J=1)
        page_bytes = num_bytes(pytree.abstract(group.kind.leaves, sizes))
        spec = KVCacheSpec(
            group.block_size, sizes.get("K", 0), sizes.get("D", 0), config.kv_dtype,
            getattr(group.kind, "window", None), page_bytes, group.num_blocks,
            getattr(group.kind, "chunk_size", None),
        )  # fmt: skip
        specs |= dict.fromkeys(group.layers, spec)
    held = [i for stage in stages_of(model) or (model,) for i in held_caches(stage)]
    return {f"model.layers.{i}.self_attn.attn": specs[i] for i in held}
