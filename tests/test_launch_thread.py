"""A thread that launches: in order, with what a launch raises, and gone with its owner."""

import gc
import sys
import threading
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxrunner.device import switch_interval
from jaxrunner.parallel.stages import Returned
from jaxrunner.programs.launch_thread import Launched, LaunchThread


def test_launches_run_in_the_order_of_their_calls():
    thread, ran, go = LaunchThread(), list[int](), threading.Event()
    futures = [thread.submit(lambda i=i: (go.wait(), ran.append(i))) for i in range(5)]
    assert ran == []
    go.set()
    [future.result(timeout=9) for future in futures]
    assert ran == [0, 1, 2, 3, 4]


def test_an_output_is_read_once_its_launch_has_returned():
    thread, go = LaunchThread(), threading.Event()
    none: Any = None  # the state, which nobody reads here
    returned = Returned(none, jnp.arange(3), ())
    launch = thread.submit(lambda: go.wait() and returned)
    out = Launched(launch)
    out.copy_to_host_async()
    assert not out.is_ready()
    go.set()
    np.testing.assert_array_equal(np.asarray(out), [0, 1, 2])
    assert out.is_ready()


def test_who_reads_the_output_gets_what_the_launch_raised():
    thread = LaunchThread()
    out = Launched(thread.submit(lambda: 1 // 0))
    with pytest.raises(ZeroDivisionError):
        np.asarray(out)
    assert out.is_ready()  # else a read would wait for it until its time is over
    assert thread.submit(lambda: 7).result(timeout=9) == 7  # the next launch runs


def test_the_switch_interval_is_short_while_launches_are_under_way():
    usual, thread, go = sys.getswitchinterval(), LaunchThread(), threading.Event()
    launches = [thread.submit(go.wait), thread.submit(lambda: 1 // 0)]
    with switch_interval.short_switch_interval():  # while a program is lowered, too
        assert sys.getswitchinterval() == pytest.approx(switch_interval.INTERVAL_S)
        go.set()
        launches[0].result(timeout=9)
        assert isinstance(launches[1].exception(timeout=9), ZeroDivisionError)
        assert sys.getswitchinterval() == pytest.approx(switch_interval.INTERVAL_S)
    thread.submit(lambda: None).result(timeout=9)
    assert sys.getswitchinterval() == pytest.approx(usual)


def test_the_thread_ends_with_its_owner():
    before = set(threading.enumerate())
    thread = LaunchThread()
    (own,) = set(threading.enumerate()) - before
    del thread
    gc.collect()
    own.join(timeout=9)
    assert not own.is_alive()
