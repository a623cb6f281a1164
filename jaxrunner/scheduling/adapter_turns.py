"""The adapters on the device: at most some at once, and each request's turn comes. No JAX."""

from jaxrunner.scheduling.request import Request
from jaxrunner.scheduling.stateful import Stateful


class AdapterTurns(Stateful):
    """Adapters of the requests that run, as an `Admission` asks for them.

    Where a request waits for a place, the adapter that has run for longest takes no more requests:
    those it has end, as each has a most length, and its place is the next one to be free.
    """

    SAVED = ("_users", "_draining", "num_freed")  # in a snapshot

    def __init__(self, max_loras: int, pinned: set[int]):
        """pinned: adapters that keep their places; a shared set, read at each call."""
        self.max_loras, self.pinned = max_loras, pinned
        self._users: dict[int, set[str]] = {}  # requests by adapter, the first to start first
        self._draining = 0  # an adapter, 0 for none
        self.num_freed = 0  # places so far, which another may take

    def admits(self, request: Request) -> bool:
        """Whether a request may start, as far as adapters go."""
        wanted = request.lora_id
        if not wanted or wanted in self._users:
            return not wanted or wanted != self._draining
        if wanted in self.pinned or len(self._users.keys() | self.pinned) < self.max_loras:
            return True
        if not self._draining:
            self._draining = next((i for i in self._users if i not in self.pinned), 0)
        return False

    def start(self, request: Request) -> None:
        """Counts a request that starts."""
        if request.lora_id:
            self._users.setdefault(request.lora_id, set()).add(request.request_id)

    def end(self, request: Request) -> None:
        """Counts a request that runs no more; another one is ignored."""
        users = self._users.get(request.lora_id, set())
        users.discard(request.request_id)
        if request.lora_id in self._users and not users:
            del self._users[request.lora_id]
            self.num_freed += 1
            if self._draining == request.lora_id:
                self._draining = 0
