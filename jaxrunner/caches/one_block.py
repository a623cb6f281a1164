"""The common part of kinds that keep one block of a request, whatever its length."""

import abc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from jaxrunner.caches.cache_group import PoolSizes


@dataclass(frozen=True)
class OneBlock(abc.ABC):
    """A `CacheKind` but for its leaves. No beginning of a request is of use to another."""

    has_prefixes: ClassVar[bool] = False

    @property
    @abc.abstractmethod
    def dims(self) -> dict[str, Any]:
        """Sizes of the axes of its leaves."""

    def pool(self, sizes: PoolSizes) -> tuple[int, int]:
        """Returns blocks of any length, as many as there are requests, and one more."""
        return sizes.max_model_len, sizes.num_slots + 1

    def num_skipped_tokens(self, computed: int) -> int:
        """Returns 0: the block is needed to the end."""
        return 0

    def max_blocks(self, block_size: int, max_len: int, max_tokens: int) -> int:
        """Returns 1."""
        return 1

    def longest_hit(
        self, block_size: int, is_cached: Callable[[int], bool], limit_tokens: int
    ) -> int:
        """Returns 0: what is behind a beginning changes the block."""
        return 0
