"""The GIL switch interval: how long a thread keeps the lock while others want it."""

from collections.abc import Iterator
import contextlib
import sys
import threading

INTERVAL_S = 1e-4
_lock = threading.Lock()
_usual: list[float] = []  # the interval to restore, once for each user of the short one


def shorten() -> None:
    """Sets the GIL switch interval to 0.1 ms until `restore` was called as often (Python's default
    is 5 ms)."""
    with _lock:
        _usual.append(_usual[0] if _usual else sys.getswitchinterval())
        sys.setswitchinterval(min(_usual[0], INTERVAL_S))


def restore() -> None:
    """Ends what one call of `shorten` began, in whichever thread."""
    with _lock:
        usual = _usual.pop()
        if not _usual:
            sys.setswitchinterval(usual)


@contextlib.contextmanager
def short_switch_interval() -> Iterator[None]:
    """Sets the GIL switch interval to 0.1 ms while programs are lowered.

    A step releases the lock at each call of XLA, and would wait 5 ms to get it back.
    """
    shorten()
    try:
        yield
    finally:
        restore()
