"""Routes requests to one of several equal engines, by prefix and load. Knows no JAX.

A request goes to the engine that had the longest prefix of its prompt before, as it may be cached
there, unless that engine has over `margin` tokens more work than the least busy one; otherwise to
the least busy one.
"""

from collections import OrderedDict
from collections.abc import Sequence

from jaxrunner.scheduling.block_pool import block_hashes, root_hash
from jaxrunner.scheduling.request import Request
from jaxrunner.scheduling.stateful import Stateful

MOST_BLOCKS = 64  # of a prompt, that are looked up
MOST_KNOWN = 2**16  # blocks that are remembered, those used last


class Router(Stateful):
    """The work of engines, in tokens, and the prompts that they got."""

    SAVED = ("work", "_left", "_known")  # in a snapshot

    def __init__(self, num: int, *, block_size: int, margin: int, by_prefix: bool = True) -> None:
        """num: of engines. margin: tokens of work. by_prefix: whether engines keep prefixes."""
        self.work = [0] * num  # of unfinished requests: prompts to compute, and answers at most
        self._block_size, self._margin = block_size, margin
        self._num_blocks = MOST_BLOCKS if by_prefix else 0
        self._left: dict[str, tuple[int, int]] = {}  # by request: its engine, and tokens of work
        self._known: OrderedDict[bytes, int] = OrderedDict()  # block: bits of engines that have it

    def choose(self, request: Request, live: Sequence[int]) -> int:
        """Returns one of the engines `live` for a request, and counts its work there."""
        least = min(live, key=self.work.__getitem__)
        most = self.work[least] + self._margin
        chosen, num_known, hashes = least, 0, self._hashes(request)
        for num in range(len(hashes), 0, -1):  # the longest prefix first
            bits = self._known.get(hashes[num - 1], 0)
            having = [i for i in live if bits >> i & 1 and self.work[i] <= most]
            if having:
                chosen, num_known = min(having, key=self.work.__getitem__), num
                break
        for name in hashes:
            self._known[name] = self._known.pop(name, 0) | 1 << chosen
        while len(self._known) > MOST_KNOWN:
            self._known.popitem(last=False)
        self._count(request, chosen, request.max_len - num_known * self._block_size)
        return chosen

    def follow(self, request: Request, chosen: int) -> None:
        """Counts the work of a request whose engine is already chosen."""
        self._count(request, chosen, request.max_len - len(request.prompt_token_ids))

    def observe(self, request: Request) -> None:
        """Updates the work once a request has gained tokens or ended."""
        if request.request_id in self._left:
            engine, left = self._left.pop(request.request_id)
            self.work[engine] -= left
            if request.finish_reason is None:
                self._count(request, engine, request.max_len - request.num_tokens)

    def drop(self, request_id: str) -> None:
        """Removes the work of a request that ended; other ids are ignored."""
        engine, left = self._left.pop(request_id, (0, 0))
        self.work[engine] -= left

    def forget(self) -> None:
        """Forgets all prefixes, as the caches were dropped."""
        self._known.clear()

    def _count(self, request: Request, engine: int, tokens: int) -> None:
        self._left[request.request_id] = engine, tokens
        self.work[engine] += tokens

    def _hashes(self, request: Request) -> list[bytes]:
        tokens = request.prompt_token_ids[: self._num_blocks * self._block_size]
        parent = root_hash(request.cache_salt)
        return block_hashes(tokens, self._block_size, group=0, parent=parent)
