"""Nothing: layers of an encoder see a whole text in one step, and no later one."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from jaxrunner.caches.cache_group import PoolSizes
from jaxrunner.pytree import leaf, pytree
from jaxrunner.types import Array


@pytree
class NoCache:
    """A number of each block, which nobody reads."""

    unused: Array = leaf("N")


@dataclass(frozen=True)
class EncoderOnly:
    """A block is the place of a whole text. No beginning of one is of use to another."""

    leaves: ClassVar[type] = NoCache
    has_prefixes: ClassVar[bool] = False
    whole_prompts: ClassVar[bool] = True  # a prompt is computed in one step

    @property
    def dims(self) -> dict[str, Any]:
        """None of its own."""
        return {}

    def pool(self, sizes: PoolSizes) -> tuple[int, int]:
        """Returns blocks of any length, as many as there are requests, and one more."""
        return sizes.max_model_len, sizes.max_num_seqs + 1

    def num_skipped_tokens(self, computed: int) -> int:
        """Returns 0: there is one block, to the end."""
        return 0

    def max_blocks(self, block_size: int, max_len: int, max_tokens: int) -> int:
        """Returns 1."""
        return 1

    def longest_hit(
        self, block_size: int, is_cached: Callable[[int], bool], limit_tokens: int
    ) -> int:
        """Returns 0: what is behind a beginning changes it."""
        return 0
