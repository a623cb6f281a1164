"""A thread that launches programs while the host plans what follows.

A launch takes the host as long as a short step takes a device, most of it without the GIL. For the
rest the GIL switch interval is 0.1 ms meanwhile, or a launch would begin milliseconds late.
"""

from collections.abc import Callable
from concurrent.futures import Future
import queue
import threading
from typing import Any, cast
import weakref

import jax
import numpy as np

from jaxrunner.device import switch_interval

Asked = tuple[Future[Any], Callable[[], Any]]


class LaunchThread:
    """Runs functions one after the other, in the order of their calls."""

    def __init__(self) -> None:
        self._asked: queue.SimpleQueue[Asked | None] = queue.SimpleQueue()
        # A daemon: where the device hangs, so does the thread, and must not keep the process.
        threading.Thread(target=_work, args=(self._asked,), daemon=True).start()
        weakref.finalize(self, self._asked.put, None)

    def submit(self, run: Callable[[], Any]) -> Future[Any]:
        """Has the thread run a function; the future has what it returns or raises."""
        future: Future[Any] = Future()
        switch_interval.shorten()
        self._asked.put((future, run))
        return future


def _work(queued: queue.SimpleQueue[Asked | None]) -> None:
    while (asked := queued.get()) is not None:
        future, run = asked
        try:
            future.set_result(run())
        except BaseException as error:  # whoever waits for the result raises it
            future.set_exception(error)
        finally:
            switch_interval.restore()
        del asked, future, run  # while it waits, a thread keeps no arrays


class Launched:
    """What a launch returns for the host; has the methods to wait for an array."""

    def __init__(self, launch: Future[Any], of: Callable[[Any], jax.Array]) -> None:
        """of: returns the array of what the launch returns."""
        self._launch, self._of = launch, of

    def copy_to_host_async(self) -> None:
        """Does nothing: the launch starts the copy."""

    def is_ready(self) -> bool:
        """Whether the array has arrived, or will not, as the launch has failed."""
        if not self._launch.done():
            return False
        failed = self._launch.exception() is not None
        return failed or cast(Any, self._of(self._launch.result())).is_ready()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self._of(self._launch.result()), dtype)
