"""Schedulers of data ranks behind the methods of one: each rank has KV blocks and slots of its own.

All ranks take part in each step, as their experts are each other's; one without work has no rows.
Knows no JAX.
"""

from collections import ChainMap
from collections.abc import Iterable, Mapping, Sequence

from jaxrunner.scheduling.request import Request, SchedulerOutput
from jaxrunner.scheduling.router import Router
from jaxrunner.scheduling.scheduler import Scheduler
from jaxrunner.scheduling.stateful import Stateful


def ranks_of(scheduler: "Scheduler | RankedScheduler") -> list[Scheduler]:
    """Returns the scheduler of each data rank."""
    return scheduler.ranks if isinstance(scheduler, RankedScheduler) else [scheduler]


def take_up(
    scheduler: "Scheduler | RankedScheduler", requests: Iterable[Request], started: set[str]
) -> None:
    """Queues requests that other ranks had, in their order: they start again from their tokens.

    started: ids of those that have run before, whose number of cached tokens was reported.
    """
    for request in sorted(requests, key=lambda request: request.arrival):
        request.blocks, request.num_held, request.full_len = (), 0, 0
        request.num_computed = request.num_drafts = 0
        scheduler.add(request)
    for rank in ranks_of(scheduler):
        rank.admission.note_preempted(started & rank.requests.keys())


class RankedScheduler(Stateful):
    """Deals requests out to ranks, by their work and by prefix, and schedules all in one step."""

    SAVED = ("_rank",)  # in a snapshot

    def __init__(self, schedulers: Sequence[Scheduler], router: Router) -> None:
        self.ranks, self.router = list(schedulers), router
        self._rank: dict[str, int] = {}  # of unfinished requests
        self.adaptive, self.num_drafts = self.ranks[0].adaptive, self.ranks[0].num_drafts

    @property
    def requests(self) -> Mapping[str, Request]:
        """Unfinished requests, by their ids."""
        return ChainMap(*(rank.requests for rank in self.ranks))

    @property
    def has_unfinished(self) -> bool:
        """Whether a request waits or runs."""
        return any(rank.has_unfinished for rank in self.ranks)

    @property
    def num_waiting(self) -> int:
        """Requests that wait for their first step, or for their next after a preemption."""
        return sum(rank.num_waiting for rank in self.ranks)

    @property
    def num_running(self) -> int:
        """Requests in the running batch."""
        return sum(rank.num_running for rank in self.ranks)

    @property
    def num_preemptions(self) -> int:
        """Preemptions so far."""
        return sum(rank.num_preemptions for rank in self.ranks)

    def add(self, request: Request) -> None:
        """Queues a new request, on the rank that has its prefix. Raises as `Scheduler.add`."""
        first = request.prefix_from
        self.ranks[0].check(request)
        if first is not None and first.request_id in self._rank:
            rank = self._rank[first.request_id]
            self.router.follow(request, rank)
        else:
            rank = self.router.choose(request, range(len(self.ranks)))
        self._rank[request.request_id] = rank
        self.ranks[rank].add(request)

    def schedule(self, num_steps: int = 1) -> SchedulerOutput:
        """Plans the next step of all ranks, or several where those with work may do so.

        Several steps, and drafts in adaptive numbers, are of decodes alone, in which ranks without
        work have no part: nothing starts there.
        """
        busy = [rank for rank in self.ranks if rank.num_running or rank.admission.may_start]
        drafts = self.adaptive and self._share_drafts(busy)
        if num_steps > 1 and not (busy and all(rank.may_decode(num_steps) for rank in busy)):
            num_steps = 1
        due = busy if drafts or num_steps > 1 else self.ranks
        parts = [
            rank.schedule(num_steps) if rank in due else SchedulerOutput() for rank in self.ranks
        ]
        num_proposed = max(part.num_proposed for part in parts)
        whole = SchedulerOutput(parts=parts, num_proposed=num_proposed, num_steps=num_steps)
        for i, part in enumerate(parts):
            for new in part.scheduled_new_reqs:
                new.data_rank = i
            whole.scheduled_new_reqs += part.scheduled_new_reqs
            whole.new_block_ids |= part.new_block_ids
            whole.num_scheduled_tokens |= part.num_scheduled_tokens
            whole.num_drafts |= part.num_drafts
            whole.finished_req_ids |= part.finished_req_ids
            whole.preempted_req_ids |= part.preempted_req_ids
            whole.requests |= part.requests
        return whole

    def _share_drafts(self, busy: Sequence[Scheduler]) -> bool:
        """Lets all ranks draft as many tokens, none where one with work computes a prompt; whether
        they draft any."""
        decodes = bool(busy) and all(rank.may_decode() for rank in busy)
        for rank in self.ranks:
            rank.num_drafts = self.num_drafts if decodes else 0
        return self.ranks[0].num_drafts > 0

    def update(
        self, output: SchedulerOutput, sampled: Mapping[str, list[int]]
    ) -> list[tuple[Request, list[int]]]:
        """Takes in what a step sampled, as `Scheduler.update` does."""
        pairs = zip(self.ranks, output.parts, strict=True)
        gained = [one for rank, part in pairs for one in rank.update(part, sampled)]
        for request, _ in gained:
            self.router.observe(request)
            if request.finish_reason is not None:
                self._rank.pop(request.request_id, None)
        return gained

    def finish(
        self, request_ids: Iterable[str], reason: str, stop_reason: int | str | None = None
    ) -> None:
        """Ends requests, waiting or running; ids of others are ignored."""
        ids = list(request_ids)
        for rank in self.ranks:
            rank.finish(ids, reason, stop_reason)
        for request_id in ids:
            self.router.drop(request_id)
            self._rank.pop(request_id, None)

    def restart(self) -> None:
        """Takes all requests off devices that lost their tables: they wait again."""
        for rank in self.ranks:
            rank.restart()

    def recall(self) -> None:
        """Stops all that is remote."""
        for rank in self.ranks:
            rank.recall()

    def reset_prefix_cache(self) -> bool:
        """Forgets cached prefixes; False where a request owns blocks, whose rank keeps them."""
        self.router.forget()
        return all([rank.reset_prefix_cache() for rank in self.ranks])

    def outdate_prefixes(self, epoch: int, of_loras: Mapping[int, int] | None = None) -> None:
        """Lets no request to come share what other weights computed."""
        for rank in self.ranks:
            rank.outdate_prefixes(epoch, of_loras)
