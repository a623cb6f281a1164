"""How long a thread keeps Python's lock while others want it."""

from collections.abc import Iterator
import contextlib
import sys

TURN = 1e-4  # seconds


@contextlib.contextmanager
def short_turns() -> Iterator[None]:
    """Makes turns of 0.1 ms of Python's 5, while a thread works beside an engine's.

    A step gives the lock away at each call of XLA, and would wait 5 ms to have it back.
    """
    usual = sys.getswitchinterval()
    if usual <= TURN:  # as another engine wants
        yield
        return
    sys.setswitchinterval(TURN)
    try:
        yield
    finally:
        sys.setswitchinterval(usual)
