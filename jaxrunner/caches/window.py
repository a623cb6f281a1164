"""Keys and values of the last tokens, for layers where each sees so many before it."""

from collections.abc import Callable
from dataclasses import dataclass

from jaxrunner.caches.local_attention import LocalAttention


@dataclass(frozen=True)
class SlidingWindow(LocalAttention):
    """`window`: keys that a token sees, itself included.

    Raises:
      ValueError: the window is empty.
    """

    window: int

    def __post_init__(self):
        if self.window < 1:
            raise ValueError(
                f"window must be at least 1 token, got {self.window}: "
                "give None for layers without a window"
            )

    @property
    def reach(self) -> int:
        """The most tokens before one that it sees."""
        return self.window - 1

    def num_skipped_tokens(self, computed: int) -> int:
        """Returns how many of the first `computed` tokens no later token sees."""
        return max(0, computed - self.reach)

    def longest_hit(
        self, block_size: int, is_cached: Callable[[int], bool], limit_tokens: int
    ) -> int:
        """Returns the end of the last run of blocks that holds a window."""
        wanted = max(1, -(-self.reach // block_size))
        run = 0
        for i in reversed(range(limit_tokens // block_size)):
            run = run + 1 if is_cached(i) else 0
            if run == wanted:
                return (i + run) * block_size
        return run * block_size  # from block 0 on, nothing before it is missing
