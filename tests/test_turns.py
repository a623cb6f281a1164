"""Turns of a pipeline: even ones, of different requests, none of which has to wait for long."""

from collections import Counter, deque

import pytest

from tests.support.scheduling import make, new


@pytest.mark.parametrize("num", [2, 3, 4])
@pytest.mark.parametrize("live", [1, 2, 3, 5, 6])
def test_turns_become_even_and_stay_so(num, live):
    s, _ = make(num_blocks=200, max_num_seqs=12, max_num_batched_tokens=64, num_stages=num)
    for i in range(2 * live):
        s.add(new(f"{i:c}", 2, 28 if i < live else 4))  # the later ones end soon, and leave gaps
    queue, steps = deque(), list[set[str]]()
    while s.has_unfinished:
        while len(queue) < 2 * num and (output := s.schedule()).requests:
            queue.append(output)
            steps.append(set(output.requests))
        output = queue.popleft()
        due = [r.request_id for r in output.requests.values() if r.num_in_flight]
        s.update(output, {r: [5] for r in due})
    turns = min(num, live)  # where there are fewer requests, each has one
    late = steps[-8 * turns : -2 * turns]
    assert {len(one) for one in late} <= {live // turns, -(-live // turns)}
    for i in range(len(late) - turns):
        assert sum(map(len, late[i : i + turns])) == len(set.union(*late[i : i + turns])) == live


@pytest.mark.parametrize("num", [1, 2, 3])
def test_a_prompt_that_has_begun_waits_for_its_turn_alone(num):
    """Though more requests wait than there are slots: it is in each step of its turn."""
    s, _ = make(
        num_blocks=2000, max_num_seqs=8 * num, max_num_batched_tokens=64, max_model_len=128,
        step_sizes=(8, 16, 32, 64), num_stages=num,
    )  # fmt: skip
    for i in range(40):
        s.add(new(f"{chr(97 + i)}", 19 + i % 5, 40 + i % 3))
    queue, waited, most = deque(), Counter[str](), 0
    while s.has_unfinished:
        while len(queue) < 2 * num and (output := s.schedule()).requests:
            queue.append(output)
            assert len(output.requests) <= 8
            waited.update(r.request_id for r in s.running if r.num_missing > 1)
            for request_id in output.requests:
                most = max(most, waited.pop(request_id, 0))
        output = queue.popleft()
        due = [r.request_id for r in output.requests.values() if r.num_in_flight]
        s.update(output, {r: [5] for r in due})
    assert most == num
