"""The order of waiting requests, of which those of a call start with the longest."""

import pytest

from tests.support.scheduling import make, new, step


@pytest.mark.parametrize(("policy", "order"), [("fcfs", "x bdac z"), ("priority", "z x bdac")])
def test_requests_of_a_call_keep_their_places_but_start_longest_first(policy, order):
    scheduler, _ = make(max_num_seqs=1, policy=policy)
    asked = dict(a=2, b=7, c=1, d=7)
    scheduler.add(new("x", 2, max_tokens=1, priority=1))
    together = [new(name, 2, max_tokens=n, priority=2) for name, n in asked.items()]
    for request in together:
        scheduler.add(request)
    scheduler.add(new("z", 2, max_tokens=8, priority=0 if policy == "priority" else 2))
    scheduler.waiting.put_longest_first([*together, new("q", 2)])  # which does not wait here
    started = []
    while scheduler.has_unfinished:
        (name,) = step(scheduler).num_scheduled_tokens or (None,)
        if name not in (None, *started):
            started.append(name)
    assert started == [*order.replace(" ", "")]


def test_a_request_without_a_limit_counts_as_the_longest():
    scheduler, _ = make(max_num_seqs=1)
    for name in "abc":
        scheduler.add(new(name, 2))
    requests = [*scheduler.waiting.first(3)]
    requests[1].params.max_tokens = None
    scheduler.waiting.put_longest_first(requests)
    assert [r.request_id for r in scheduler.waiting.first(3)] == ["b", "a", "c"]


def test_priorities_and_requests_that_have_run_keep_their_places():
    scheduler, _ = make(max_num_seqs=4, policy="priority")
    asked = dict(a=(2, 1), b=(9, 1), c=(3, 2), d=(8, 2))
    requests = [new(name, 2, max_tokens=n, priority=p) for name, (n, p) in asked.items()]
    for request in requests:
        scheduler.add(request)
    requests[0].output_token_ids.append(5)  # as if it had been preempted
    scheduler.waiting.put_longest_first(requests)
    assert [r.request_id for r in scheduler.waiting.first(4)] == ["a", "b", "d", "c"]
    assert sorted(r.arrival for r in requests) == [0, 1, 2, 3]
