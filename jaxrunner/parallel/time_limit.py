"""Runs work that may hang, with a time limit. Knows no JAX."""

from collections.abc import Callable
import os
import queue
import threading
from typing import Any


class _Thread:
    """Runs one function after another."""

    def __init__(self) -> None:
        self.asked: queue.SimpleQueue[Callable[[], Any]] = queue.SimpleQueue()
        self.ended: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        # A daemon: where the device hangs, so does the thread, and must not keep the process.
        threading.Thread(target=self._work, daemon=True).start()

    def _work(self) -> None:
        while True:
            self.ended.put(_error_of(self.asked.get()))


def _error_of(run: Callable[[], Any]) -> BaseException | None:
    """Runs a function, and keeps nothing of it. Returns what it raised."""
    try:
        run()
    except BaseException as error:  # whatever a broken device makes JAX raise
        return error
    return None


# Those that wait for work. A start takes as long as a short step; what hangs keeps its thread.
_idle: list[_Thread] = []
os.register_at_fork(after_in_child=_idle.clear)


def ends_within(timeout_s: float, run: Callable[[], Any]) -> bool:
    """Runs a function in a thread. Returns whether it ended in time; raises what it raises."""
    try:
        thread = _idle.pop()
    except IndexError:
        thread = _Thread()
    thread.asked.put(run)
    try:
        error = thread.ended.get(timeout=max(timeout_s, 0))
    except queue.Empty:
        return False
    _idle.append(thread)
    if error is not None:
        raise error
    return True
