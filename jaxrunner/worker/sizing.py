"""One process's device: how large an engine on it is, where a user left that open."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxrunner.api.validation import Bound, validate
from jaxrunner.caches.cache_group import CacheKind, reads_whole
from jaxrunner.caches.interleave import WHOLE, interleave_of
from jaxrunner.caches.latent import LatentCache
from jaxrunner.caches.state import RecurrentState
from jaxrunner.config import EngineConfig, read_kv_dtype
from jaxrunner.device.buckets import CPU_SIZES, GPU_SIZES
from jaxrunner.loading.loader import Loaded
from jaxrunner.ops.latent import attention as latent_attention
from jaxrunner.ops.states.state_steps import serves
from jaxrunner.parallel.mesh import devices_of
from jaxrunner.parallel.pipeline import to_stages
from jaxrunner.parallel.processes import agreed_least, is_shared
from jaxrunner.parallel.stages import is_spread
from jaxrunner.program.program import Program
from jaxrunner.programs.build import Built, build
from jaxrunner.rule import Rule
from jaxrunner.sampling import RULES
from jaxrunner.types import LayerCache
from jaxrunner.worker.memory_plan import (
    CacheRequest,
    Device,
    MemoryPlan,
    SizeCosts,
    plan_memory,
    read_device,
)
from jaxrunner.worker.prefix_sizes import prefix_sizes
from jaxrunner.worker.program_memory import ProgramMemory, estimate, measure

FITTING = -1  # as `max_model_len`: the largest that fits, in vLLM's words
FEW = 8  # blocks that programs are compiled for to see what memory they need
EAGER = 0.1  # of the device, for steps that no compiler lays out


class EnginePlan(NamedTuple):
    """The plan of an engine on a device: its sizes, its memory and its programs."""

    config: EngineConfig
    memory: MemoryPlan
    built: Built  # of these sizes


def plan_engine(
    loaded: Loaded,
    *,
    beside: Sequence[Any] = (),
    rules: tuple[Rule, ...] = RULES,
    cache_dir: Path | None = None,
    kv_cache_dtype: str = "auto",
    max_model_len: int | None = None,
    max_num_batched_tokens: int | None = None,
    num_blocks: int | None = None,
    kv_cache_memory_bytes: int | None = None,
    gpu_memory_utilization: float | None = None,
    **rest: Any,
) -> EnginePlan:
    """Fills in the sizes that a user left open, for the default device, and plans its memory.

    `num_blocks`, `kv_cache_memory_bytes` and `gpu_memory_utilization` are three ways to say one
    thing: at most one may be given. The last is a part of what JAX may use of the device: of three
    quarters, unless XLA_PYTHON_CLIENT_MEM_FRACTION said otherwise when JAX started. Where none is
    given it is 0.9, or what is free if that is less. max_model_len: -1 is the largest, up to the
    model's, of which one request fits. beside: devices to fit as well. `rest`: of `EngineConfig`.

    Raises:
      ValueError: a size that contradicts the model, another size or the device.
      MemoryError: it does not fit; says what would.
    """
    size = _one_size(
        num_blocks=num_blocks,
        kv_cache_memory_bytes=kv_cache_memory_bytes,
        gpu_memory_utilization=gpu_memory_utilization,
    )
    on_cpu, shrink = jax.default_backend() == "cpu", max_model_len == FITTING
    on_gpu = dict(max_num_batched_tokens=8192, decode_buckets=GPU_SIZES)
    usual: dict[str, Any] = {**(CPU_SIZES if on_cpu else on_gpu)}
    length = _checked_len(loaded, None if shrink else max_model_len)
    if max_num_batched_tokens is not None:
        rest["max_num_batched_tokens"] = max_num_batched_tokens
    elif reads_whole(loaded.config.cache_kinds):
        usual |= dict(max_num_batched_tokens=max(usual["max_num_batched_tokens"], length - 1))
    config = EngineConfig(
        max_model_len=length,
        num_blocks=_or(num_blocks, FEW),
        dtype=loaded.dtype,
        kv_dtype=read_kv_dtype(kv_cache_dtype, loaded.dtype),
        **usual | rest | prefix_sizes(loaded, rest),
    )
    few = replace(config, num_blocks=FEW)
    built = build(loaded.model, loaded.config, few, loaded.params, rules=rules, cache_dir=cache_dir)
    config, memory = _plan_stages(built, loaded.params, size, shrink=shrink, beside=beside)
    return EnginePlan(config, memory, built.resized(config))


def _plan_stages(
    built: Built, params: Any, size: CacheRequest, *, shrink: bool, beside: Sequence[Any]
) -> tuple[EngineConfig, MemoryPlan]:
    """Plans the memory of each stage of a pipeline, or of the one that there is without.

    Returns the sizes that all of them hold, and the plan of the fullest.
    """
    program = built.program
    found: list[tuple[EngineConfig, MemoryPlan, SizeCosts]] = []
    parts = to_stages(program.config, params) if program.stages else (params,)
    for stage, part in zip(program.stages or (program,), parts, strict=True):
        devices = [*devices_of(stage.config), *beside]
        device = _agreed(read_device(part, devices), stage.mesh)
        need = _need(built._replace(program=stage), part, device, size)
        costs = SizeCosts(stage, part, need)
        found.append((*plan_memory(costs, size, device, shrink=shrink), costs))
    if len(found) == 1 and not is_spread(program.config):
        return found[0][:2]
    length, num_blocks = (
        agreed_least(
            min(getattr(config, name) for config, *_ in found), shared=is_spread(program.config)
        )
        for name in ("max_model_len", "num_blocks")
    )
    plans = [costs.plan(length, num_blocks, plan.requested) for _, plan, costs in found]
    config = replace(found[0][0], max_model_len=length, num_blocks=num_blocks)
    return config, max(plans, key=lambda plan: plan.total)


def _agreed(device: Device | None, mesh: Mesh | None) -> Device | None:
    """Returns the least memory that any process of a mesh has: all must have as many blocks."""
    if device is None:
        return None
    limit = agreed_least(device.limit, shared=is_shared(mesh))
    free = agreed_least(device.limit - device.others, shared=is_shared(mesh))
    return Device(limit, limit - free)


def _need(built: Built, params: Any, device: Device | None, size: CacheRequest) -> ProgramMemory:
    """Returns what programs need, where that limits the cache."""
    if device is None:
        return ProgramMemory()
    if built.program.engine.enforce_eager:
        return ProgramMemory("a step without a compiler", int(EAGER * device.limit))
    if size.name != "gpu_memory_utilization":
        return ProgramMemory()
    # It knows no layers of others, nor what layers without a kernel take.
    program, kinds = built.program, dict.fromkeys(built.program.config.cache_kinds)
    known = built.is_ours and all(_has_kernels(program, kind) for kind in kinds)
    if program.sample is not None and known:
        return estimate(program)
    return measure(program, params, built.cache)


def _has_kernels(program: Program, kind: CacheKind) -> bool:
    """Whether kernels read what layers keep, where the device has any."""
    if isinstance(kind, RecurrentState):
        return not kind.matrices or serves(kind.matrices, jnp.dtype(kind.dtype))
    if kind.leaves is LatentCache:
        e, dims = program.engine, program.dims
        sizes = dims["H"], dims["latent"], dims["kv_rank"], e.block_size
        whole = interleave_of(program.config) == WHOLE
        return whole and latent_attention.serves(*sizes, e.dtype, e.kv_dtype)
    return kind.leaves is LayerCache


def _or(value: int | None, default: int) -> int:
    """Returns what was asked for; a 0 is no default, it is refused where it is used."""
    return default if value is None else value


def _one_size(**asked: Any) -> CacheRequest:
    given = [CacheRequest(name, value) for name, value in asked.items() if value is not None]
    if len(given) > 1:
        names = " and ".join(size.name for size in given)
        raise ValueError(f"{names} each set the size of the KV cache: give one")
    part = asked["gpu_memory_utilization"]
    if part is not None and not 0 < part <= 1:
        raise ValueError(f"gpu_memory_utilization must be over 0, at most 1, got {part}")
    validate("kv_cache_memory_bytes", asked["kv_cache_memory_bytes"], Bound(int, 1, 2**62, True))
    return given[0] if given else CacheRequest()


def _checked_len(loaded: Loaded, max_model_len: int | None) -> int:
    longest = loaded.config.longest_len
    if max_model_len is not None and not loaded.model.samples:
        max_model_len += 1  # the token that ends a request has a place, and is not computed
    if max_model_len is not None and max_model_len > longest:
        raise ValueError(
            f"max_model_len={max_model_len} is over the model's {longest} positions: lower it"
        )
    return longest if max_model_len is None else max_model_len
