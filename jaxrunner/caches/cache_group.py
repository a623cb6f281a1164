"""The interface of a kind of cache, and the layers that share block tables. Knows no device."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol


class PoolSizes(NamedTuple):
    """The capacity of an engine: blocks and their tokens, slots, and the tokens of a step."""

    block_size: int
    num_blocks: int  # of layers that keep all tokens
    max_model_len: int
    num_slots: int  # for requests at work
    max_num_batched_tokens: int
    share: float = 1.0  # of the model's layers, those of this kind
    mamba_block_size: int = 0  # tokens between checkpoints of states; 0 where none are kept
    num_checkpoints: int = 0  # that have blocks beside those of running requests

    @property
    def full_blocks(self) -> int:
        """Blocks of whole requests in all slots."""
        return -(-self.max_model_len // self.block_size) * self.num_slots


class CacheKind(Protocol):
    """The cache that some layers keep of a request's tokens.

    Frozen and hashable; layers of equal kinds share block tables. A table has a block for each run
    of `block_size` tokens; those that no later token needs are given back.

    A kind may have more members, which others do without: `whole_prompts` (a prompt is computed in
    one step), `has_checkpoints` (of recurrent states, whose prefixes end at checkpoints), `rewinds`
    (a step can continue after any of the drafts that the step before verified, though prefixes have
    no copies), `is_small` (its layers count for no share of the memory), all bool; `window` and
    `chunk_size`, in tokens, which `Worker.get_kv_cache_spec` names.
    """

    leaves: ClassVar[type]  # the cache of one layer: a pytree whose arrays begin with axis N
    # Whether a block's first tokens can be copied for a request that continues differently.
    has_prefixes: ClassVar[bool]

    @property
    def dims(self) -> dict[str, Any]:
        """Sizes of the axes of `leaves` that the model's config does not have."""
        ...

    def pool(self, sizes: PoolSizes) -> tuple[int, int]:
        """Returns the tokens of a block, and the blocks that all requests share."""
        ...

    def num_skipped_tokens(self, computed: int) -> int:
        """Returns how many of the first `computed` tokens no later token needs."""
        ...

    def max_blocks(self, block_size: int, max_len: int, max_tokens: int) -> int:
        """Returns the most blocks that a request of `max_len` owns at once.

        max_tokens: the most it computes in one step.
        """
        ...

    def longest_hit(
        self, block_size: int, is_cached: Callable[[int], bool], limit_tokens: int
    ) -> int:
        """Returns the most tokens, `limit_tokens` at most, that need not be computed.

        is_cached: whether the contents of a block, by its place in the table, exist.
        """
        ...


@dataclass(frozen=True)
class CacheGroup:
    """Layers of one kind, which share block tables, and the pool that these are filled from."""

    kind: CacheKind
    layers: tuple[int, ...]
    block_size: int
    num_blocks: int

    def table_len(self, num_tokens: int) -> int:
        """Returns the length of a table of `num_tokens`."""
        return -(-num_tokens // self.block_size)

    def num_skipped_tokens(self, computed: int) -> int:
        """Returns how many of the first `computed` tokens no later token needs."""
        return self.kind.num_skipped_tokens(computed)

    def max_blocks(self, max_len: int, max_tokens: int) -> int:
        """Returns the most blocks that a request of `max_len` owns at once.

        max_tokens: the most it computes in one step.
        """
        return self.kind.max_blocks(self.block_size, max_len, max_tokens)

    def longest_hit(self, is_cached: Callable[[int], bool], limit_tokens: int) -> int:
        """Returns the most tokens that need not be computed, as its kind says."""
        return self.kind.longest_hit(self.block_size, is_cached, limit_tokens)


def reads_whole(kinds: Iterable[CacheKind]) -> bool:
    """Whether a prompt is computed in one step, for layers of these kinds keep nothing of it."""
    return any(getattr(kind, "whole_prompts", False) for kind in kinds)


def has_checkpoints(kinds: Iterable[CacheKind]) -> bool:
    """Whether a kind has recurrent states, whose prefixes end at checkpoints only."""
    return any(getattr(kind, "has_checkpoints", False) for kind in kinds)


def rewinds(kind: CacheKind) -> bool:
    """Whether a step can continue after any of the drafts that the step before verified."""
    return kind.has_prefixes or getattr(kind, "rewinds", False)


def distinct(kinds: Sequence[CacheKind]) -> tuple[CacheKind, ...]:
    """Returns the kind of each group, given that of each layer."""
    return tuple(dict.fromkeys(kinds))


def layer_groups(kinds: Sequence[CacheKind]) -> tuple[int, ...]:
    """Returns the group of each layer, given its kind."""
    groups = distinct(kinds)
    return tuple(groups.index(kind) for kind in kinds)


def cache_groups(kinds: Sequence[CacheKind], sizes: PoolSizes) -> tuple[CacheGroup, ...]:
    """Returns the groups of an engine, given the kind of each layer."""
    layers = {kind: tuple(i for i, k in enumerate(kinds) if k == kind) for kind in kinds}
    num = sum(not getattr(kind, "is_small", False) for kind in kinds)
    return tuple(
        CacheGroup(kind, of, *kind.pool(sizes._replace(share=len(of) / num)))
        for kind, of in layers.items()
    )
