"""A device that hangs ends its own engine, in the time that a step may take; others go on."""

from collections.abc import Iterator
from dataclasses import replace
import threading
import time
from types import SimpleNamespace
from typing import Any
import weakref

import jax
import numpy as np
import pytest

from jaxrunner.engine import steps
from jaxrunner.engine.engine import Engine
from jaxrunner.engine.snapshots.snapshot import restore_engine, save_engine
from jaxrunner.errors import StepTimeout
from jaxrunner.models.llama import llama
from jaxrunner.parallel.time_limit import arrives_within, ends_within
from jaxrunner.runner import at_exit
from jaxrunner.runner.step_handle import StepHandle
from tests.support import tiny
from tests.support.failing import Hanging
from tests.support.replicas import GREEDY, TWO, folder, ids, open_llm

__all__ = ["folder"]  # a fixture
SOON_S = 60.0  # far less than a test may take
WORDS = r"did not end a step within step_timeout_s=0\.5 and is not restarted.*: end this process"


@pytest.fixture
def end() -> Iterator[threading.Event]:
    made = threading.Event()
    yield made
    made.set()  # of threads that wait


def hang(engine: Engine, monkeypatch: pytest.MonkeyPatch, end: threading.Event, n: int = 0) -> None:
    """Makes an engine's n-th step from now hang, and those that follow: half a second is theirs."""
    real, count = engine.runner.step, iter(range(10**6))

    def step(scheduled: Any) -> StepHandle:
        handle = real(scheduled)
        jax.block_until_ready(handle._arrays())  # however slow: the limit is of what hangs
        if next(count) >= n:
            engine.config = replace(engine.config, step_timeout_s=0.5)
            monkeypatch.setattr(handle, "_arrays", lambda: [Hanging(end)])
        return handle

    def restart() -> None:
        raise AssertionError("restarted")

    monkeypatch.setattr(engine.runner, "step", step)
    monkeypatch.setattr(engine.runner, "restart", restart)


def one(**changes: Any) -> Engine:
    config, params = tiny.model_and_params()
    return Engine(llama, config, tiny.engine_config(**changes), params)


@pytest.mark.parametrize("depth", [1, 2])
def test_a_step_that_hangs_ends_its_engine(monkeypatch, end, depth, caplog):
    e = one(async_depth=depth)
    first = e.add("first", [3, 1], replace(GREEDY, max_tokens=1))
    while e.has_unfinished:
        e.step()
    hang(e, monkeypatch, end, n=2)
    asked = [e.add(str(i), [i, 5, 7], GREEDY) for i in range(3)]
    start_s, told = time.monotonic(), []
    while e.has_unfinished:
        told += e.step()
    assert time.monotonic() - start_s < SOON_S and caplog.records[0].message == "a step failed"
    assert first.error is None and {request for request, _ in told} == {*asked}
    assert {request.finish_reason for request in asked} == {"error"}
    assert all("the device did not" in str(request.error) for request in asked)
    assert max(len(request.output_token_ids) for request in asked) == 2  # of the steps before
    for ask in (e.step, lambda: e.add("late", [1], GREEDY)):
        with pytest.raises(RuntimeError, match=WORDS):
            ask()
    assert e.runner not in at_exit._alive
    e.close()


@pytest.mark.slow
@pytest.mark.devices(2)
def test_other_replicas_go_on(folder, monkeypatch, end):
    with open_llm(folder, **TWO) as llm:
        asked = ids([[i] * 5 for i in range(4)])  # two for each

        def errors() -> list[str]:
            return [out.error or "" for out in llm.generate(asked, GREEDY, use_tqdm=False)]

        assert errors() == [""] * 4  # all is compiled
        first, _ = llm.engine.engines
        hang(first, monkeypatch, end)
        told = errors()
        assert told[1::2] == ["", ""] and all("the device did not" in e for e in told[::2])
        assert errors() == [""] * 4
        assert "did not end a step within step_timeout_s=0.5" in llm.report()


def test_compilation_is_no_hang(monkeypatch):
    """Of a step beside others in flight, or of another replica."""
    now = [0.0]
    clock = SimpleNamespace(perf_counter=lambda: now[0], sleep=time.sleep)
    monkeypatch.setattr(steps, "time", clock)
    e, other = one(async_depth=2), one()
    real = e.runner.step

    def compiles(scheduled: Any) -> StepHandle:
        now[0] += 9e3
        return real(scheduled)

    monkeypatch.setattr(e.runner, "step", compiles)
    other.add("b", [4, 5], GREEDY)
    e.add("a", [1, 2, 3], GREEDY)
    other.launch()
    assert other.time_left_s == 600.0
    steps.launch_all([other, e])
    assert e.time_left_s == other.time_left_s == 600.0
    now[0] += 601
    assert e.time_left_s == other.time_left_s == -1
    assert steps.wait_for_one([e, other])
    assert e.oldest is not None
    jax.block_until_ready(e.oldest._arrays())
    e.read()  # the device has done it: the host was late
    assert e.time_left_s == 600 and not e.status.ended


def test_without_a_limit_a_step_may_take_for_ever():
    e = one(step_timeout_s=None)
    request = e.add("a", [1, 2, 3], GREEDY)
    while e.has_unfinished:
        assert e.time_left_s is None
        e.step()
    assert request.finish_reason == "length"


def test_a_snapshot_goes_on_with_another_limit(tmp_path):
    e, other = one(), one(step_timeout_s=7.0)
    request = e.add("a", [1, 2, 3], GREEDY)
    e.step()
    save_engine(e, tmp_path / "saved")
    restored = restore_engine(other, tmp_path / "saved").requests["a"]
    for engine in (e, other):
        while engine.has_unfinished:
            engine.step()
    assert restored.output_token_ids == request.output_token_ids


def test_a_handle_that_is_never_ready(monkeypatch, end):
    handle = StepHandle()
    monkeypatch.setattr(handle, "_arrays", lambda: [Hanging(end)])
    with pytest.raises(StepTimeout, match=r"did not do the step in timeout_s=0\.100: wait longer"):
        handle.wait(0.1)


@pytest.mark.parametrize("value", [0, -1.0, float("nan"), float("inf")])
def test_a_limit_that_cannot_be_is_refused(value):
    with pytest.raises(
        ValueError, match=r"step_timeout_s=.* is out of range: take a finite number"
    ):
        tiny.engine_config(step_timeout_s=value)


def test_threads_that_wait_are_used_again_and_keep_nothing():
    class Work:
        def __call__(self) -> None:
            ran.append(threading.get_ident())

    def fails() -> None:
        ran.append(threading.get_ident())
        raise KeyError("its own words")

    ran: list[int] = []
    for _ in range(3):
        gone = weakref.ref(work := Work())
        assert ends_within(SOON_S, work)
        del work
        with pytest.raises(KeyError, match="its own words"):
            ends_within(SOON_S, fails)
        assert gone() is None
    assert len(ran) == 6 and len(set(ran)) == 1


@pytest.mark.parametrize("backend", ["cpu", "gpu"])
def test_arrays_arrive_or_are_late(backend, monkeypatch, end):
    """A CPU is waited for by a thread, a GPU is polled."""
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    threading.Timer(0.2, end.set).start()
    arrays = [np.zeros(1), Hanging(end)] if backend == "cpu" else [Hanging(end)]
    assert not arrives_within(0.05, arrays)
    assert arrives_within(SOON_S, arrays)
