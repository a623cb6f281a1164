"""The common part of kinds that keep keys and values in blocks of the engine's size."""

import abc
from dataclasses import dataclass
from typing import Any, ClassVar

from jaxrunner.caches.cache_group import PoolSizes
from jaxrunner.types import LayerCache


@dataclass(frozen=True, kw_only=True)
class KVBlocks(abc.ABC):
    """The half of a `CacheKind` that does not depend on which tokens are seen.

    axes: sizes of K and D, by these letters, of layers that do not have the model's.
    """

    axes: tuple[tuple[str, int], ...] = ()

    leaves: ClassVar[type] = LayerCache
    has_prefixes: ClassVar[bool] = True

    @property
    def dims(self) -> dict[str, Any]:
        """Sizes of `axes`."""
        return dict(self.axes)

    def pool(self, sizes: PoolSizes) -> tuple[int, int]:
        """Returns the engine's sizes."""
        return sizes.block_size, sizes.num_blocks

    @abc.abstractmethod
    def num_skipped_tokens(self, computed: int) -> int:
        """Returns how many of the first `computed` tokens no later token needs."""
