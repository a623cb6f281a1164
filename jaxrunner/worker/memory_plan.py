"""Plans an engine's device memory before any of it is allocated.

Weights and tables are counted, the compiler says what programs need (`program_memory`), and the KV
cache gets the rest. No step is run to find out.
"""

import bisect
from collections.abc import Sequence
from dataclasses import dataclass, replace
import functools
import math
from typing import Any, NamedTuple

import jax

from jaxrunner.config import EngineConfig
from jaxrunner.kernels_pallas.products import peer_rows
from jaxrunner.lora.stacks import abstract_stacks
from jaxrunner.parallel.mesh import TENSOR
from jaxrunner.program.program import Program
from jaxrunner.worker.cache_costs import CacheCosts, num_bytes
from jaxrunner.worker.program_memory import ProgramMemory

CPU_KV_BYTES = 1 << 30  # where the device names no limit: on a CPU, whose memory is not ours alone
UTILIZATION = 0.9  # of what JAX may use, by default
LOST = 1 << 27  # bytes that XLA's allocator may leave unused behind one block of memory
GIB = 1 << 30


class Device(NamedTuple):
    """Memory of a device, in bytes."""

    limit: int  # all that JAX's allocator hands out
    others: int  # of it in use, but for the weights

    @property
    def free(self) -> int:
        """The bytes that an engine can have, its weights included."""
        return self.limit - self.others


class CacheRequest(NamedTuple):
    """The setting of the cache's size that the user gave, by name; value None for the default."""

    name: str = "gpu_memory_utilization"
    value: float | None = None


@dataclass(frozen=True)
class MemoryPlan:
    """The memory that an engine takes of its device's, in bytes."""

    requested: int  # all that it may take, 0 where there is no limit
    weights: int
    tables: int  # the state without KV caches: tokens, blocks and parameters of slots
    kv: int
    program: int  # temporaries and outputs of the largest program
    reserve: int  # unread outputs, a weight that XLA's autotuner copies, fragmentation
    num_tokens: int  # that the KV cache holds
    largest: str = "none"  # the largest program

    @property
    def total(self) -> int:
        """The bytes that the engine takes at most."""
        return self.weights + self.tables + self.kv + self.program + self.reserve

    @property
    def unused(self) -> int:
        """The bytes left of `requested`; under 0 where a plan does not fit."""
        return self.requested - self.total if self.requested else 0

    def checked(self, largest: tuple[Any, int] | None) -> "MemoryPlan":
        """Returns the plan with the largest program that was compiled, a key and its bytes.

        Raises:
          MemoryError: it takes more than is left for it.
        """
        if largest is None:
            return self
        key, size = largest
        plan = replace(self, program=size, largest=str(key))
        if plan.unused < 0:
            raise MemoryError(
                f"{plan.largest} takes {size:,} bytes, the memory plan has {size + plan.unused:,} "
                "for it: lower max_num_batched_tokens, max_num_seqs or the size of the KV cache"
            )
        return plan

    def __str__(self) -> str:
        rows = [
            ("weights", self.weights, ""),
            ("tables", self.tables, "of slots: tokens, blocks, sampling parameters"),
            ("KV cache", self.kv, f"{self.num_tokens:,} tokens"),
        ]
        if self.program:
            rows.append(("program", self.program, f"the largest, {self.largest}"))
        if self.requested:
            rows += [
                ("reserve", self.reserve, "outputs to be read, the compiler's trials"),
                ("unused", self.unused, ""),
                ("requested", self.requested, ""),
            ]
        return "\n".join(f"  {name:9}{n / GIB:9.3f} GiB  {note}".rstrip() for name, n, note in rows)


def read_device(params: Any, devices: Sequence[Any]) -> Device | None:
    """Returns the memory of the fullest device; None if a device has no limit, as a CPU."""
    here = num_bytes([x for x in jax.tree.leaves(params) if isinstance(x, jax.Array)])
    found = []
    for device in devices:
        stats = device.memory_stats()
        if not stats or "bytes_limit" not in stats:
            return None
        found.append(Device(stats["bytes_limit"], max(0, stats["bytes_in_use"] - here)))
    return min(found, key=lambda device: device.free)


@dataclass(frozen=True)
class SizeCosts:
    """The memory of engine sizes. `program.engine` has all sizes but the ones to be found."""

    program: Program
    params: Any
    need: ProgramMemory

    @functools.cached_property
    def caches(self) -> CacheCosts:
        """The costs of its caches."""
        return CacheCosts(self.program)

    def plan(self, max_model_len: int, num_blocks: int, requested: int = 0) -> MemoryPlan:
        """Returns what an engine of these sizes takes."""
        state, reserve = self.caches.state(max_model_len), 0
        of_slots, of_tokens = self.caches.costs(max_model_len)
        if self.need.program:
            weights = map(num_bytes, jax.tree.leaves(self.params))
            reserve = self.need.waiting + max(weights, default=0) + LOST
        return MemoryPlan(
            requested=requested,
            weights=num_bytes(self.params) + self._adapters + self._peers,
            tables=num_bytes((state.requests, state.tables)) + of_slots,
            kv=of_tokens(num_blocks),
            program=self.need.program,
            reserve=reserve,
            num_tokens=num_blocks * self.caches.block_size,
            largest=self.need.name,
        )

    @property
    def _adapters(self) -> int:
        """Bytes of the adapters on the device."""
        return num_bytes(abstract_stacks(self.program)) if self.program.lora else 0

    @property
    def _peers(self) -> int:
        """Bytes of a device for the rows of others."""
        if (peers := self.program.peers) is None:
            return 0
        num, program = peers.shape[TENSOR], self.program
        return peer_rows.num_bytes(num, program.peer_rows, program.dims["E"])


def plan_memory(
    costs: SizeCosts, size: CacheRequest, device: Device | None, *, shrink: bool
) -> tuple[EngineConfig, MemoryPlan]:
    """Returns the engine's sizes, `num_blocks` filled in, and what they take.

    shrink: whether `max_model_len` is to be lowered until a request of that length fits.

    Raises:
      MemoryError: something does not fit; says what would.
    """
    requested, engine = _requested(size, device), costs.program.engine
    caches = costs.caches

    def blocks(length: int) -> int:
        """Returns the blocks of a cache beside the tables that this length takes."""
        if size.name == "num_blocks":
            return int(size.value or 0)
        kv = size.value
        if size.name == "gpu_memory_utilization":
            kv = CPU_KV_BYTES if device is None else costs.plan(length, 0, requested).unused
        return caches.num_blocks(int(kv or 0), length)

    def too_long(length: int) -> bool:
        return caches.request_blocks(length) > blocks(length)

    length = engine.max_model_len
    fitting = length
    if too_long(length):
        fitting = bisect.bisect_left(range(1, length), True, key=too_long)
    if fitting == 0 or (fitting < length and not shrink and size.name != "num_blocks"):
        raise MemoryError(_too_small(costs, size, device, blocks(length), fitting))
    length = fitting if shrink else length
    plan = costs.plan(length, blocks(length), requested)
    if plan.unused < 0:
        most = caches.num_blocks(plan.kv + plan.unused, length)
        fits = most if size.name == "num_blocks" else caches.num_bytes(most, length)
        cure = f"{size.name}={fits} would fit" if most > 0 else "free memory"
        raise MemoryError(
            f"{size.name}={size.value} makes {plan.total:,} bytes with all else, {requested:,} are "
            f"free: {cure}"
        )
    return replace(engine, max_model_len=length, num_blocks=blocks(length)), plan


def _requested(size: CacheRequest, device: Device | None) -> int:
    """Returns the bytes that an engine may take; 0 where the device has no limit.

    Raises:
      ValueError: a part is wanted of a device that does not report its memory.
      MemoryError: they are not free.
    """
    if device is None:
        if size == CacheRequest() or size.name != "gpu_memory_utilization":
            return 0
        raise ValueError(
            f"gpu_memory_utilization={size.value} is of a device that tells its memory, "
            f"{jax.default_backend()} does not: give num_blocks or kv_cache_memory_bytes"
        )
    if size.name != "gpu_memory_utilization":
        return device.free
    if size.value is None:
        return min(int(device.limit * UTILIZATION), device.free)
    wanted = int(device.limit * size.value)
    if wanted > device.free:
        most = math.floor(device.free / device.limit * 100) / 100
        raise MemoryError(
            f"gpu_memory_utilization={size.value} asks for {wanted:,} bytes of {device.limit:,}, "
            f"{device.free:,} are free: lower it to {most} or free memory"
        )
    return wanted


def _too_small(
    costs: SizeCosts, size: CacheRequest, device: Device | None, num_blocks: int, fitting: int
) -> str:
    """Says that one request does not fit into the cache, and what would."""
    length, caches = costs.program.engine.max_model_len, costs.caches
    wanted = caches.num_bytes(caches.request_blocks(length), length)
    total = costs.plan(length, caches.request_blocks(length)).total
    cures = [f"max_model_len={fitting} would fit"] if fitting else []
    if device is None or size.name == "kv_cache_memory_bytes":
        cures.append(f"raise kv_cache_memory_bytes to {wanted}")
    elif (part := math.ceil(total / device.limit * 100) / 100) * device.limit <= device.free:
        cures.append(f"raise gpu_memory_utilization to {part}")
    else:
        cures.append("free memory, let JAX use more of it (XLA_PYTHON_CLIENT_MEM_FRACTION)")
    name = f"{size.name}={UTILIZATION if size.value is None else size.value}"
    name = (
        "the default of kv_cache_memory_bytes"
        if device is None and size == CacheRequest()
        else name
    )
    return (
        f"{name} leaves {caches.num_bytes(num_blocks, length):,} bytes for the KV cache, one "
        f"request of max_model_len={length} needs {wanted:,}: {' or '.join(cures)}"
    )
