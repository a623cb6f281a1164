"""Queues, budgets, cached prefixes and ends, on examples small enough to work out by hand."""

import pytest

from jaxrunner.scheduling.request import Status
from tests.support.scheduling import check, make, new, step


def test_budget_is_split_in_order_of_arrival():
    scheduler, _ = make(max_num_batched_tokens=8)
    for name, prompt in (("a", 5), ("b", 6)):
        scheduler.add(new(name, prompt))
    assert step(scheduler).num_scheduled_tokens == {"a": 5, "b": 3}
    assert step(scheduler).num_scheduled_tokens == {"a": 1, "b": 3}
    assert step(scheduler).num_scheduled_tokens == {"a": 1, "b": 1}


def test_long_prefill_leaves_room_for_others():
    scheduler, _ = make(long_prefill_token_threshold=6)
    for name, prompt in (("a", 10), ("b", 3)):
        scheduler.add(new(name, prompt))
    assert step(scheduler).num_scheduled_tokens == {"a": 6, "b": 3}
    assert step(scheduler).num_scheduled_tokens == {"a": 4, "b": 1}


def test_chunked_prefill_samples_once_it_is_complete():
    scheduler, _ = make(max_num_batched_tokens=4)
    scheduler.add(request := new("a", 10))
    seen = []
    for _ in range(4):
        output = scheduler.schedule()
        seen.append((output.num_scheduled_tokens["a"], request.num_computed, request.num_in_flight))
        scheduler.update(output, {"a": [5] if request.num_in_flight else []})
    assert seen == [(4, 4, 0), (4, 8, 0), (2, 10, 1), (1, 11, 1)]
    assert request.output_token_ids == [5, 5]


def test_no_more_requests_run_than_there_are_slots():
    scheduler, _ = make(max_num_seqs=2)
    for name in "abc":
        scheduler.add(new(name, 2, max_tokens=2))
    assert list(step(scheduler).num_scheduled_tokens) == ["a", "b"]
    assert (scheduler.num_running, scheduler.num_waiting) == (2, 1)
    assert list(step(scheduler).num_scheduled_tokens) == ["a", "b"]
    output = step(scheduler)
    assert list(output.num_scheduled_tokens) == ["c"]
    assert output.finished_req_ids == {"a", "b"}


def test_priority_is_admitted_before_arrival():
    scheduler, _ = make(max_num_seqs=1, policy="priority")
    for name, priority in (("a", 2), ("b", 1), ("c", 1)):
        scheduler.add(new(name, 2, max_tokens=1, priority=priority))
    assert [list(step(scheduler).num_scheduled_tokens) for _ in "abc"] == [["b"], ["c"], ["a"]]


def test_whole_known_sequence_must_fit_at_admission():
    scheduler, _ = make(8, max_num_batched_tokens=8)
    scheduler.add(new("a", 14))
    step(scheduler)
    step(scheduler)
    scheduler.add(new("b", 17))
    assert list(step(scheduler).num_scheduled_tokens) == ["a"]
    assert scheduler.num_waiting == 1
    scheduler.finish(["a"], "abort")
    assert step(scheduler).num_scheduled_tokens == {"b": 8}


@pytest.mark.parametrize(("prompt_len", "hit"), [(12, 8), (13, 12), (4, 0), (5, 4)])
def test_cached_prompt_keeps_a_token_to_compute(prompt_len, hit):
    scheduler, _ = make()
    scheduler.add(new("a", range(16), max_tokens=1))
    step(scheduler)
    scheduler.add(request := new("b", range(prompt_len)))
    (entered,) = scheduler.schedule().scheduled_new_reqs
    assert entered.num_computed == request.num_cached_tokens == hit
    assert len(entered.block_ids[0]) == -(-prompt_len // 4)


def test_request_shares_what_another_computes_in_the_same_step():
    scheduler, pools = make()
    scheduler.add(first := new("a", range(9)))
    scheduler.add(second := new("b", [*range(8), 100, 101]))
    output = scheduler.schedule()
    assert output.num_scheduled_tokens == {"a": 9, "b": 2}
    assert first.blocks[0][:2] == second.blocks[0][:2]
    assert pools[0].num_free == 40 - 4
    check(scheduler, pools)
    scheduler.finish(["a"], "abort")
    assert pools[0].num_free == 40 - 3
    check(scheduler, pools)


@pytest.mark.parametrize(("salt", "hit"), [(b"", 4), (b"s", 0)], ids=["same", "other"])
def test_prefixes_are_shared_within_a_salt(salt, hit):
    scheduler, _ = make()
    scheduler.add(new("a", range(6)))
    scheduler.add(request := new("b", range(6), cache_salt=salt))
    scheduler.schedule()
    assert request.num_cached_tokens == hit


@pytest.mark.parametrize("depth", [1, 2], ids=["sync", "async"])
@pytest.mark.parametrize(
    ("tokens", "hit"),
    [([5, 5, 5], 8), ([5, 6], 7)],  # a block that is not full is copied
    ids=["all but the last", "last fills a block"],
)
def test_outputs_of_an_ended_request_are_cached(tokens, hit, depth):
    scheduler, _ = make()
    scheduler.add(request := new("a", range(6), max_tokens=3, eos=[6]))
    outputs = [scheduler.schedule() for _ in range(depth)]
    for token in tokens:
        scheduler.update(outputs.pop(0), {"a": [token]})
        outputs.append(scheduler.schedule())
    assert request.output_token_ids == tokens
    assert request.status is Status.FINISHED
    scheduler.add(new("b", [*range(6), *tokens, 7]))
    (entered,) = scheduler.schedule().scheduled_new_reqs
    # The device stops before it computes the last token.
    assert entered.num_computed == hit


@pytest.mark.parametrize(
    ("tokens", "kwargs", "taken", "reason", "stop_reason"),
    [
        ([5, 6, 7], dict(eos=[6]), [5, 6], "stop", None),
        ([5, 6, 7], dict(stops=[6], eos=[7]), [5, 6], "stop", 6),
        ([5, 6, 7], dict(eos=[6], max_tokens=2), [5, 6], "stop", None),
        ([5, 6, 7], dict(max_tokens=2), [5, 6], "length", None),
        ([6, 5, 6, 7], dict(eos=[6], min_tokens=2), [6, 5, 6], "stop", None),
        ([6, 6, 7], dict(eos=[6], min_tokens=2), [6, 6], "stop", None),
        ([6, 7], dict(eos=[6], min_tokens=2, max_tokens=2), [6, 7], "length", None),
        ([5, 7], dict(eos=[6]), [5, 7], None, None),
    ],
    ids=[
        "eos", "stop id", "stop at the limit", "limit", "too early", "just enough",
        "limit first", "goes on",
    ],
)  # fmt: skip
def test_tokens_after_the_end_are_dropped(tokens, kwargs, taken, reason, stop_reason):
    scheduler, _ = make()
    scheduler.add(request := new("a", 3, **kwargs))
    gained = scheduler.update(scheduler.schedule(), {"a": tokens})
    assert gained == [(request, taken)]
    assert request.output_token_ids == taken
    assert (request.finish_reason, request.stop_reason) == (reason, stop_reason)
    assert scheduler.has_unfinished == (reason is None)


def test_window_frees_blocks_on_the_confirmed_count():
    scheduler, pools = make(sizes=(2,), windows=(4,))
    scheduler.add(request := new("a", 5))
    null, seen, outputs = pools[0].null_block, [], []
    for _ in range(6):
        outputs.append(scheduler.schedule())
        seen.append(request.blocks[0].count(null))
        if len(outputs) > 2:  # two steps behind
            scheduler.update(outputs[len(outputs) - 3], {"a": [5]})
        check(scheduler, pools)
    # A step that starts at 4, 4, 4, 5, 6 and 7 confirmed tokens.
    assert seen == [0, 0, 0, 1, 1, 2]


def test_block_is_published_before_its_window_passes():
    scheduler, pools = make(sizes=(2,), windows=(1,))
    scheduler.add(request := new("a", range(5)))
    outputs = [scheduler.schedule() for _ in range(3)]
    for output in outputs[:2]:
        scheduler.update(output, {"a": [5]})
    scheduler.schedule()
    assert request.blocks[0][:3] == [pools[0].null_block] * 3
    scheduler.add(new("b", [*range(5), 5, 7]))
    (entered,) = scheduler.schedule().scheduled_new_reqs
    assert entered.num_computed == 6


def test_window_hit_starts_with_null_blocks():
    scheduler, pools = make(sizes=(2, 4), windows=(4, None))
    scheduler.add(first := new("a", range(14)))
    scheduler.add(second := new("b", [*range(12), 50, 51]))
    _, entered = scheduler.schedule().scheduled_new_reqs
    null = pools[0].null_block
    assert entered.num_computed == 12
    assert entered.block_ids[0] == [null] * 4 + first.blocks[0][4:6] + second.blocks[0][6:]
    assert entered.block_ids[1][:3] == first.blocks[1][:3]
    check(scheduler, pools)


def test_step_with_nothing_to_compute_still_tells_who_left():
    scheduler, _ = make()
    scheduler.add(new("a", 3, max_tokens=1))
    step(scheduler)
    output = scheduler.schedule()
    assert (output.finished_req_ids, output.total_num_scheduled_tokens) == ({"a"}, 0)
    assert scheduler.update(output, {}) == []
    assert not scheduler.has_unfinished
    assert scheduler.schedule().finished_req_ids == set()


def test_waiting_request_can_be_ended():
    scheduler, _ = make(max_num_seqs=1)
    for name in "abc":
        scheduler.add(new(name, 3))
    step(scheduler)
    scheduler.finish(["b"], "stop", "END")
    assert scheduler.num_waiting == 1
    scheduler.finish(["a"], "abort")
    assert list(step(scheduler).num_scheduled_tokens) == ["c"]


def test_prefix_cache_is_reset_when_nothing_runs():
    scheduler, pools = make(sizes=(4, 2), windows=(None, 4))
    scheduler.add(new("a", range(9), max_tokens=2))
    step(scheduler)
    assert not scheduler.reset_prefix_cache()
    step(scheduler)
    held = pools[1].take(1)  # by someone else
    assert not scheduler.reset_prefix_cache()
    pools[1].release(held)
    for hit in (8, 0):
        scheduler.add(request := new("b", range(9), max_tokens=1))
        step(scheduler)
        assert request.num_cached_tokens == hit
        assert scheduler.reset_prefix_cache()


def test_engine_that_cannot_hold_one_request_is_refused():
    text = "num_blocks=12 holds 48 tokens, one request of max_model_len=64 needs 64: raise"
    with pytest.raises(ValueError, match=text):
        make(12, max_model_len=64)
    make(12, windows=(9,), max_model_len=64)
    with pytest.raises(ValueError, match=r"num_blocks=6 holds 24 tokens, .* needs 28: raise"):
        make(6, windows=(9,), max_model_len=64)


@pytest.mark.parametrize(
    ("request_id", "prompt", "max_tokens", "text"),
    [
        ("a", 3, 8, "request 'a' is unfinished: give each live request its own request_id"),
        ("b", 0, 8, "prompt of request 'b' must hold at least 1 token, got 0"),
        ("b", 30, 8, "max_len of request 'b' must be at most max_model_len=32, got 38"),
    ],
    ids=["twice", "empty", "long"],
)
def test_bad_request_is_refused(request_id, prompt, max_tokens, text):
    scheduler, _ = make()
    scheduler.add(new("a", 3))
    with pytest.raises(ValueError, match=text):
        scheduler.add(new(request_id, prompt, max_tokens))
    assert scheduler.num_waiting == 1


def test_prompt_leaves_room_for_a_token():
    scheduler, _ = make()
    request = new("a", 9)
    request.max_len = 9
    text = "prompt of request 'a' has 9 tokens, max_len=9 needs room for one more"
    with pytest.raises(ValueError, match=text):
        scheduler.add(request)


def test_steps_at_once_are_for_decodes_that_nobody_waits_behind():
    scheduler, pools = make(num_blocks=10, max_num_seqs=2)
    scheduler.add(new("a", 6, max_tokens=9))
    assert scheduler.schedule(4).num_steps == 1  # a prefill
    output = scheduler.schedule(4)
    assert (output.num_steps, output.num_scheduled_tokens) == (4, {"a": 4})
    assert len(output.new_block_ids["a"][0]) == 1  # for tokens 8 and 9
    scheduler.add(new("b", 3))
    assert scheduler.schedule(4).num_steps == 1  # a slot is free
    scheduler.add(new("c", 3))
    output = scheduler.schedule(4)
    assert (output.num_steps, output.num_scheduled_tokens) == (4, {"a": 3, "b": 4})  # to max_len
    check(scheduler, pools)


def test_steps_at_once_need_blocks_for_all():
    scheduler, _ = make(num_blocks=8, max_num_seqs=2)
    for name in "ab":
        scheduler.add(new(name, 15, max_tokens=16))
    step(scheduler)
    step(scheduler)
    assert [r.num_held for r in scheduler.running] == [16, 16]
    assert step(scheduler).num_steps == 1  # token 16 of both takes two blocks more, of none left
