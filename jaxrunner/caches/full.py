"""Keys and values of all tokens, for layers where each sees all before it."""

from collections.abc import Callable
from dataclasses import dataclass

from jaxrunner.caches.kv_blocks import KVBlocks


@dataclass(frozen=True)
class FullAttention(KVBlocks):
    """Nothing is given back before a request ends."""

    def num_skipped_tokens(self, computed: int) -> int:
        """Returns 0."""
        return 0

    def max_blocks(self, block_size: int, max_len: int, max_tokens: int) -> int:
        """Returns the blocks of the whole request."""
        return -(-max_len // block_size)

    def longest_hit(
        self, block_size: int, is_cached: Callable[[int], bool], limit_tokens: int
    ) -> int:
        """Returns what the first blocks hold, up to one that is missing."""
        num_blocks = limit_tokens // block_size
        misses = (i for i in range(num_blocks) if not is_cached(i))
        return next(misses, num_blocks) * block_size
