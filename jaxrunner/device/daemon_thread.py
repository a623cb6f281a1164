"""A thread that runs functions beside its owner."""

from collections.abc import Callable
from concurrent.futures import Future
import queue
import threading
from typing import Any
import weakref

Asked = tuple[Future[Any], Callable[[], Any]]


class DaemonThread:
    """Runs functions one after the other, in the order of their calls. Ends with the object."""

    def __init__(self) -> None:
        self._asked: queue.SimpleQueue[Asked | None] = queue.SimpleQueue()
        # A daemon: where the device hangs, so does the thread, and must not keep the process.
        threading.Thread(target=_work, args=(self._asked,), daemon=True).start()
        weakref.finalize(self, self._asked.put, None)

    def submit(self, run: Callable[[], Any]) -> Future[Any]:
        """Has the thread run a function; the future has what it returns or raises."""
        future: Future[Any] = Future()
        self._asked.put((future, run))
        return future


def _work(queued: queue.SimpleQueue[Asked | None]) -> None:
    """Runs what is queued until None is, and keeps nothing of it."""
    while (asked := queued.get()) is not None:
        future, run = asked
        result, error = None, None
        try:
            result = run()
        except BaseException as raised:  # whoever waits for the result raises it
            error = raised
        del asked, run
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)
        del future, result, error
