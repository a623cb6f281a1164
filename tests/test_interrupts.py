"""Ctrl-C at any moment: no state is lost, and the next request is answered as ever."""

import random
import signal
import threading
import time

import jax
import pytest
from test_engine import KINDS, PROMPTS, engine, run

from jaxrunner.interrupts import Deferred, deferred

NUM_INTERRUPTS = 400


@pytest.fixture
def interrupt():
    """Returns a function that runs another, and interrupts it after some seconds if it runs."""
    armed = threading.Event()
    before = signal.getsignal(signal.SIGINT)

    def handle(*_):
        if armed.is_set():
            raise KeyboardInterrupt

    def send(delay_s: float) -> None:
        time.sleep(delay_s)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    def during(function, delay_s: float) -> bool:
        thread = threading.Thread(target=send, args=(delay_s,))
        try:
            armed.set()
            thread.start()
            function()
            return False
        except KeyboardInterrupt:
            return True
        finally:
            armed.clear()
            thread.join()

    signal.signal(signal.SIGINT, handle)
    yield during
    signal.signal(signal.SIGINT, before)


def test_no_interrupt_loses_a_state(interrupt):
    e, rng = engine(), random.Random(0)
    want = run(e, PROMPTS[:2], [KINDS["greedy"]] * 2)
    start = time.perf_counter()
    assert run(e, PROMPTS[:2], [KINDS["greedy"]] * 2) == want
    usual_s, count, names = time.perf_counter() - start, 0, 0

    def work():
        while e.has_unfinished:
            e.step()

    deadline = time.monotonic() + 120
    while count < NUM_INTERRUPTS and time.monotonic() < deadline:
        names += 2
        requests = [e.add(str(names + i), PROMPTS[i], KINDS["greedy"]) for i in range(2)]
        count += interrupt(work, rng.random() * usual_s)
        assert not any(x.is_deleted() for x in jax.tree.leaves(e.runner.state))
        e.abort([request.request_id for request in requests])
        work()
        assert [pool.num_free for pool in e.pools] == [e.config.num_blocks] * len(e.pools)
        for request, tokens in zip(requests, want, strict=True):
            assert request.output_token_ids == tokens[: len(request.output_token_ids)]
    assert count >= NUM_INTERRUPTS / 4
    assert run(e, PROMPTS[:2], [KINDS["greedy"]] * 2) == want


def test_an_interrupt_waits_and_is_not_forgotten(interrupt):
    done = []

    @deferred
    def inner():
        time.sleep(0.05)
        done.append("inner")

    @deferred
    def outer():
        inner()
        done.append("outer")

    assert interrupt(outer, 0.02) and done == ["inner", "outer"]
    assert interrupt(lambda: time.sleep(1.0), 0.02)  # and outside it comes at once

    def fails():
        with Deferred():
            time.sleep(0.05)
            raise ValueError("its own")

    assert interrupt(fails, 0.02)


def test_other_threads_have_no_interrupts():
    seen = []
    thread = threading.Thread(target=deferred(lambda: seen.append(1)))
    thread.start()
    thread.join()
    assert seen == [1]
