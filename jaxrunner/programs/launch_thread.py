"""A thread that launches programs while the host plans what follows.

A launch takes the host as long as a short step takes a device, most of it without the GIL. For the
rest the GIL switch interval is 0.1 ms meanwhile, or a launch would begin milliseconds late.
"""

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import numpy as np

from jaxrunner.device.daemon_thread import DaemonThread
from jaxrunner.device.switch_interval import restore, shorten


class LaunchThread(DaemonThread):
    """Launches programs one after the other, in the order of their calls."""

    def submit(self, run: Callable[[], Any]) -> Future[Any]:
        """Has the thread make a launch; the future has what it returns or raises."""

        def launch() -> Any:
            try:
                return run()
            finally:
                restore()

        shorten()
        return super().submit(launch)


class Launched:
    """The packed output of a launch (`Returned`); has the methods to wait for an array."""

    def __init__(self, launch: Future[Any]) -> None:
        self._launch = launch

    def copy_to_host_async(self) -> None:
        """Does nothing: the launch starts the copy."""

    def is_ready(self) -> bool:
        """Whether the output has arrived, or will not, as the launch has failed."""
        if not self._launch.done():
            return False
        return self._launch.exception() is not None or self._launch.result().packed.is_ready()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self._launch.result().packed, dtype)
