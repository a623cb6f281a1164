"""Throws bad values at an entry, and tells what became of each, with a canary beside.

A case is named by entry, seed and index, and can be thrown again by these. A canary is a request of
good parameters that lives through the cases: its tokens must be those that it has alone.
"""

from collections.abc import Callable, Iterator
import contextlib
import itertools
import random
import re
import resource
import signal
import time
from typing import Any, NamedTuple

import jax

from jaxrunner.api.validation import shown

SLOW_S = 4.0  # of the processor, for a refusal; what is taken may compile
HANG_S = 30.0  # after which a call is interrupted
MOST_KB = 1 << 20  # that the process may grow by in a call
MOST_WORDS = 2000  # characters of a message
KINDS = (ValueError, TypeError, RuntimeError, OSError, MemoryError, FloatingPointError)
NOT_KINDS = (jax.errors.JaxRuntimeError, RecursionError, UnicodeError)
FINE = ("refused", "accepted")


class Hang(BaseException):
    """A call has not come back in time."""


class Refused(ValueError):
    """One of many answers says why its prompt failed; the others took their time."""


class Harm(Exception):
    """What was taken, or left, is wrong."""


class Case(NamedTuple):
    """A call.

    fields: those of which a refusal names one; an expression of `re` each.
    good: whether it may be taken; None where both will do.
    stands: whether a refusal leaves `Entry.status`; a call of many steps sees to it itself.
    """

    call: Callable[[], Any]
    fields: tuple[str, ...]
    good: bool | None
    told: str  # the call in words
    stands: bool = True


class Result(NamedTuple):
    """What became of a case: one of `FINE`, or a kind of finding."""

    number: int
    kind: str
    good: bool | None
    told: str
    message: str


class Entry:
    """What is attacked. A subclass overrides what it needs."""

    def case(self, rng: random.Random) -> Case:
        """Returns a case that depends on `rng` alone."""
        raise NotImplementedError

    def status(self) -> Any:
        """Returns what a refusal must leave as it was."""

    def canary(self) -> Iterator[Any]:
        """Yields while a request lives, and last what it was answered."""
        yield ""

    def mend(self) -> None:
        """Takes back what a call that was taken has changed."""

    def close(self) -> None:
        """Ends the attacked."""


def attack(
    make: Callable[[], Entry],
    count: int,
    *,
    seed: int = 0,
    first: int = 0,
    before: Callable[[int, Case], Any] = lambda *_: None,
) -> Iterator[Result]:
    """Yields what became of cases, `first` and on, until `count` bad ones were thrown.

    What has harmed its entry is told, and the entry made anew. before: is told of each case.
    """
    watched, thrown = _Watched(make, first), 0
    for index in itertools.count(first):
        if thrown >= count:
            break
        case = watched.entry.case(random.Random(f"{seed}/{index}"))
        before(index, case)
        result = _judge(watched.entry, index, case)
        thrown += result.good is not True
        harm = watched.look(index, result.kind)
        yield result._replace(kind="neighbour", message=harm) if harm else result
    watched.close()


class _Watched:
    """An entry and its canary; made anew where one of them was harmed."""

    def __init__(self, make: Callable[[], Entry], first: int):
        self._make = make
        self._renew(first)

    def _renew(self, first: int) -> None:
        self.entry, self._since = self._make(), first
        *_, self._want = self.entry.canary()
        self._canary = self.entry.canary()

    def look(self, index: int, kind: str) -> str:
        """Lets the canary take a step. Returns what has happened to it."""
        harm = ""
        try:
            with _limit(HANG_S):
                self.entry.mend()
                told = next(self._canary)
            if told is not None:
                assert told == self._want, f"{told!r:.200} for {self._want!r:.200}"
                self._canary, self._since = self.entry.canary(), index + 1
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            harm = f"cases {self._since} to {index}: {type(error).__name__}: {error!s:.400}"
        if harm or kind in ("hang", "half applied"):
            self.close()
            self._renew(index + 1)
        return harm

    def close(self) -> None:
        """Ends the entry, as far as it lets."""
        with contextlib.suppress(BaseException), _limit(HANG_S):
            self.entry.close()


def _judge(entry: Entry, index: int, case: Case) -> Result:
    def result(kind: str, message: str = "") -> Result:
        return Result(index, kind, case.good, case.told, message[:600])

    before, size, start = entry.status(), _peak_kb(), time.process_time()
    at_once = case.stands
    try:
        with _limit(HANG_S):
            case.call()
        kind, message = ("silent", "taken") if case.good is False else ("accepted", "")
    except Hang:
        return result("hang", f"over {HANG_S:.0f} s")
    except Harm as error:
        return result("harm", str(error))
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        kind, message = _refusal(case, error)
        at_once &= kind == "refused" and not isinstance(error, Refused)
        if kind == "refused" and case.stands and (now := entry.status()) != before:
            return result("half applied", f"{before!r:.200} became {now!r:.200}; {message}")
    if at_once and kind == "refused" and time.process_time() - start > SLOW_S:
        return result("slow", f"{time.process_time() - start:.1f} s: {message}")
    if _peak_kb() - size > MOST_KB:
        return result("memory", f"{(_peak_kb() - size) >> 10} MB more: {message}")
    return result(kind, message)


def _refusal(case: Case, error: BaseException) -> tuple[str, str]:
    try:
        message = str(error)
    except Exception:
        return "undocumented", f"{type(error).__name__} that has no words"
    told = f"{type(error).__name__}: {message}"
    if not isinstance(error, KINDS) or isinstance(error, NOT_KINDS):
        return "undocumented", told
    if len(message) > MOST_WORDS:
        return "unnamed", f"a message of {len(message)} characters: {told}"
    names = "|".join(case.fields)
    if not re.search(rf"(?<![A-Za-z_])({names})(?![A-Za-z])", message):
        return "unnamed", told
    return "refused", told


@contextlib.contextmanager
def _limit(seconds: float) -> Iterator[None]:
    """Interrupts what takes longer, if Python runs in it; else a watchdog must."""

    def stop(*_: Any) -> None:
        raise Hang

    old = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)


def _peak_kb() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def in_words(name: str, fields: dict[str, Any]) -> str:
    """Returns a call in a line."""
    parts = (f"{field}={_shown(value)}" for field, value in fields.items())
    return f"{name}({', '.join(parts)})"


def _shown(value: Any) -> str:
    try:
        return shown(value)[:160]
    except BaseException as error:
        return f"<{type(value).__name__}, {type(error).__name__}>"
