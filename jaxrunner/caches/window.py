"""Keys and values of the last tokens, for layers where each sees so many before it."""

from collections.abc import Callable
from dataclasses import dataclass

from jaxrunner.api.speculative_config import MAX_DRAFTS
from jaxrunner.caches.cache_group import PoolSizes
from jaxrunner.caches.kv_blocks import KVBlocks

SPARE = 2  # windows for each slot: one of its request, and one of a prefix that may come again


@dataclass(frozen=True)
class SlidingWindow(KVBlocks):
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

    def pool(self, sizes: PoolSizes) -> tuple[int, int]:
        """Returns the tokens of a block, and fewer blocks than layers have that keep all tokens.

        There are as many as windows of all slots take, or where memory is short, the larger of two
        shares: that of the slots whose whole requests the other layers hold, and one by which
        short requests have half the tokens that they had if all layers had equally many blocks.
        """
        S, N = sizes[:2]
        window = -(-(self.window - 1 + MAX_DRAFTS) // S) + 2  # it starts and ends inside a block
        most = SPARE * (sizes.max_num_seqs * window + sizes.max_num_batched_tokens // S)
        if sizes.share == 1:  # no other layers to share with
            return S, min(N, most)
        of_one = self.max_blocks(S, sizes.max_model_len, sizes.max_num_batched_tokens + MAX_DRAFTS)
        # Half of n, where N - n in all other layers take what n - n / 2 do not take in these.
        half = int(N * (1 - sizes.share) / (2 - sizes.share))
        return S, min(N, most, max(of_one, half, most * N // sizes.full_blocks))

    def num_skipped_tokens(self, computed: int) -> int:
        """Returns how many of the first `computed` tokens no later token sees."""
        return max(0, computed - self.window + 1)

    def max_blocks(self, block_size: int, max_len: int, max_tokens: int) -> int:
        """Returns the blocks of what a step's tokens see, and of themselves."""
        seen = min(self.window - 1 + max_tokens, max_len)
        # One block more: what is seen may start and end inside a block.
        return min(-(-max_len // block_size), -(-seen // block_size) + 1)

    def longest_hit(
        self, block_size: int, is_cached: Callable[[int], bool], limit_tokens: int
    ) -> int:
        """Returns the end of the last run of blocks that holds a window."""
        wanted = max(1, -(-(self.window - 1) // block_size))
        run = 0
        for i in reversed(range(limit_tokens // block_size)):
            run = run + 1 if is_cached(i) else 0
            if run == wanted:
                return (i + run) * block_size
        return run * block_size  # from block 0 on, nothing before it is missing
