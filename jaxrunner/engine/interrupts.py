"""Defers Ctrl-C to the end of code that must not be cut in two, such as a step."""

import contextlib
import signal
import threading
from typing import Any


class Deferred(contextlib.ContextDecorator):
    """A context, or decorator, within which an interrupt waits for the end of the outermost one."""

    _is_entered = False  # by the main thread

    def __enter__(self) -> "Deferred":
        # Python handles signals in its main thread only.
        main = threading.current_thread() is threading.main_thread()
        outermost = main and not Deferred._is_entered
        self._old = signal.getsignal(signal.SIGINT) if outermost else None
        self._seen = False
        if self._old is not None:
            signal.signal(signal.SIGINT, self._note)
            Deferred._is_entered = True  # behind the last moment at which the old handler may raise
        return self

    def _recreate_cm(self) -> "Deferred":
        return Deferred()  # one for each call, as calls nest

    def _note(self, *_: Any) -> None:
        self._seen = True

    def __exit__(self, *_: Any) -> None:
        if self._old is not None:
            Deferred._is_entered = False
            signal.signal(signal.SIGINT, self._old)
            if self._seen:
                signal.raise_signal(signal.SIGINT)


deferred = Deferred()
