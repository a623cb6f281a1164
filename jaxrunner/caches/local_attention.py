"""The common part of kinds whose tokens see so many before them at most: pools and sizes."""

import abc
from dataclasses import dataclass

from jaxrunner.api.speculative_config import MAX_DRAFTS
from jaxrunner.caches.cache_group import PoolSizes
from jaxrunner.caches.kv_blocks import KVBlocks

SPARE = 2  # reaches for each slot: one of its request, and one of a prefix that may come again


@dataclass(frozen=True)
class LocalAttention(KVBlocks):
    """The half of a `CacheKind` that does not depend on where a token's sight begins."""

    @property
    @abc.abstractmethod
    def reach(self) -> int:
        """The most tokens before one that it sees."""

    def pool(self, sizes: PoolSizes) -> tuple[int, int]:
        """Returns the tokens of a block, and fewer blocks than layers have that keep all tokens.

        There are as many as what requests of all slots see takes, or where memory is short, the
        larger of two shares: that of the slots whose whole requests the other layers hold, and one
        by which short requests have half the tokens that they had if all layers had equally many
        blocks.
        """
        S, N = sizes[:2]
        seen = -(-(self.reach + MAX_DRAFTS) // S) + 2  # it starts and ends inside a block
        most = SPARE * (sizes.num_slots * seen + sizes.max_num_batched_tokens // S)
        if sizes.share == 1:  # no other layers to share with
            return S, min(N, most)
        of_one = self.max_blocks(S, sizes.max_model_len, sizes.max_num_batched_tokens + MAX_DRAFTS)
        # Half of n, where N - n in all other layers take what n - n / 2 do not take in these.
        half = int(N * (1 - sizes.share) / (2 - sizes.share))
        return S, min(N, most, max(of_one, half, most * N // sizes.full_blocks))

    def max_blocks(self, block_size: int, max_len: int, max_tokens: int) -> int:
        """Returns the blocks of what a step's tokens see, and of themselves."""
        seen = min(self.reach + max_tokens, max_len)
        # One block more: what is seen may start and end inside a block.
        return min(-(-max_len // block_size), -(-seen // block_size) + 1)
