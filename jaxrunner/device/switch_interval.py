"""The GIL switch interval: how long a thread keeps the lock while others want it."""

from collections.abc import Iterator
import contextlib
import sys

INTERVAL_S = 1e-4


@contextlib.contextmanager
def short_switch_interval() -> Iterator[None]:
    """Sets the GIL switch interval to 0.1 ms while programs are lowered (Python's default is 5 ms).

    A step releases the lock at each call of XLA, and would wait 5 ms to get it back.
    """
    usual = sys.getswitchinterval()
    if usual <= INTERVAL_S:  # another engine has set it
        yield
        return
    sys.setswitchinterval(INTERVAL_S)
    try:
        yield
    finally:
        sys.setswitchinterval(usual)
