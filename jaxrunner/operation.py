"""Chooses one of several implementations of an operation, and records why others refused."""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple


class Operation(NamedTuple):
    """One implementation of an operation."""

    name: str
    run: Callable[..., Any]
    # (arguments of `run`) -> why it does not serve them, as text; None if it does.
    refuses: Callable[..., str | None] = lambda *args: None


class Chosen(NamedTuple):
    """The implementation that runs an operation, and why those before it refused."""

    operation: str
    name: str
    refused: dict[str, str]  # reasons of the candidates before it, by name


Note = Callable[[Chosen], None]  # called with each choice while a program is traced


def run_first(operation: str, candidates: Iterable[Operation], *args: Any, note: Note) -> Any:
    """Runs the first candidate that does not refuse `args`; the last one must serve all.

    Raises:
      AssertionError: all candidates refuse; says why.
    """
    refused: dict[str, str] = {}
    for candidate in candidates:
        reason = candidate.refuses(*args)
        if reason is None:
            note(Chosen(operation, candidate.name, refused))
            return candidate.run(*args)
        refused[candidate.name] = reason
    raise AssertionError(f"all implementations of {operation} refuse: {refused}")


def unnoted(chosen: Chosen) -> None:
    """Ignores a choice."""
