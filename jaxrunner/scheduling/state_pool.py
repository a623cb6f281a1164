"""Blocks of a cache group whose layers carry states on: some are checkpoints. Knows no JAX."""

from collections.abc import Sequence

from jaxrunner.caches.cache_group import CacheGroup, has_checkpoints
from jaxrunner.scheduling.block_pool import BlockPool


class StatePool(BlockPool):
    """A `BlockPool` of states. Nobody reads a checkpoint in the step that writes it.

    Layers with keys write all of a step before they read any; a state is read before it is written.
    """

    def __init__(
        self, num_blocks: int, block_size: int, group: int = 0, enable_caching: bool = True
    ):
        super().__init__(num_blocks, block_size, group, enable_caching)
        self._unwritten: set[int] = set()  # published, by the step that is being planned

    def begin_step(self) -> None:
        """Lets `lookup` find what the steps planned so far have published."""
        self._unwritten.clear()

    def publish(self, block: int, block_hash: bytes, tokens: Sequence[int]) -> None:
        """Lets `lookup` find a block in use, from the next step on."""
        if not self.is_published(block):
            self._unwritten.add(block)
        super().publish(block, block_hash, tokens)

    def lookup(self, block_hash: bytes, tokens: Sequence[int]) -> int | None:
        """Returns a checkpoint with this hash behind just these tokens, if an earlier step wrote
        one."""
        wanted = block_hash, tuple(tokens)
        written = (b for b in self._blocks_of.get(block_hash, ()) if b not in self._unwritten)
        return next((block for block in written if self._published[block] == wanted), None)

    def release(self, blocks: Sequence[int]) -> None:
        """Takes one user from each block; what nobody can find is handed out before checkpoints."""
        super().release(blocks)
        for block in blocks:
            if self.is_free(block) and not self.is_published(block):
                self._free.move_to_end(block, last=False)


def make_pools(groups: Sequence[CacheGroup], *, enable_caching: bool) -> list[BlockPool]:
    """Returns the pools of an engine, one for each cache group."""
    return [
        (StatePool if has_checkpoints([group.kind]) else BlockPool)(
            group.num_blocks, group.block_size, g, enable_caching
        )
        for g, group in enumerate(groups)
    ]
