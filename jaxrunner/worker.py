"""One process's device: which it is, what fits on it, and how large an engine follows."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from jaxrunner.buckets import GPU_SIZES
from jaxrunner.config import SCALED, EngineConfig, ModelConfig, read_kv_dtype
from jaxrunner.request import NEVER

CPU_KV_BYTES = 1 << 30  # on a CPU, where memory is not ours alone
FITTING = -1  # as `max_model_len`: the largest that fits, in vLLM's words
RESERVE = 0.1  # part of the budget kept for what a step makes on its way


def engine_config(
    model: ModelConfig,
    params: Any,
    *,
    dtype: str,
    kv_cache_dtype: str = "auto",
    max_model_len: int | None = None,
    max_num_seqs: int = 256,
    max_num_batched_tokens: int | None = None,
    num_blocks: int | None = None,
    kv_cache_memory_bytes: int | None = None,
    gpu_memory_utilization: float | None = None,
    **rest: Any,
) -> EngineConfig:
    """Fills in the sizes that a user left open, for the default device.

    `num_blocks`, `kv_cache_memory_bytes` and `gpu_memory_utilization` are three ways to say one
    thing: at most one may be given. max_model_len: -1 is the largest, up to the model's, of which
    one request fits into the cache. `rest` are fields of `EngineConfig`.

    Raises:
      ValueError: a size that contradicts the model, another size or the device.
      MemoryError: the weights leave no room.
    """
    asked = dict(
        num_blocks=num_blocks,
        kv_cache_memory_bytes=kv_cache_memory_bytes,
        gpu_memory_utilization=gpu_memory_utilization,
    )
    _check_one_size(asked)
    on_cpu = jax.default_backend() == "cpu"
    rest = rest if on_cpu else dict(decode_buckets=GPU_SIZES) | rest
    config = EngineConfig(
        max_model_len=_checked_len(model, None if max_model_len == FITTING else max_model_len),
        num_blocks=_or(num_blocks, 1),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=_or(max_num_batched_tokens, 512 if on_cpu else 8192),
        dtype=dtype,
        kv_dtype=read_kv_dtype(kv_cache_dtype, dtype),
        growth=4 if on_cpu else 2,
        **rest,
    )
    if num_blocks is None:
        kv_bytes = kv_cache_memory_bytes
        if kv_bytes is None:
            kv_bytes = free_bytes(params, gpu_memory_utilization or 0.9)
        config = _with_blocks(model, config, kv_bytes)
    held = config.num_blocks * config.block_size
    longest = min(config.max_model_len, held if max_model_len == FITTING else NEVER)
    return replace(config, max_model_len=longest)


def _with_blocks(model: ModelConfig, config: EngineConfig, kv_bytes: int) -> EngineConfig:
    most = config.max_blocks * config.max_num_seqs  # what all slots use at full length
    fitting = kv_bytes // block_bytes(model, config.kv_dtype, config.block_size)
    return replace(config, num_blocks=max(1, min(most, fitting)))


def _or(value: int | None, default: int) -> int:
    """Returns what was asked for; a 0 is no default, it is refused where it is used."""
    return default if value is None else value


def _check_one_size(asked: dict[str, Any]) -> None:
    given = [name for name, value in asked.items() if value is not None]
    if len(given) > 1:
        raise ValueError(f"{' and '.join(given)} each set the size of the KV cache: give one")
    utilization = asked["gpu_memory_utilization"]
    if utilization is not None and not 0 < utilization <= 1:
        raise ValueError(f"gpu_memory_utilization must be over 0, at most 1, got {utilization}")


def _checked_len(model: ModelConfig, max_model_len: int | None) -> int:
    longest = longest_len(model)
    if max_model_len is not None and max_model_len > longest:
        raise ValueError(
            f"max_model_len={max_model_len} is over the model's {longest} positions: lower it"
        )
    return longest if max_model_len is None else max_model_len


def longest_len(model: ModelConfig) -> int:
    """Returns the most positions a model can be asked for."""
    dynamic = model.rope.dynamic
    factor = dynamic.factor if dynamic is not None else 1.0
    return int(model.max_position_embeddings * factor)


def block_bytes(model: ModelConfig, kv_dtype: str, block_size: int) -> int:
    """Returns the bytes of one block in the caches of all layers, scales included."""
    dims, scale = model.dims, 4 if kv_dtype in SCALED.values() else 0
    row = dims["D"] * jnp.dtype(kv_dtype).itemsize + scale
    return 2 * dims["Y"] * block_size * dims["K"] * row


def free_bytes(params: Any, utilization: float) -> int:
    """Returns the bytes that the KV cache may take beside `params`.

    Raises:
      MemoryError: the weights leave no room.
    """
    stats = jax.local_devices()[0].memory_stats()
    if not stats or "bytes_limit" not in stats:
        return CPU_KV_BYTES
    weights = sum(x.nbytes for x in jax.tree.leaves(params))
    budget = int(stats["bytes_limit"] * utilization * (1 - RESERVE))
    used = max(stats["bytes_in_use"], weights)
    if budget <= used:
        raise MemoryError(
            f"gpu_memory_utilization={utilization} of {stats['bytes_limit']} bytes leaves "
            f"{budget}, {used} are in use: raise it or free memory"
        )
    return budget - used
