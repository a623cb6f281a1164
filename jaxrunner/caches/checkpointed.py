"""The common part of kinds that carry a state on: which block has it, and which states are kept.

A table has a block for each run of `block_size` tokens. A step reads the state before its tokens
from the block of the token before them, and writes the one behind them to the block of its last
token. So a block stays as it is from the end of its run on: a checkpoint, from which other requests
go on without a copy, provided that a step ended there.
"""

import abc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from jaxrunner.caches.cache_group import PoolSizes


@dataclass(frozen=True)
class Checkpointed(abc.ABC):
    """A `CacheKind` but for its leaves, whose block holds the state behind its last token."""

    has_prefixes: ClassVar[bool] = False  # the first tokens of a run have no state of their own
    has_checkpoints: ClassVar[bool] = True

    @property
    @abc.abstractmethod
    def dims(self) -> dict[str, Any]:
        """Sizes of the axes of its leaves."""

    def pool(self, sizes: PoolSizes) -> tuple[int, int]:
        """Returns the tokens between checkpoints, and blocks for these beside those of requests.

        Without checkpoints a block is of any length, and each request has one.
        """
        interval, blocks = sizes.mamba_block_size, sizes.num_slots + 1
        if not 0 < interval < sizes.max_model_len:
            return sizes.max_model_len, blocks
        return interval, blocks + sizes.num_checkpoints

    def num_skipped_tokens(self, computed: int) -> int:
        """Returns the tokens before the last of the first `computed`, whose block has the state."""
        return max(0, computed - 1)

    def max_blocks(self, block_size: int, max_len: int, max_tokens: int) -> int:
        """Returns 2, the block that a step reads and the one that it writes; 1 of one run alone."""
        return min(-(-max_len // block_size), 2)

    def longest_hit(
        self, block_size: int, is_cached: Callable[[int], bool], limit_tokens: int
    ) -> int:
        """Returns the end of the last cached block."""
        blocks = reversed(range(limit_tokens // block_size))
        return next((i + 1 for i in blocks if is_cached(i)), 0) * block_size
