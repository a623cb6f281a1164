"""The admission of waiting requests to the running batch, with cached prefixes. Knows no JAX."""

from collections.abc import Collection, Iterable

from jaxrunner.scheduling.adapter_turns import AdapterTurns
from jaxrunner.scheduling.block_tables import BlockTables, Hit
from jaxrunner.scheduling.in_flight import count_planned
from jaxrunner.scheduling.remote import RemoteRequests, RemoteSource
from jaxrunner.scheduling.request import Request, SchedulerOutput, Status, admitted, awaits_prefix
from jaxrunner.scheduling.request_queue import RequestQueue
from jaxrunner.scheduling.stateful import Stateful


class Admission(Stateful):
    """Requests that wait: in `queue` for blocks and a slot, in `remote` for KV from elsewhere.

    max_tokens: the most tokens of a step; most_of_one: the most of one request in a step.
    """

    SAVED = ("_preempted", "_no_room", "_num_freed")

    def __init__(
        self,
        queue: RequestQueue,
        tables: BlockTables,
        source: RemoteSource | None,
        *,
        max_tokens: int,
        most_of_one: int,
    ):
        self.queue, self._tables = queue, tables
        self.remote = None if source is None else RemoteRequests(source, tables)
        self._max_tokens, self._most_of_one = max_tokens, most_of_one
        self._preempted: set[str] = set()  # unfinished requests that were preempted once
        self.adapters: AdapterTurns | None = None  # places of adapters, where requests have some
        self._no_room = False  # for the first waiting request, and no blocks were freed since
        self._num_freed = 0  # `adapters.num_freed` then: data ranks share the places

    @property
    def num_waiting(self) -> int:
        """Requests that wait."""
        return len(self.queue) + (self.remote.num_waiting if self.remote is not None else 0)

    @property
    def holders(self) -> Iterable[Request]:
        """Requests that own blocks and do not run."""
        return self.remote.holders if self.remote is not None else ()

    @property
    def may_start(self) -> bool:
        """Whether a waiting request might start if a slot were free."""
        if self.queue and (not self._no_room or self._is_freed):
            return True
        return self.remote is not None and bool(self.remote.loaded)

    def wait(self, request: Request, *, preempted: bool = False) -> None:
        """Queues a request that owns no blocks."""
        if preempted:
            self._preempted.add(request.request_id)
            if self.adapters is not None:
                self.adapters.end(request)
        request.status, self._no_room = Status.WAITING, False
        self.queue.add_request(request)

    def note_preempted(self, request_ids: Iterable[str]) -> None:
        """Takes in that requests which wait have run before."""
        self._preempted.update(request_ids)

    def end(self, requests: Collection[Request]) -> None:
        """Removes requests that end, and frees their blocks."""
        if any(request.status is Status.WAITING for request in requests):
            self.queue.remove_requests(requests)
        for request in requests:
            self._preempted.discard(request.request_id)
            if self.adapters is not None:
                self.adapters.end(request)
            if self.remote is not None:
                self.remote.end(request)
            elif request.blocks:
                self._tables.release(request)
        self._no_room = self._no_room and not requests

    def poll(self, *, idle: bool) -> None:
        """Updates requests that wait for remote KV: those whose load failed are queued again."""
        if self.remote is not None:
            failed, any_freed = self.remote.poll(wait=idle and not self.queue)
            for request in failed:
                self.wait(request)
            self._no_room = self._no_room and not any_freed

    def recall(self) -> None:
        """Cancels remote loads: requests that wait for one are queued again, and may ask again."""
        for request in self.remote.reset() if self.remote is not None else ():
            self.wait(request)

    def admit(self, output: SchedulerOutput, budget: int, num_slots: int) -> list[Request]:
        """Plans waiting requests in their order while they fit. Returns those that start."""
        started = []
        # Loaded ones first: they own blocks that others wait for, and need no more in this step.
        loaded = () if self.remote is None else sorted(self.remote.loaded, key=self.queue.order)
        for request in loaded[:num_slots]:
            if self.remote is not None and budget > 0 and self._admits(request):
                budget -= self._start(request, self.remote.take_loaded(request), output, budget)
                started.append(request)
        passed_over = []
        while self.queue and budget > 0 and len(started) < num_slots:
            request = self.queue.peek_request()
            if self._tables.whole_prompts and request.num_tokens > budget:
                break
            if request.num_in_flight:
                break  # preempted: it resumes with all its tokens, of which some are not read yet
            waits = awaits_prefix(request, output) or not self._admits(request)
            cached = None if waits else self._tables.find(request)
            hit = cached and self._ask_remote(request, cached)
            if cached is None or hit is None:
                passed_over.append(self.queue.pop_request())
                continue
            self._no_room = not self._tables.fits(request, hit, self._max_tokens)
            if self._no_room:
                break
            self.queue.pop_request()
            self._tables.attach(request, hit)
            if self.remote is None or hit is cached:
                budget -= self._start(request, hit, output, budget)
                started.append(request)
            else:
                # Takes all blocks that a window needs now, so that later only a slot is missing.
                end = min(request.num_tokens, hit.num_tokens + self._max_tokens)
                self._extend(request, self._tables.end_of_drafts(request, end))
                self.remote.start(request, cached, hit)
        if passed_over and not self.queue:
            # All that is left may wait for places of adapters, which only an end frees.
            self._no_room = not any(map(self._admits, passed_over))
            self._num_freed = 0 if self.adapters is None else self.adapters.num_freed
        for request in passed_over:
            self.queue.add_request(request)
        return started

    @property
    def _is_freed(self) -> bool:
        return self.adapters is not None and self.adapters.num_freed != self._num_freed

    def _admits(self, request: Request) -> bool:
        """Whether a request's adapter has a place on the device, or can get one."""
        return self.adapters is None or self.adapters.admits(request)

    def _ask_remote(self, request: Request, hit: Hit) -> Hit | None:
        """Returns `hit`, or a longer one that is fetched; None if the request must wait."""
        # Not for a preempted request: each may hold blocks ahead of its turn only once.
        if self.remote is None or request.request_id in self._preempted:
            return hit
        return self.remote.lookup(request, hit)

    def _start(self, request: Request, hit: Hit, output: SchedulerOutput, budget: int) -> int:
        """Plans a request that has its cached prefix. Returns its tokens in this step."""
        n = min(request.num_tokens - hit.num_tokens, self._most_of_one, budget)
        if self._tables.checkpoint_interval:
            n = self._tables.until_checkpoint(hit.num_tokens, n)
        self._extend(request, self._tables.end_of_drafts(request, hit.num_tokens + n))
        request.status, request.num_computed = Status.RUNNING, hit.num_tokens
        if self.adapters is not None:
            self.adapters.start(request)
        if request.request_id not in self._preempted:
            request.num_cached_tokens = hit.num_tokens
        output.scheduled_new_reqs.append(admitted(request, self._tables.copies(request, hit)))
        output.num_scheduled_tokens[request.request_id] = n
        output.requests[request.request_id] = request
        # Counted now, so that the next request can share: a layer writes all keys before reads.
        count_planned(request, n, self._tables)
        return n

    def _extend(self, request: Request, num_tokens: int) -> None:
        new = self._tables.extend(request, num_tokens)
        assert new is not None, "free blocks do not hold a request that fits"
