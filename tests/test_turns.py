"""Turns of a pipeline: even ones, of different requests."""

from collections import deque

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
