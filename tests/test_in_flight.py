"""What the scheduler counts of steps with drafts until it reads how many were accepted."""

import pytest

from tests.support.scheduling import check, make, new


def counts(request):
    return request.num_computed, request.num_in_flight, request.num_drafts_in_flight


def planned(output):
    return output.num_scheduled_tokens, output.num_drafts


def test_a_step_counts_all_drafts_until_it_is_read():
    scheduler, pools = make(num_drafts=3)
    scheduler.add(request := new("a", 5, max_tokens=20))
    outputs, seen = [], []
    for _ in range(3):
        outputs.append(scheduler.schedule())
        seen.append((*planned(outputs[-1]), *counts(request)))
    assert seen == [
        ({"a": 5}, {}, 5, 1, 0),  # nothing is proposed yet
        ({"a": 4}, {"a": 3}, 9, 5, 3),
        ({"a": 4}, {"a": 3}, 13, 9, 6),
    ]
    assert request.num_held == 16
    for output, tokens, counted in zip(
        outputs, ([5], [5, 6], [5, 6, 7, 8]), [(13, 8, 6), (11, 4, 3), (11, 0, 0)], strict=True
    ):
        scheduler.update(output, {"a": tokens})
        assert counts(request) == counted
    # All but the last token is computed, as it would be without drafts.
    assert (request.num_tokens, request.num_held) == (12, 16)
    assert planned(scheduler.schedule()) == ({"a": 4}, {"a": 3})
    check(scheduler, pools)


def test_no_draft_lies_behind_the_last_token():
    scheduler, _ = make(num_drafts=3)
    scheduler.add(request := new("a", 5, max_tokens=7))
    outputs = [scheduler.schedule() for _ in range(5)]
    assert [planned(output) for output in outputs] == [
        ({"a": 5}, {}),
        ({"a": 4}, {"a": 3}),
        ({"a": 2}, {"a": 1}),  # 6 to 10 tokens are known, and 12 are the last
        ({"a": 1}, {}),  # 7 to 12
        ({"a": 1}, {}),
    ]
    for output, tokens in zip(outputs, ([5], [5], [5], [5], [5]), strict=True):
        scheduler.update(output, {"a": tokens})
    assert counts(request) == (9, 0, 0)
    assert request.num_held <= request.max_len
    scheduler.update(scheduler.schedule(), {"a": [5, 5]})
    assert (request.finish_reason, request.num_in_flight) == ("length", 0)


def test_a_request_that_is_sure_to_end_is_not_planned():
    scheduler, _ = make(num_drafts=1)
    scheduler.add(new("a", 5, max_tokens=3))
    outputs = [scheduler.schedule() for _ in range(4)]
    assert [o.num_scheduled_tokens.get("a", 0) for o in outputs] == [5, 2, 1, 0]


def test_drafts_take_no_token_of_another_request():
    scheduler, _ = make(num_drafts=3, max_num_batched_tokens=6)
    for name in "abcd":
        scheduler.add(new(name, 1))
    scheduler.schedule()
    assert planned(scheduler.schedule()) == (dict(a=3, b=1, c=1, d=1), {"a": 2})


def test_nobody_gives_way_for_a_draft():
    scheduler, pools = make(8, num_drafts=3, max_num_batched_tokens=32)
    for name in "ab":
        scheduler.add(new(name, 14))
    outputs = [scheduler.schedule()]
    assert pools[0].num_free == 0
    outputs.append(scheduler.schedule())  # two tokens more fit, a draft of three does not
    assert planned(outputs[1]) == ({"a": 1, "b": 1}, {})
    assert scheduler.num_preemptions == 0
    check(scheduler, pools)


def test_tokens_of_a_preempted_request_correct_what_is_in_flight_alone():
    scheduler, pools = make(8, num_drafts=2, max_num_batched_tokens=32)
    scheduler.add(first := new("a", 13, max_tokens=12))
    scheduler.add(second := new("b", 13, max_tokens=12))
    outputs = [scheduler.schedule() for _ in range(3)]
    assert planned(outputs[1]) == ({"a": 3, "b": 3}, {"a": 2, "b": 2})
    assert outputs[2].preempted_req_ids == {"b"}
    for output in outputs[:2]:
        scheduler.update(output, {"a": [5], "b": [5]})
    assert (counts(second), second.num_tokens, second.num_drafts) == ((0, 0, 0), 15, 0)
    assert counts(first)[0] <= first.num_held
    check(scheduler, pools)


@pytest.mark.parametrize("accepted", [0, 2])
def test_several_steps_count_the_drafts_of_each(accepted):
    scheduler, pools = make(num_drafts=2)
    scheduler.add(request := new("a", 5, max_tokens=20))
    scheduler.update(scheduler.schedule(3), {"a": [5]})
    output = scheduler.schedule(3)
    assert (output.num_steps, *planned(output)) == (3, {"a": 9}, {"a": 2})
    assert counts(request) == (14, 9, 6)
    scheduler.update(output, {"a": [5] * 3 * (1 + accepted)})
    assert counts(request) == (5 + 3 * (1 + accepted), 0, 0)
    check(scheduler, pools)


def test_fewer_drafts_may_be_asked_of_a_step():
    scheduler, _ = make(num_drafts=3)
    scheduler.add(new("a", 5))
    scheduler.schedule()
    seen = []
    for scheduler.num_drafts in (1, 0, 3):
        seen.append(scheduler.schedule().num_drafts)
    assert seen == [{"a": 1}, {}, {"a": 3}]
