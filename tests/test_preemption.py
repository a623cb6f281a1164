"""Who gives way, how it comes back, and what becomes of tokens in flight."""

import pytest

from jaxrunner.scheduling.request import Status
from tests.support.scheduling import check, make, new, step


def test_preempted_request_waits_in_front_and_resumes_with_its_outputs():
    scheduler, pools = make(8, max_num_batched_tokens=32)
    scheduler.add(first := new("a", 15, max_tokens=9))
    scheduler.add(second := new("b", 15, max_tokens=9))
    outputs = [step(scheduler), step(scheduler)]
    scheduler.add(new("c", 2))
    outputs.append(step(scheduler))
    assert [o.preempted_req_ids for o in outputs] == [set(), set(), {"b"}]
    assert outputs[2].num_scheduled_tokens == {"a": 1}
    assert (second.status, second.blocks, second.num_computed) == (Status.WAITING, (), 0)
    check(scheduler, pools)
    scheduler.finish(["a"], "abort")
    assert first.finish_reason == "abort"
    output = scheduler.schedule()
    assert list(output.num_scheduled_tokens) == ["b", "c"]
    resumed = output.scheduled_new_reqs[0]
    assert resumed.token_ids == [*second.prompt_token_ids, 5, 5]
    assert (resumed.prompt_len, resumed.seed) == (15, second.seed)
    assert 0 < resumed.num_computed <= 16
    assert second.num_cached_tokens == 0
    assert scheduler.num_preemptions == 1


@pytest.mark.parametrize("ahead", [False, True], ids=["read at once", "a step ahead"])
def test_priority_preempts_the_worst_even_if_it_was_scheduled_already(ahead):
    scheduler, pools = make(9, policy="priority", max_num_batched_tokens=17)
    scheduler.add(worst := new("a", 15, priority=9))
    outputs = [scheduler.schedule()]
    scheduler.add(best := new("b", 16, priority=1))
    for _ in range(2 if ahead else 1):
        outputs.append(scheduler.schedule())
        scheduler.update(outputs[-2], {r: [5] for r in outputs[-2].requests})
    if not ahead:
        scheduler.update(outputs[-1], {r: [5] for r in outputs[-1].requests})
        outputs.append(scheduler.schedule())
    # One block was left: the worst took it, and returned it with its place in the step.
    output = outputs[-1]
    assert [list(o.requests) for o in outputs] == [["a"], ["a", "b"], ["b"]]
    assert output.preempted_req_ids == {"a"}
    assert output.num_scheduled_tokens == {"b": 1}
    assert list(output.new_block_ids) == ["b"]
    assert (worst.num_in_flight, best.num_in_flight) == (0, 1)
    assert worst.output_token_ids == [5, 5]
    check(scheduler, pools)


def test_victim_returns_its_tokens_to_the_budget():
    scheduler, pools = make(
        8, policy="priority", max_num_batched_tokens=13, max_model_len=28,
        long_prefill_token_threshold=8,
    )  # fmt: skip
    scheduler.add(new("a", 26, max_tokens=1, priority=9))
    step(scheduler)
    scheduler.add(new("b", 4, priority=1))
    scheduler.add(new("c", 8, priority=2))
    assert step(scheduler).num_scheduled_tokens == {"a": 8, "b": 4, "c": 1}
    output = step(scheduler)
    assert output.preempted_req_ids == {"a"}
    assert output.num_scheduled_tokens == {"b": 1, "c": 7}
    check(scheduler, pools)


def test_priority_victim_may_be_the_request_that_asks():
    scheduler, pools = make(8, policy="priority", max_num_batched_tokens=17)
    scheduler.add(new("a", 15, priority=9))
    step(scheduler)
    scheduler.add(new("b", 14, priority=1))
    step(scheduler)
    output = step(scheduler)
    assert output.preempted_req_ids == {"a"}
    assert output.num_scheduled_tokens == {"b": 1}
    check(scheduler, pools)


def test_victim_does_not_publish_what_it_will_not_compute():
    scheduler, pools = make(7, policy="priority", max_model_len=28, long_prefill_token_threshold=8)
    scheduler.add(new("a", 26, max_tokens=1, priority=9))
    step(scheduler)
    scheduler.add(new("b", 4, priority=1))
    assert step(scheduler).num_scheduled_tokens == {"a": 8, "b": 4}
    # The last chunk of "a" takes two blocks, then "b" needs one.
    output = step(scheduler)
    assert (output.preempted_req_ids, output.num_scheduled_tokens) == ({"a"}, {"b": 1})
    scheduler.finish(["b"], "abort")
    (resumed,) = scheduler.schedule().scheduled_new_reqs
    assert resumed.num_computed == 16
    check(scheduler, pools)


def test_async_counters():
    scheduler, pools = make()
    scheduler.add(request := new("a", 5, max_tokens=3))
    outputs, seen = [], []
    for _ in range(4):
        outputs.append(scheduler.schedule())
        seen.append((outputs[-1].num_scheduled_tokens.get("a", 0), request.num_in_flight))
        if len(outputs) >= 2:
            scheduler.update(outputs[len(outputs) - 2], {"a": [5]})
    assert seen == [(5, 1), (1, 2), (1, 2), (0, 1)]
    assert request.output_token_ids == [5, 5, 5]
    assert (request.finish_reason, request.num_in_flight) == ("length", 0)
    assert pools[0].num_free == 40


def test_late_output_of_an_aborted_request_is_ignored():
    scheduler, pools = make()
    scheduler.add(request := new("a", 5))
    first, second = scheduler.schedule(), scheduler.schedule()
    scheduler.update(first, {"a": [5]})
    scheduler.finish(["a", "unknown", "a"], "abort")
    assert pools[0].num_free == 40
    scheduler.add(again := new("a", 6))
    assert scheduler.update(second, {"a": [6]}) == []
    assert (request.output_token_ids, again.output_token_ids) == ([5], [])
    output = scheduler.schedule()
    assert output.finished_req_ids == {"a"}
    assert [r.request_id for r in output.scheduled_new_reqs] == ["a"]


def test_late_token_of_a_preempted_request_counts():
    scheduler, pools = make(8, max_num_batched_tokens=32)
    scheduler.add(first := new("a", 15, max_tokens=9))
    scheduler.add(second := new("b", 15, max_tokens=9))
    outputs = [scheduler.schedule() for _ in range(3)]
    assert outputs[2].preempted_req_ids == {"b"}
    assert second.num_in_flight == 2
    scheduler.finish(["a"], "abort")
    # Not before its tokens are read.
    assert scheduler.schedule().finished_req_ids == {"a"}
    assert scheduler.update(outputs[0], {"a": [5], "b": [6]}) == [(second, [6])]
    assert not scheduler.schedule().requests
    scheduler.update(outputs[1], {"a": [5], "b": [7]})
    (resumed,) = scheduler.schedule().scheduled_new_reqs
    assert resumed.token_ids == [*second.prompt_token_ids, 6, 7]
    assert first.output_token_ids == []
    check(scheduler, pools)


def test_late_token_can_end_a_preempted_request():
    scheduler, pools = make(8, max_num_batched_tokens=32)
    scheduler.add(new("a", 15, max_tokens=9))
    scheduler.add(request := new("b", 15, eos=[6]))
    outputs = [scheduler.schedule() for _ in range(3)]
    scheduler.update(outputs[0], {"a": [5], "b": [6]})
    assert (request.finish_reason, scheduler.num_waiting) == ("stop", 0)
    assert scheduler.update(outputs[1], {"a": [5], "b": [9]})[0][0].request_id == "a"
    assert request.output_token_ids == [6]
    check(scheduler, pools)


def test_preempted_request_finds_what_it_computed_before_its_tokens_were_read():
    scheduler, _ = make(7, max_num_batched_tokens=32, max_model_len=28)
    scheduler.add(new("a", 9))
    scheduler.add(new("b", 15))
    outputs = [scheduler.schedule(), scheduler.schedule()]
    scheduler.update(outputs[0], {"a": [5], "b": [5]})
    assert scheduler.schedule().preempted_req_ids == {"b"}
    scheduler.finish(["a"], "abort")
    scheduler.update(outputs[1], {"a": [5], "b": [5]})
    (resumed,) = scheduler.schedule().scheduled_new_reqs
    assert (len(resumed.token_ids), resumed.num_computed) == (17, 16)
