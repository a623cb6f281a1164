"""Waits with a time limit for what may hang. Knows no JAX."""

from collections.abc import Callable
import queue
import threading
import time

POLL_S = 2e-5  # between polls of a device: a step's tokens are read as soon as they are there


def ready_within(timeout_s: float, is_ready: Callable[[], bool]) -> bool:
    """Polls a function until it returns True. Returns whether it did in time."""
    end_s = time.monotonic() + timeout_s
    while not is_ready():
        if time.monotonic() > end_s:
            return False
        time.sleep(POLL_S)
    return True


def ends_within(timeout_s: float, run: Callable[[], object]) -> bool:
    """Runs a function in a thread. Returns whether it ended in time; raises what it raises."""
    ended: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()

    def work() -> None:
        try:
            run()
        except BaseException as error:  # whatever a broken device makes JAX raise
            ended.put(error)
        else:
            ended.put(None)

    # A daemon: where the device hangs, so does the thread, and must not keep the process.
    threading.Thread(target=work, daemon=True).start()
    try:
        error = ended.get(timeout=max(timeout_s, 0))
    except queue.Empty:
        return False
    if error is not None:
        raise error
    return True
