"""Waits with a time limit for what may hang."""

from collections.abc import Callable, Sequence
import os
import time
from typing import Any

import jax
import numpy as np

from jaxrunner.device.daemon_thread import DaemonThread

POLL_S = 2e-5  # between polls of a device: a step's tokens are read as soon as they are there
# Threads that wait for work. Starting one takes as long as a short step; a call that hangs keeps
# its thread.
_idle: list[DaemonThread] = []
os.register_at_fork(after_in_child=_idle.clear)


def arrives_within(timeout_s: float, arrays: Sequence[Any]) -> bool:
    """Waits for arrays of devices, as JAX does without a limit. Returns whether they came in time.

    A GPU is polled: a thread that waits in JAX wakes up later, by 2% of a first token of 8B.
    Devices of a CPU are the cores that polls would take, a fifth of a step; there a thread waits.
    """
    if jax.default_backend() == "cpu":
        return ends_within(timeout_s, lambda: [np.asarray(x) for x in arrays])
    return ready_within(timeout_s, lambda: all(x.is_ready() for x in arrays))


def ready_within(timeout_s: float, is_ready: Callable[[], bool]) -> bool:
    """Polls a function until it returns True. Returns whether it did in time."""
    end_s = time.monotonic() + timeout_s
    while not is_ready():
        if time.monotonic() > end_s:
            return False
        time.sleep(POLL_S)
    return True


def ends_within(timeout_s: float, run: Callable[[], Any]) -> bool:
    """Runs a function in a thread. Returns whether it ended in time; raises what it raises."""
    try:
        thread = _idle.pop()
    except IndexError:
        thread = DaemonThread()
    ended = thread.submit(run)
    try:
        error = ended.exception(timeout=max(timeout_s, 0))
    except TimeoutError:
        return False
    _idle.append(thread)
    if error is not None:
        raise error
    return True
