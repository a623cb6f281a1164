"""Decides who computes how many tokens in a step, and who gives way. Knows no JAX.

    output = scheduler.schedule()                # may run again before the next line
    scheduler.update(output, sampled_token_ids)

Steps may be scheduled ahead of their outputs: a request counts what it will have computed
(`num_computed`) and been given (`num_in_flight`) once all launched steps are done. Steps run in
the order of their scheduling, so a block may have a new owner while a step that reads it runs.
"""

from collections.abc import Iterable, Mapping, Sequence
import heapq

from jaxrunner.config import POLICIES
from jaxrunner.scheduling.block_pool import BlockPool
from jaxrunner.scheduling.block_tables import BlockTables, Hit
from jaxrunner.scheduling.cache_groups import CacheGroup
from jaxrunner.scheduling.chunk_budget import ChunkBudget
from jaxrunner.scheduling.request import Request, SchedulerOutput, Status, admitted, awaits_prefix


class Scheduler:
    """Queues of requests, and the KV blocks they compute with."""

    SAVED = ("requests", "running", "num_preemptions", "_waiting", "_finished", "_preempted",
             "_no_room", "_num_added")  # fmt: skip

    def __init__(
        self,
        groups: Sequence[CacheGroup],
        pools: Sequence[BlockPool],
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        policy: str = "fcfs",
        long_prefill_token_threshold: int = 0,
        step_sizes: Sequence[int] = (),
    ):
        """long_prefill_token_threshold: most tokens of one request in a step, 0 for no limit.
        step_sizes: padded sizes that prefills should fill, none where padding costs nothing.

        Raises:
          ValueError: an unknown policy, or a pool too small for one request.
        """
        if policy not in POLICIES:
            raise ValueError(f"policy must be one of {POLICIES}, got {policy!r}: choose one")
        self.tables = BlockTables(groups, pools)
        self.tables.check_size(max_model_len, max_num_batched_tokens)
        self.max_num_seqs, self.max_model_len = max_num_seqs, max_model_len
        self.max_num_batched_tokens, self.policy = max_num_batched_tokens, policy
        self.running: list[Request] = []  # in the order of their admission
        self.num_preemptions = 0  # so far
        self._most_tokens = long_prefill_token_threshold or max_num_batched_tokens
        self.chunks = ChunkBudget(step_sizes, max_num_batched_tokens) if step_sizes else None
        self._waiting: list[tuple[tuple[int, int], Request]] = []  # a heap
        self.requests: dict[str, Request] = {}  # unfinished
        self._preempted: set[str] = set()  # unfinished requests that ever were
        self._finished: set[str] = set()  # since the last step
        self._num_added = 0
        self._no_room = False  # for the first that waits, since a request last gave blocks up

    @property
    def has_unfinished(self) -> bool:
        """Whether a request waits or runs."""
        return bool(self.requests)

    @property
    def num_waiting(self) -> int:
        """Requests that wait for their first step, or for their next after a preemption."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Requests that own blocks."""
        return len(self.running)

    def check(self, request: Request) -> None:
        """Checks what `add` needs.

        Raises:
          ValueError: no prompt, no room for a token behind it, or an id in use.
        """
        if request.request_id in self.requests:
            name = f"request {request.request_id!r}"
            raise ValueError(f"{name} is unfinished: give each live request its own request_id")
        request.check_lengths(self.max_model_len)

    def add(self, request: Request) -> None:
        """Queues a new request. Raises what `check` does."""
        self.check(request)
        request.arrival, self._num_added = self._num_added, self._num_added + 1
        self.requests[request.request_id] = request
        self._wait(request)

    def schedule(self, num_steps: int = 1) -> SchedulerOutput:
        """Plans the next step: running requests first, then waiting ones.

        Or `num_steps` at once, where none waits for a slot that is free, each running request is
        due one token and there are blocks for all; `num_steps` of the output says which.
        """
        several = num_steps > 1 and self._may_run_on(num_steps)
        output = SchedulerOutput(finished_req_ids=self._finished)
        output.num_steps = num_steps if several else 1
        self._finished = set()
        budget = self._continue(output)
        counts = output.num_scheduled_tokens.values()
        for request, n in zip(output.requests.values(), counts, strict=True):
            self._commit(request, n)
        if not output.preempted_req_ids and not several:
            self._admit(output, budget)
        return output

    def update(
        self, output: SchedulerOutput, sampled: Mapping[str, list[int]]
    ) -> list[tuple[Request, list[int]]]:
        """Takes in what a step sampled. Outputs must come in the order of their scheduling.

        Returns the requests that gained tokens, with these; the last one may have ended them.
        """
        gained = []
        for request_id, request in output.requests.items():
            tokens = sampled.get(request_id)
            if not tokens or request.status is Status.FINISHED:
                continue
            request.num_in_flight -= min(output.num_steps, output.num_scheduled_tokens[request_id])
            assert request.num_in_flight >= 0, f"unasked token of request {request_id!r}"
            gained.append((request, request.append(tokens)))
        ended = [request for request, _ in gained if request.finish_reason is not None]
        if ended:
            self._end(ended)
        return gained

    def finish(
        self, request_ids: Iterable[str], reason: str, stop_reason: int | str | None = None
    ) -> None:
        """Ends requests, waiting or running; ids of others are ignored."""
        live = [self.requests[r] for r in dict.fromkeys(request_ids) if r in self.requests]
        for request in live:
            request.finish_reason, request.stop_reason = reason, stop_reason
        self._end(live)

    def restart(self) -> None:
        """Takes all requests off a device that lost its tables, and every step: they wait again."""
        for request in list(self.running):
            self._preempt(request, SchedulerOutput())
        for request in self.requests.values():
            request.num_in_flight = 0
        self._finished = set()
        assert self.reset_prefix_cache(), "a block is in use and nobody runs"

    def reset_prefix_cache(self) -> bool:
        """Forgets cached prefixes; False, and no change, while a request runs."""
        return self.tables.reset()

    def outdate_prefixes(self, epoch: int) -> None:
        """Lets no request to come share what was computed in another epoch of the worker."""
        self.tables.weights_version = epoch

    def _continue(self, output: SchedulerOutput) -> int:
        """Plans the running requests. Returns the tokens that are left of the step's budget."""
        budget = self._budget()
        for request in list(self.running):
            if request.status is not Status.RUNNING:
                continue  # preempted just now
            if request.leads:
                prompt_len = len(request.prompt_token_ids)
                self.tables.publish_tail(request, min(request.num_computed, prompt_len))
                request.leads = request.num_computed < prompt_len
            n = cost = min(request.num_missing, self._most_tokens, budget)
            if n <= 0:
                continue  # about to end, or no budget
            if output.num_steps > 1:
                n = min(output.num_steps, request.max_len - request.num_known)
            if self.tables.have_windows:
                # What launched steps sampled is not known to stand yet.
                confirmed = min(request.num_computed, request.num_tokens - 1)
                self.tables.drop_skipped(request, confirmed)
            end = request.num_computed + n
            new = () if end <= request.num_held else self.tables.extend(request, end)
            while new is None:
                victim = max(self.running, key=self._order)
                budget += self._preempt(victim, output)
                if victim is request:
                    break
                new = self.tables.extend(request, end)
            else:
                budget -= cost
                output.num_scheduled_tokens[request.request_id] = n
                output.requests[request.request_id] = request
                if new:
                    output.new_block_ids[request.request_id] = new
        return budget

    def _budget(self) -> int:
        """Returns the most tokens of a step."""
        free = self.max_num_seqs - self.num_running
        if self.chunks is None or self.num_waiting <= free:
            return self.max_num_batched_tokens
        counts = [request.num_missing for request in self.running]
        waiting = heapq.nsmallest(free, self._waiting)
        num_due = sum(counts) + sum(request.num_tokens for _, request in waiting)
        return self.chunks.next(counts.count(1), num_due)

    def _may_run_on(self, num_steps: int) -> bool:
        """Whether all running requests may decode `num_steps` tokens and none is kept waiting."""
        if self._waiting and self.num_running < self.max_num_seqs and not self._no_room:
            return False
        due = [request for request in self.running if request.num_missing]
        ends = [min(request.num_computed + num_steps, request.max_len) for request in due]
        decodes = bool(due) and all(request.num_missing == 1 for request in due)
        return decodes and self.tables.have_room(due, ends)

    def _admit(self, output: SchedulerOutput, budget: int) -> None:
        """Plans waiting requests, in their order, while there is room for them."""
        followers = []
        while self._waiting and budget > 0 and self.num_running < self.max_num_seqs:
            request = self._waiting[0][1]
            if request.num_in_flight:
                break  # it resumes with all its tokens, and some are not read yet
            if awaits_prefix(request, output):
                followers.append(heapq.heappop(self._waiting))
                continue
            hit = self.tables.find(request)
            self._no_room = not self.tables.fits(request, hit, self.max_num_batched_tokens)
            if self._no_room:
                break
            heapq.heappop(self._waiting)
            n = min(request.num_tokens - hit.num_tokens, self._most_tokens, budget)
            budget -= n
            copies = self._start(request, hit, n)
            self.running.append(request)
            output.scheduled_new_reqs.append(admitted(request, copies))
            output.num_scheduled_tokens[request.request_id] = n
            output.requests[request.request_id] = request
            # At once, for the next one to share: a layer writes all keys before it reads any.
            self._commit(request, n)
        for entry in followers:
            heapq.heappush(self._waiting, entry)

    def _start(self, request: Request, hit: Hit, n: int) -> tuple[tuple[int, int], ...]:
        """Gives a request its cached prefix, and blocks for `n` tokens more.

        Returns the blocks to copy, from and to, by cache group.
        """
        self.tables.attach(request, hit)
        new = self.tables.extend(request, hit.num_tokens + n)
        assert new is not None, "what fits can be taken"
        request.status, request.num_computed = Status.RUNNING, hit.num_tokens
        if request.request_id not in self._preempted:
            request.num_cached_tokens = hit.num_tokens
        return self.tables.copies(request, hit)

    def _commit(self, request: Request, n: int) -> None:
        """Counts tokens of a request as computed: from here on nothing takes them off the step."""
        request.num_computed += n
        if request.num_computed >= request.num_known:
            request.num_in_flight = request.num_computed + 1 - request.num_tokens
        if request.num_tokens >= request.full_len:
            self.tables.publish(request, min(request.num_computed, request.num_tokens))

    def _preempt(self, request: Request, output: SchedulerOutput) -> int:
        """Takes a running request off the device. Returns the tokens it had in this step."""
        self.tables.publish(request, min(request.num_computed, request.num_tokens))
        self.tables.release(request)
        self.running.remove(request)
        request.num_computed = 0
        self._wait(request)
        self._preempted.add(request.request_id)
        self.num_preemptions += 1
        output.preempted_req_ids.add(request.request_id)
        output.new_block_ids.pop(request.request_id, None)
        output.requests.pop(request.request_id, None)
        return output.num_scheduled_tokens.pop(request.request_id, 0)

    def _end(self, requests: Sequence[Request]) -> None:
        if any(request.status is Status.WAITING for request in requests):
            gone = {request.request_id for request in requests}
            self._waiting = [e for e in self._waiting if e[1].request_id not in gone]
            heapq.heapify(self._waiting)
        for request in requests:
            if request.status is Status.RUNNING:
                # The device need not have computed the last token.
                computed = min(request.num_computed, request.num_tokens - 1)
                self.tables.publish(request, computed)
                self.tables.publish_tail(request, computed)
                self.tables.release(request)
                self.running.remove(request)
            request.status, request.num_in_flight, self._no_room = Status.FINISHED, 0, False
            del self.requests[request.request_id]
            self._preempted.discard(request.request_id)
            self._finished.add(request.request_id)

    def _wait(self, request: Request) -> None:
        request.status, self._no_room = Status.WAITING, False
        heapq.heappush(self._waiting, (self._order(request), request))

    def _order(self, request: Request) -> tuple[int, int]:
        """Who is first to be admitted, and last to be preempted: the smallest."""
        return request.priority if self.policy == "priority" else 0, request.arrival
