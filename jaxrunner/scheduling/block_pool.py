"""The KV blocks of one cache group: reference counts, and cached contents. Knows no JAX.

A block is in use while its reference count is over 0, and free otherwise. A free block keeps its
contents and its hash, so that a later request with the same prefix can share it, until it is the
oldest free block and is handed out again.
"""

from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
import hashlib

from jaxrunner.scheduling.stateful import Stateful


class BlockPool(Stateful):
    """Blocks 0 to `num_blocks - 1`. `null_block` pads tables: it is no block and is never free."""

    SAVED = ("_num_refs", "_free", "_published", "_blocks_of", "_tails", "_tails_of")

    def __init__(
        self, num_blocks: int, block_size: int, group: int = 0, enable_caching: bool = True
    ):
        self.num_blocks, self.block_size, self.group = num_blocks, block_size, group
        self.enable_caching = enable_caching
        self.null_block = num_blocks
        self._num_refs = [0] * num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._published: dict[int, tuple[bytes, tuple[int, ...]]] = {}  # block: hash and tokens
        self._blocks_of: dict[bytes, list[int]] = {}
        self._tails: dict[int, tuple[bytes, tuple[int, ...]]] = {}  # block: parent and tokens
        self._tails_of: dict[bytes, list[int]] = {}

    @property
    def num_free(self) -> int:
        """Blocks that can be handed out."""
        return len(self._free)

    def is_free(self, block: int) -> bool:
        """Whether no request uses a block. The null block is never free."""
        return block in self._free

    def filled(self) -> list[int]:
        """Returns the blocks with contents: in use, or cached."""
        known = self._published.keys() | self._tails.keys()
        return [
            block for block in range(self.num_blocks) if self._num_refs[block] or block in known
        ]

    def is_published(self, block: int) -> bool:
        """Whether a block can be found by its hash."""
        return block in self._published

    def take(self, n: int) -> list[int]:
        """Hands out the `n` blocks that were free for longest, and forgets their hashes."""
        assert n <= self.num_free, f"{n} blocks wanted, {self.num_free} free"
        taken = [self._free.popitem(last=False)[0] for _ in range(n)]
        for block in taken:
            self._num_refs[block] = 1
            self._forget(block)
        return taken

    def share(self, blocks: Iterable[int]) -> None:
        """Adds one user to each block, in use or free."""
        for block in blocks:
            if block != self.null_block:
                self._free.pop(block, None)
                self._num_refs[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Takes one user from each block of a table, or of a part of it."""
        # Tail first, to be reused first: a tail is of no use without its prefix.
        for block in reversed(blocks):
            if block != self.null_block:
                assert self._num_refs[block] > 0, f"block {block} is free already"
                self._num_refs[block] -= 1
                if not self._num_refs[block]:
                    self._free[block] = None

    def publish(self, block: int, block_hash: bytes, tokens: Sequence[int]) -> None:
        """Lets `lookup` find a block in use by its hash; other blocks may have the same hash."""
        assert self._num_refs[block] > 0, f"block {block} is free: its contents are not settled"
        if self.enable_caching and block not in self._published:
            self._published[block] = block_hash, tuple(tokens)
            self._blocks_of.setdefault(block_hash, []).append(block)

    def lookup(self, block_hash: bytes, tokens: Sequence[int]) -> int | None:
        """Returns a block with this hash that holds just these tokens, if there is one."""
        wanted = block_hash, tuple(tokens)
        blocks = self._blocks_of.get(block_hash, ())
        return next((block for block in blocks if self._published[block] == wanted), None)

    def publish_tail(self, block: int, parent: bytes, tokens: Sequence[int]) -> None:
        """Lets `lookup_tail` find a block by its first `tokens`, which its owner keeps.

        parent: the hash of the block before it.
        """
        if self.enable_caching:
            self._forget_tail(block)
            self._tails[block] = parent, tuple(tokens)
            self._tails_of.setdefault(parent, []).append(block)

    def lookup_tail(self, parent: bytes, tokens: Sequence[int]) -> tuple[int, int]:
        """Returns how many of `tokens` the best block behind `parent` starts with, and it."""
        found = [(_num_equal(self._tails[b][1], tokens), b) for b in self._tails_of.get(parent, ())]
        return max(found, default=(0, self.null_block))

    def reset(self) -> bool:
        """Forgets all hashes. Returns False, and changes nothing, while a block is in use."""
        if self.num_free < self.num_blocks:
            return False
        for table in (self._published, self._blocks_of, self._tails, self._tails_of):
            table.clear()
        return True

    def check(self, owners: Iterable[Iterable[int]]) -> None:
        """Asserts that the pool agrees with the tables of all users. For tests."""
        entries = Counter(block for table in owners for block in table)
        del entries[self.null_block]
        counts = {block: refs for block, refs in enumerate(self._num_refs) if refs}
        assert counts == entries, "reference counts differ from table entries"
        assert len(counts) + self.num_free == self.num_blocks, "a block is lost"
        assert not counts.keys() & self._free.keys(), "a block in use is free"
        listed = [(h, block) for h, blocks in self._blocks_of.items() for block in blocks]
        held = [(h, block) for block, (h, _) in self._published.items()]
        assert all(self._blocks_of.values()), "a hash without blocks is kept"
        assert sorted(listed) == sorted(held), "hashes of blocks and blocks of hashes differ"

    def _forget(self, block: int) -> None:
        if block in self._published:
            block_hash, _ = self._published.pop(block)
            blocks = self._blocks_of[block_hash]
            blocks.remove(block)
            if not blocks:
                del self._blocks_of[block_hash]
        self._forget_tail(block)

    def _forget_tail(self, block: int) -> None:
        if block in self._tails:
            parent, _ = self._tails.pop(block)
            blocks = self._tails_of[parent]
            blocks.remove(block)
            if not blocks:
                del self._tails_of[parent]


def _num_equal(a: Sequence[int], b: Sequence[int]) -> int:
    """Returns how many elements two sequences have in common from their start on."""
    differing = (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y)
    return next(differing, min(len(a), len(b)))


def root_hash(salt: bytes) -> bytes:
    """Returns the parent hash of a first block."""
    return hashlib.sha256(salt).digest()


def block_hashes(
    tokens: Sequence[int], block_size: int, *, group: int, parent: bytes
) -> list[bytes]:
    """Returns a hash for each full block of `tokens`, which start where block `parent` ends.

    A hash stands for the block's tokens, all tokens before them, the cache group and the salt.
    parent: the hash of the block before `tokens`, or the root hash of the salt.
    """
    hashes, name = [], group.to_bytes(4, "little")
    content = array("i", tokens)
    size = block_size * content.itemsize
    whole = content.tobytes()
    for start in range(0, len(whole) - size + 1, size):
        parent = hashlib.sha256(parent + name + whole[start : start + size]).digest()
        hashes.append(parent)
    return hashes
