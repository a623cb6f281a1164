"""Keys and values of one chunk, for layers where each token sees those of its own chunk alone."""

from collections.abc import Callable
from dataclasses import dataclass

from jaxrunner.caches.local_attention import LocalAttention


@dataclass(frozen=True)
class ChunkedLocalAttention(LocalAttention):
    """Tokens whose positions have one quotient by `chunk_size` see each other, causally.

    With the first token of a chunk the blocks of earlier ones are given back.

    Raises:
      ValueError: chunks are empty.
    """

    chunk_size: int

    def __post_init__(self):
        if self.chunk_size < 1:
            raise ValueError(f"chunk_size must be at least 1 token, got {self.chunk_size}")

    @property
    def reach(self) -> int:
        """The most tokens before one that it sees."""
        return self.chunk_size - 1

    def num_skipped_tokens(self, computed: int) -> int:
        """Returns how many of the first `computed` tokens lie before the next one's chunk."""
        return computed // self.chunk_size * self.chunk_size

    def longest_hit(
        self, block_size: int, is_cached: Callable[[int], bool], limit_tokens: int
    ) -> int:
        """Returns the last end of a block behind which the chunk so far is there.

        Where a chunk ends with a block, nothing need be there: no later token sees it.
        """
        end = limit_tokens // block_size
        while end:
            first = self.num_skipped_tokens(end * block_size) // block_size
            missing = next((i for i in reversed(range(first, end)) if not is_cached(i)), None)
            if missing is None:
                break
            end = missing
        return end * block_size
