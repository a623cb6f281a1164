"""What kinds that keep keys and values in blocks of the engine's size have in common."""

import abc
from typing import Any, ClassVar

from jaxrunner.caches.cache_group import PoolSizes
from jaxrunner.types import LayerCache


class KVBlocks(abc.ABC):
    """The half of a `CacheKind` that does not depend on which tokens are seen."""

    leaves: ClassVar[type] = LayerCache
    has_prefixes: ClassVar[bool] = True

    @property
    def dims(self) -> dict[str, Any]:
        """None of its own."""
        return {}

    def pool(self, sizes: PoolSizes) -> tuple[int, int]:
        """Returns the engine's sizes."""
        return sizes.block_size, sizes.num_blocks

    @abc.abstractmethod
    def num_skipped_tokens(self, computed: int) -> int:
        """Returns how many of the first `computed` tokens no later token needs."""
