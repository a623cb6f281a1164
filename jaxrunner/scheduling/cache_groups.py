"""What the layers of a cache group need of the KV before a token: all of it, or a window."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
import math


@dataclass(frozen=True)
class CacheGroup:
    """Layers that share block tables. `window`: keys a token sees, itself included; None for all.

    Raises:
      ValueError: the window is empty.
    """

    block_size: int
    window: int | None = None

    def __post_init__(self):
        if self.window is not None and self.window < 1:
            raise ValueError(
                f"window must be at least 1 token, got {self.window}: "
                "give None for layers without a window"
            )

    def num_skipped_tokens(self, computed: int) -> int:
        """Returns how many of the first `computed` tokens no later token sees."""
        return 0 if self.window is None else max(0, computed - self.window + 1)

    def num_blocks(self, num_tokens: int) -> int:
        """Returns the length of a table of `num_tokens`."""
        return -(-num_tokens // self.block_size)

    def max_blocks(self, max_len: int, max_tokens: int) -> int:
        """Returns the most blocks that a request of `max_len` owns at once.

        max_tokens: the most it computes in one step.
        """
        whole = self.num_blocks(max_len)
        if self.window is None:
            return whole
        # One block more: what is seen may start and end inside a block.
        return min(whole, self.num_blocks(min(self.window - 1 + max_tokens, max_len)) + 1)

    def longest_hit(self, is_cached: Callable[[int], bool], limit_tokens: int) -> int:
        """Returns the most tokens, `limit_tokens` at most, that need not be computed.

        is_cached: whether the KV of a block, by its place in the table, exists.
        """
        num_blocks = limit_tokens // self.block_size
        if self.window is None:
            misses = (i for i in range(num_blocks) if not is_cached(i))
            return next(misses, num_blocks) * self.block_size
        wanted = max(1, self.num_blocks(self.window - 1))
        run = 0
        for i in reversed(range(num_blocks)):
            run = run + 1 if is_cached(i) else 0
            if run == wanted:
                return (i + run) * self.block_size
        return run * self.block_size  # from block 0 on, nothing before it is missing


def find_prefix(
    groups: Sequence[CacheGroup], lookups: Sequence[Callable[[int], bool]], limit: int
) -> int:
    """Returns the longest prefix, in tokens, that every group can go on from.

    lookups: `is_cached` of each group. The result is a multiple of every block size.
    """
    step = math.lcm(*(group.block_size for group in groups))
    hit = limit // step * step
    while True:
        shortest = hit
        for group, is_cached in zip(groups, lookups, strict=True):
            shortest = group.longest_hit(is_cached, shortest) // step * step
        # A group that agreed to a longer prefix may not agree to the shorter one.
        if shortest == hit:
            return hit
        hit = shortest
