"""The memory that caches of an engine take, by its KV blocks and the length of requests."""

import bisect
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
import functools
import math
from typing import Any

import jax

from jaxrunner.caches.cache_group import CacheGroup, PoolSizes, cache_groups
from jaxrunner.program.program import Program, pool_sizes
from jaxrunner.program.state import abstract_state
from jaxrunner.types import State

MANY = 1 << 20  # KV blocks, of which any pool that holds tokens has more than of one


@dataclass(frozen=True)
class CacheCosts:
    """`program.engine` has all sizes but KV blocks and the length of requests.

    KV blocks are counted as `EngineConfig.num_blocks` does; of some layers there are fewer.
    """

    program: Program

    def num_bytes(self, num_blocks: int, max_model_len: int) -> int:
        """Returns the bytes of caches with so many KV blocks; twice where an eager step makes new
        ones. Those with blocks for slots, whatever the blocks for tokens are, do not count."""
        return self.costs(max_model_len)[1](num_blocks)

    def num_blocks(self, kv_bytes: int, max_model_len: int) -> int:
        """Returns the KV blocks that so many bytes hold, and no more than all slots own."""
        useful = self._sizes._replace(max_model_len=max_model_len).full_blocks
        _, of_tokens = self.costs(max_model_len)
        return bisect.bisect_right(range(1, useful + 1), kv_bytes, key=of_tokens)

    def costs(self, max_model_len: int) -> tuple[int, Callable[[int], int]]:
        """Returns the bytes of caches with blocks for slots, and (KV blocks) -> those of others."""
        bytes_of, state = Counter[int](), self.state(max_model_len, MANY)
        groups, times = self._groups(max_model_len, MANY), 1 + self.program.engine.enforce_eager
        for g, layer in zip(self.program.layer_groups, state.kv, strict=True):
            bytes_of[g] += num_bytes(layer) // groups[g].num_blocks * times
        few = self._groups(max_model_len, 1)
        of_slots = [g for g, one in enumerate(few) if one.num_blocks == groups[g].num_blocks]
        slots = sum(bytes_of.pop(g, 0) * groups[g].num_blocks for g in of_slots)

        def of_tokens(num_blocks: int) -> int:
            made = self._groups(max_model_len, num_blocks)
            return sum(made[g].num_blocks * size for g, size in bytes_of.items())

        return slots, of_tokens

    def request_blocks(self, max_model_len: int) -> int:
        """Returns the fewest KV blocks, as `num_blocks` counts them, that hold one request."""
        lens = max_model_len, self.program.engine.max_num_batched_tokens

        def fits(num_blocks: int) -> bool:
            groups = self._groups(max_model_len, num_blocks)
            return all(group.max_blocks(*lens) <= group.num_blocks for group in groups)

        most = next((1 << i for i in range(31) if fits(1 << i)), 1 << 31)
        return 1 + bisect.bisect_left(range(1, most), True, key=fits)

    def state(self, max_model_len: int, num_blocks: int = 1) -> State:
        """Returns the abstract state of an engine with so many KV blocks."""
        engine = replace(self.program.engine, max_model_len=max_model_len, num_blocks=num_blocks)
        return abstract_state(replace(self.program, engine=engine))

    @property
    def block_size(self) -> int:
        """Tokens of a KV block."""
        return self._sizes.block_size

    def _groups(self, max_model_len: int, num_blocks: int) -> tuple[CacheGroup, ...]:
        sizes = self._sizes._replace(num_blocks=num_blocks, max_model_len=max_model_len)
        return cache_groups(self.program.config.cache_kinds, sizes)

    @functools.cached_property
    def _sizes(self) -> PoolSizes:
        return pool_sizes(self.program.config, self.program.engine)


def num_bytes(tree: Any) -> int:
    """Returns the bytes of arrays, or of abstract arrays, on each device."""

    def one(x: Any) -> int:
        at = getattr(x, "sharding", None)
        shape = x.shape if at is None else at.shard_shape(x.shape)
        return math.prod(shape) * x.dtype.itemsize

    return sum(map(one, jax.tree.leaves(tree)))
