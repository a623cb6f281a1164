"""A fork of a runner goes its own way."""

import jax
import numpy as np
import pytest

from tests.support import tiny


def test_from_one_prefill_two_runners_decode_and_neither_sees_the_other():
    runner, new = tiny.runner(), tiny.new_request("a", [5, 6, 7], blocks=range(9))
    want = tiny.generate(tiny.runner(), new, 5)
    first = runner.step(tiny.scheduled({"a": 3}, [new])).get().sampled_token_ids[0]
    fork = runner.fork()
    assert fork.programs is runner.programs and fork.params is runner.params
    before = jax.tree.map(np.asarray, fork.state)
    runner.step(tiny.scheduled({"a": 1})).get()
    runner.step(tiny.scheduled({}, finished_req_ids={"a"}))
    other = tiny.new_request("b", [9, 9, 9], blocks=range(9))
    runner.step(tiny.scheduled({"b": 3}, [other])).get()
    jax.tree.map(np.testing.assert_array_equal, fork.state, before)
    again = fork.fork()
    for one in (fork, again):
        tokens = list(first)
        for _ in range(4):
            tokens += one.step(tiny.scheduled({"a": 1})).get().sampled_token_ids[0]
        assert tokens == want
    assert runner.requests["b"] == fork.requests["a"]
    with pytest.raises(KeyError):
        fork.requests["b"]


def test_what_cannot_be_forked_is_refused():
    runner = tiny.runner()
    new = tiny.new_request("a", [5, 6, 7], blocks=range(9))
    runner.execute_model(tiny.scheduled({"a": 3}, [new]))
    words = "to fork, call sample_tokens if a step waits, wake_up after a sleep"
    with pytest.raises(RuntimeError, match=words):
        runner.fork()
    runner.sample_tokens()
    runner.state = None
    with pytest.raises(RuntimeError, match=words):
        runner.fork()
