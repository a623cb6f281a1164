"""Requests that wait for something remote, with one that does as it is told."""

from collections.abc import Iterable

import pytest

from jaxrunner.scheduling.request import Request, Status
from tests.support.scheduling import make, new, step


class Remote:
    """Knows `found` tokens of each request; what has `finished` is told at the next poll."""

    def __init__(self, found: int | None):
        self.found, self.free = found, True
        self.started: list[tuple[str, int, int]] = []
        self.finished: list[tuple[Request, bool]] = []
        self.released: list[str] = []
        self.waits: list[bool] = []

    def lookup(self, request: Request, num_computed: int) -> int | None:
        return self.found

    def start(self, request: Request, num_computed: int, num_tokens: int) -> None:
        self.started.append((request.request_id, num_computed, num_tokens))

    def poll(self, *, wait: bool) -> Iterable[tuple[Request, bool]]:
        self.waits.append(wait)
        finished, self.finished = self.finished, []
        return finished

    def release(self, request: Request) -> bool:
        self.released.append(request.request_id)
        return self.free

    def reset(self) -> None:
        self.finished = []


def check(scheduler, pools):
    for g, pool in enumerate(pools):
        pool.check([request.blocks[g] for request in scheduler.holders])


def test_a_request_waits_for_its_tokens_without_a_slot():
    scheduler, pools = make(max_num_seqs=1, remote=(remote := Remote(6)))
    scheduler.add(request := new("a", 9))
    assert not scheduler.schedule().requests
    assert remote.started == [("a", 0, 6)]
    assert (request.status, request.num_computed) == (Status.WAITING_FOR_REMOTE, 0)
    assert (len(request.blocks[0]), scheduler.num_waiting, scheduler.num_running) == (3, 1, 0)
    remote.found = 0
    scheduler.add(new("b", 3, max_tokens=1))
    assert step(scheduler).num_scheduled_tokens == {"b": 3}  # it does not wait behind it
    remote.finished = [(request, True)]
    output = step(scheduler)
    assert output.num_scheduled_tokens == {"a": 3}
    assert output.scheduled_new_reqs[0].num_computed == request.num_cached_tokens == 6
    assert remote.waits == [False, False, True] and request.status is Status.RUNNING
    check(scheduler, pools)


def test_a_token_is_left_to_compute():
    scheduler, _ = make(remote=(remote := Remote(100)))
    scheduler.add(new("a", 9))
    scheduler.add(new("b", 9, cache_limit=5))
    scheduler.schedule()
    assert remote.started == [("a", 0, 8), ("b", 0, 5)]


def test_a_cached_prefix_is_not_fetched():
    scheduler, _ = make(remote=(remote := Remote(0)))
    scheduler.add(new("a", range(9), max_tokens=1))
    step(scheduler)
    for found, started in ((1, []), (5, [("b", 8, 13)])):
        remote.found = found  # of the third block one is there, to be copied
        scheduler.add(request := new("b", [*range(9), found, *range(5)]))
        step(scheduler)
        assert remote.started == started
        assert request.num_cached_tokens == (9 if not started else 0)
        scheduler.finish(["b"], "abort")


def test_what_fails_is_computed_here():
    scheduler, pools = make(remote=(remote := Remote(6)))
    scheduler.add(request := new("a", 9))
    scheduler.schedule()
    remote.finished = [(request, False)]
    output = step(scheduler)
    assert output.num_scheduled_tokens == {"a": 9}
    assert (len(remote.started), request.num_cached_tokens) == (1, 0)
    check(scheduler, pools)


def test_a_request_that_must_be_asked_again_lets_others_pass():
    scheduler, _ = make(remote=(remote := Remote(None)))
    scheduler.add(request := new("a", 9))
    assert not scheduler.schedule().requests
    assert (request.status, request.blocks) == (Status.WAITING, ())
    remote.found = 0
    assert step(scheduler).num_scheduled_tokens == {"a": 9}


@pytest.mark.parametrize("free", [True, False], ids=["at once", "later"])
def test_blocks_of_an_aborted_request_are_free_when_the_source_says(free):
    scheduler, pools = make(remote=(remote := Remote(6)))
    remote.free = free
    scheduler.add(request := new("a", 9))
    scheduler.schedule()
    scheduler.finish(["a"], "abort")
    assert (remote.released, scheduler.has_unfinished) == (["a"], False)
    assert pools[0].num_free == (40 if free else 37)
    check(scheduler, pools)
    remote.finished = [(request, True)]
    assert not scheduler.schedule().requests
    assert pools[0].num_free == 40


def test_blocks_of_an_ended_request_may_be_sent():
    scheduler, pools = make(remote=(remote := Remote(0)))
    remote.free = False
    scheduler.add(request := new("a", 9, max_tokens=1))
    step(scheduler)
    assert request.finish_reason == "length" and not scheduler.reset_prefix_cache()
    remote.finished = [(request, True)]
    scheduler.schedule()
    assert pools[0].num_free == 40 and scheduler.reset_prefix_cache()


def test_requests_start_again_after_a_restart():
    scheduler, pools = make(remote=(remote := Remote(6)))
    scheduler.add(waits := new("a", 9))
    scheduler.add(has_come := new("b", 9))
    scheduler.schedule()
    remote.finished, scheduler.max_num_seqs = [(has_come, True)], 0
    scheduler.schedule()
    scheduler.restart()
    assert (waits.status, has_come.status) == (Status.WAITING, Status.WAITING)
    assert pools[0].num_free == 40
    scheduler.max_num_seqs = 4
    scheduler.schedule()
    assert remote.started == [("a", 0, 6), ("b", 0, 6)] * 2


def test_a_window_has_blocks_for_what_later_tokens_see():
    scheduler, pools = make(
        6, sizes=(2,), windows=(3,), max_num_batched_tokens=4, remote=Remote(20)
    )
    scheduler.add(request := new("a", 22))
    scheduler.schedule()
    null = pools[0].null_block
    assert request.blocks[0].count(null) == 9 and len(request.blocks[0]) == 11
    check(scheduler, pools)


def test_no_steps_are_taken_at_once_while_one_could_start():
    scheduler, pools = make(8, max_num_batched_tokens=32, remote=(remote := Remote(0)))
    scheduler.add(sent := new("a", 16, max_tokens=1))
    remote.free = False
    scheduler.add(new("b", 4, max_tokens=20))
    step(scheduler)
    scheduler.add(late := new("c", 9))
    assert [scheduler.schedule(2).num_steps for _ in range(2)] == [1, 2]  # no block for "c"
    remote.finished = [(sent, True)]
    remote.found = 6
    assert scheduler.schedule(2).num_steps == 1 and late.status is Status.WAITING_FOR_REMOTE
    assert scheduler.schedule(2).num_steps == 2
    remote.finished = [(late, True)]
    output = scheduler.schedule(2)
    assert (output.num_steps, output.num_scheduled_tokens) == (1, {"b": 1, "c": 3})
    check(scheduler, pools)


def test_a_request_that_gave_way_is_computed_here():
    scheduler, pools = make(8, max_num_batched_tokens=32, remote=(remote := Remote(0)))
    for name in "ab":
        scheduler.add(new(name, 15, max_tokens=9))
    while not step(scheduler).preempted_req_ids:
        pass
    remote.found = 100
    scheduler.finish(["a"], "abort")
    assert list(step(scheduler).requests) == ["b"]
    assert not remote.started
    check(scheduler, pools)
