"""Phases of the host's work on a step, reported to a listener: where the host's time goes.

add       a prompt is checked and queued         dispatch  programs are launched
schedule  who computes how many tokens           wait      for the device
pack      a step's plan as one vector            read      tokens are taken in, requests end
admit     new requests enter the device's tables output    what users see: text, stop strings
"""

from collections.abc import Callable, Iterator
import contextlib
import functools
from typing import Any, Protocol, TypeVar, cast

F = TypeVar("F", bound=Callable[..., Any])
PHASES = ("add", "schedule", "pack", "admit", "dispatch", "wait", "read", "output")


class Listener(Protocol):
    """An observer of phases, which nest."""

    def begin(self, phase: str) -> None:
        """Notes that a phase of `PHASES` begins."""
        ...

    def end(self) -> None:
        """Notes that the innermost phase ends."""
        ...


_listeners: list[Listener] = []  # one at most


@contextlib.contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Reports phases of all engines of this process to `listener` while it is entered.

    Raises:
      RuntimeError: there is a listener already.
    """
    if _listeners:
        raise RuntimeError("phases have a listener already: end its `listening` first")
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.clear()


def phase(name: str) -> Callable[[F], F]:
    """Returns a decorator of functions that are a phase of `PHASES`."""

    def decorate(function: F) -> F:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if not _listeners:
                return function(*args, **kwargs)
            (listener,) = _listeners
            listener.begin(name)
            try:
                return function(*args, **kwargs)
            finally:
                listener.end()

        return cast(F, call)

    return decorate
