"""Decides how many tokens each request computes in a step, and which is preempted. Knows no JAX.

    output = scheduler.schedule()                # may run again before the next line
    scheduler.update(output, sampled_token_ids)

Steps may be scheduled ahead of their outputs. A request then counts the most tokens that it will
have computed (`num_computed`) and that it may gain (`num_in_flight`) once all launched steps are
done; see `in_flight`. The device runs steps in the order of scheduling, so a freed block may have a
new owner while an earlier step that reads it still runs.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence

from jaxrunner.caches.cache_group import CacheGroup
from jaxrunner.scheduling import in_flight
from jaxrunner.scheduling.admission import Admission
from jaxrunner.scheduling.block_pool import BlockPool
from jaxrunner.scheduling.block_tables import BlockTables
from jaxrunner.scheduling.chunk_budget import ChunkBudget
from jaxrunner.scheduling.remote import RemoteSource
from jaxrunner.scheduling.request import Request, SchedulerOutput, Status
from jaxrunner.scheduling.request_queue import RequestQueue
from jaxrunner.scheduling.stateful import Stateful
from jaxrunner.scheduling.stop import append_tokens
from jaxrunner.scheduling.turns import Turns


class Scheduler(Stateful):
    """The queues of requests, and their KV blocks."""

    SAVED = ("requests", "running", "num_preemptions", "_finished", "_num_added")

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
        step_cost: int = 0,
        num_drafts: int = 0,
        adaptive: bool = False,
        lookahead: int = 0,
        remote: RemoteSource | None = None,
        num_stages: int = 1,
    ):
        """long_prefill_token_threshold: most tokens of one request in a step, 0 for no limit.
        step_sizes, step_cost: padded sizes that prefills should fill, see `ChunkBudget`.
        num_drafts: drafts that a step proposes for each request that it samples.
        adaptive: steps propose as many drafts as the attribute `num_drafts` says when they are
            scheduled, and none while they compute prompts.
        lookahead: tokens behind those of a step whose keys the drafter writes too.
        remote: source of KV computed elsewhere; it is asked about each new request.
        num_stages: of a pipeline, whose steps take turns, see `Turns`; max_num_seqs counts all.

        Raises:
          ValueError: an unknown policy, or a pool too small for one request.
        """
        self.tables = BlockTables(groups, pools, lookahead=lookahead, max_model_len=max_model_len)
        self.tables.check_size(max_num_batched_tokens)
        self.max_num_seqs, self.max_model_len = max_num_seqs, max_model_len
        self.max_num_batched_tokens = max_num_batched_tokens
        self.num_drafts = num_drafts  # of a request in a step, at most; may change between steps
        self._most_drafts, self.adaptive = num_drafts, adaptive
        self._most_tokens = long_prefill_token_threshold or max_num_batched_tokens
        self.waiting = RequestQueue(policy)
        self.admission = Admission(
            self.waiting, self.tables, remote,
            max_tokens=max_num_batched_tokens, most_of_one=self._most_tokens,
        )  # fmt: skip
        self.running: list[Request] = []  # in the order of their admission
        self.num_preemptions = self._num_added = 0  # so far
        sizes = step_sizes, max_num_batched_tokens, step_cost, self.tables.checkpoint_interval
        self.chunks = ChunkBudget(*sizes) if step_sizes else None
        self.turns = Turns(num_stages) if num_stages > 1 else None
        self.requests: dict[str, Request] = {}  # unfinished
        self._finished: set[str] = set()  # since the last step

    @property
    def has_unfinished(self) -> bool:
        """Whether a request waits or runs."""
        return bool(self.requests)

    @property
    def num_waiting(self) -> int:
        """Requests that wait for their first step, or for their next after a preemption."""
        return self.admission.num_waiting

    @property
    def num_running(self) -> int:
        """Requests in the running batch."""
        return len(self.running)

    @property
    def holders(self) -> Iterator[Request]:
        """Requests that own blocks."""
        yield from self.running
        yield from self.admission.holders

    def check(self, request: Request) -> None:
        """Checks a request for `add`.

        Raises:
          ValueError: the prompt is empty or leaves no room for a token, or the id is in use.
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
        self.admission.wait(request)

    def schedule(self, num_steps: int = 1) -> SchedulerOutput:
        """Plans the next step: tokens of running requests first, then of waiting ones.

        Plans `num_steps` steps for one launch if no request can start, each running request is due
        one token, and there are blocks for all; `num_steps` of the output says how many it is.
        """
        if self.admission.remote is not None:
            self.admission.poll(idle=not self.running)
        decodes = self.adaptive and self.may_decode()
        several = num_steps > 1 and self.may_decode(num_steps)
        output = SchedulerOutput(finished_req_ids=self._finished)
        output.num_steps = num_steps if several else 1
        output.num_proposed = self._most_drafts
        if self.adaptive:
            output.num_proposed = self.num_drafts if decodes else 0
        self._finished = set()
        self.tables.begin_step()
        due, num_slots = self.running, self.max_num_seqs - self.num_running
        if self.turns is not None:
            num_new = min(num_slots, self.num_waiting) if self.admission.may_start else 0
            due, num_slots = self.turns.next(due, num_new)
        budget = self._continue(output, due, num_slots)
        in_flight.count_step(output, self.tables)
        waits = self.waiting or self.admission.remote is not None
        alone = several or (self.adaptive and output.num_proposed)
        if waits and not output.preempted_req_ids and not alone:
            self.running += self.admission.admit(output, budget, num_slots)
        if self._most_drafts:
            in_flight.count_drafts(output)
        return output

    def may_decode(self, num_steps: int = 1) -> bool:
        """Whether running requests are due at most a token and have blocks, and none can start."""
        if self.num_running < self.max_num_seqs and self.admission.may_start:
            return False
        if not self.running or any(request.num_missing > 1 for request in self.running):
            return False
        sizes = num_steps, self.num_drafts, self.max_num_batched_tokens
        return num_steps == 1 or in_flight.have_room(self.running, *sizes, self.tables)

    def update(
        self, output: SchedulerOutput, sampled: Mapping[str, list[int]]
    ) -> list[tuple[Request, list[int]]]:
        """Appends sampled tokens to requests. Steps must be given in the order of scheduling.

        Returns the requests that gained tokens, with these; requests may end by their last one.
        """
        gained, several = [], output.num_steps > 1
        for request_id, request in output.requests.items():
            tokens = sampled.get(request_id)
            if not tokens or request.status is Status.FINISHED:
                continue
            if request_id in output.num_drafts:
                in_flight.count_read(request, output, len(tokens))
            else:
                request.num_in_flight -= output.num_scheduled_tokens[request_id] if several else 1
            assert request.num_in_flight >= 0, f"unasked token of request {request_id!r}"
            gained.append((request, append_tokens(request, tokens)))
        ended = [request for request, _ in gained if request.finish_reason is not None]
        if ended:
            self._end(ended)
        return gained

    def finish(
        self, request_ids: Iterable[str], reason: str, stop_reason: int | str | None = None
    ) -> None:
        """Ends waiting or running requests; unknown ids are ignored."""
        live = [self.requests[r] for r in dict.fromkeys(request_ids) if r in self.requests]
        for request in live:
            request.finish_reason, request.stop_reason = reason, stop_reason
        self._end(live)

    def restart(self) -> None:
        """Preempts all requests and forgets launched steps, as the device has lost its tables."""
        for request in list(self.running):
            self._preempt(request, SchedulerOutput())
        self.recall()
        for request in self.requests.values():
            in_flight.forget(request)
        self._finished = set()
        assert self.reset_prefix_cache(), "a block is in use, but no request runs"

    def recall(self) -> None:
        """Cancels remote loads: requests that wait for one are queued again, and may ask again."""
        self.admission.recall()

    def reset_prefix_cache(self) -> bool:
        """Forgets cached prefixes; False, and no change, while a request owns blocks."""
        return self.tables.reset()

    def outdate_prefixes(self, epoch: int, of_loras: Mapping[int, int] | None = None) -> None:
        """Hides cached blocks of other weights, or of a replaced adapter, from later requests."""
        self.tables.weights_version, self.tables.lora_versions = epoch, of_loras or {}

    def _continue(self, output: SchedulerOutput, due: Sequence[Request], num_slots: int) -> int:
        """Plans the running requests in `due`. Returns the tokens left of the step's budget.

        num_slots: slots for requests that may start in this step.
        """
        most_drafts = min(self.num_drafts, output.num_proposed)
        budget, several = self._budget(most_drafts, due, num_slots), output.num_steps > 1
        spare = budget - len(due)  # for drafts, which must not take another request's token
        for request in list(due):
            if request.status is not Status.RUNNING:
                continue  # preempted earlier in this loop
            if request.publishes_prefix:
                prompt_len = len(request.prompt_token_ids)
                self.tables.publish_tail(request, min(request.num_computed, prompt_len))
                request.publishes_prefix = request.num_computed < prompt_len
            n = cost = min(request.num_missing, self._most_tokens, budget)
            if n != 1:
                if n <= 0:
                    continue  # about to end, or no budget
                if self.tables.checkpoint_interval:
                    n = cost = self.tables.until_checkpoint(request.num_computed, n)
            if self.tables.give_back:
                # Tokens of launched steps count as unconfirmed: drafts among them may be rejected.
                confirmed = min(request.num_computed, request.num_tokens - 1)
                self.tables.drop_skipped(request, confirmed)
            if request.num_drafts:
                most = min(most_drafts, spare, self._most_tokens - n)
                n, num_drafts = in_flight.plan_drafts(request, output, most, self.tables)
                cost, spare = cost + num_drafts, spare - num_drafts
            elif several:
                n = in_flight.most_sampled(request, 0, output.num_steps)
            end = request.num_computed + n
            end = end if end <= request.max_len else request.max_len
            if self.tables.lookahead:
                end = self.tables.end_of_drafts(request, end)
            new = () if end <= request.num_held else self.tables.extend(request, end)
            while new is None:
                victim = max(self.running, key=self.waiting.order)
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

    def _budget(self, most_drafts: int, due: Sequence[Request], free: int) -> int:
        """Returns the most tokens of a step whose requests verify `most_drafts` each."""
        if self.chunks is None:
            return self.max_num_batched_tokens
        return self.chunks.of(due, self.waiting, free, most_drafts)

    def _preempt(self, request: Request, output: SchedulerOutput) -> int:
        """Preempts a running request. Returns the tokens that it had in this step."""
        self.tables.publish(request, min(request.num_computed, request.num_tokens))
        self.tables.release(request)
        self.running.remove(request)
        request.num_computed = request.num_drafts = 0
        self.admission.wait(request, preempted=True)
        self.num_preemptions += 1
        output.preempted_req_ids.add(request.request_id)
        output.new_block_ids.pop(request.request_id, None)
        output.requests.pop(request.request_id, None)
        output.num_drafts.pop(request.request_id, None)
        return output.num_scheduled_tokens.pop(request.request_id, 0)

    def _end(self, requests: Sequence[Request]) -> None:
        for request in requests:
            if request.status is Status.RUNNING:
                # The last token was sampled, and may not be computed.
                computed = min(request.num_computed, request.num_tokens - 1)
                self.tables.publish(request, computed)
                self.tables.publish_tail(request, computed)
                self.running.remove(request)
        self.admission.end(requests)
        for request in requests:
            request.status = Status.FINISHED
            in_flight.forget(request)
            del self.requests[request.request_id]
            self._finished.add(request.request_id)
