"""Requests that wait, in the order of a policy. Knows no JAX."""

from collections.abc import Collection, Iterable
import heapq
import math

from jaxrunner.scheduling.request import Request
from jaxrunner.scheduling.stateful import Stateful

Order = tuple[int, int]


class RequestQueue(Stateful):
    """A heap of requests: by arrival under "fcfs", by priority and then arrival under "priority".

    A request that was preempted has its old place, in front of those that came later.
    """

    SAVED = ("_heap",)

    def __init__(self, policy: str):
        """policy: of `EngineConfig`."""
        self.policy = policy
        self._heap: list[tuple[Order, Request]] = []

    def __len__(self) -> int:
        return len(self._heap)

    def order(self, request: Request) -> Order:
        """Returns the sort key: the smallest is admitted first and preempted last."""
        return request.priority if self.policy == "priority" else 0, request.arrival

    def add_request(self, request: Request) -> None:
        """Puts a request in its place."""
        heapq.heappush(self._heap, (self.order(request), request))

    def peek_request(self) -> Request:
        """Returns the first request, which stays."""
        return self._heap[0][1]

    def pop_request(self) -> Request:
        """Takes the first request out."""
        return heapq.heappop(self._heap)[1]

    def remove_requests(self, requests: Collection[Request]) -> None:
        """Removes those of the requests that wait here."""
        gone = set(requests)
        self._heap = [entry for entry in self._heap if entry[1] not in gone]
        heapq.heapify(self._heap)

    def put_longest_first(self, requests: Iterable[Request]) -> None:
        """Orders those of the requests that wait here by `max_tokens`, most first, none as most.

        Those of one priority keep the places that they have among them, and equal ones their order;
        preempted ones stay. So a batch ends with short requests, which fill its slots up to the end
        (longest processing time first, Graham 1969).
        """
        asked, by_priority = set(requests), dict[int, list[Request]]()
        for (priority, _), request in sorted(self._heap, key=lambda entry: entry[0]):
            if request in asked and not request.output_token_ids:
                by_priority.setdefault(priority, []).append(request)
        for waiting in by_priority.values():
            arrivals = [request.arrival for request in waiting]
            waiting.sort(key=lambda r: r.params.max_tokens or math.inf, reverse=True)
            for request, arrival in zip(waiting, arrivals, strict=True):
                request.arrival = arrival
        self._heap = [(self.order(request), request) for _, request in self._heap]
        heapq.heapify(self._heap)

    def first(self, n: int) -> Iterable[Request]:
        """Returns the first `n` requests."""
        return [request for _, request in heapq.nsmallest(n, self._heap)]
