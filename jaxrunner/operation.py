"""How one of several implementations of an operation is chosen, in the open."""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple


class Operation(NamedTuple):
    """One implementation of an operation."""

    name: str
    run: Callable[..., Any]
    # (what `run` takes) -> why it does not serve that, in words; None where it does.
    refuses: Callable[..., str | None] = lambda *args: None


class Chosen(NamedTuple):
    """What runs an operation, and why nothing before it does."""

    operation: str
    name: str
    refused: dict[str, str]  # implementations that were asked first, and what each said


Note = Callable[[Chosen], None]  # is told of each choice, while a program is traced


def run_first(operation: str, candidates: Iterable[Operation], *args: Any, note: Note) -> Any:
    """Runs the first candidate that does not refuse `args`; the last one must serve all."""
    refused: dict[str, str] = {}
    for candidate in candidates:
        reason = candidate.refuses(*args)
        if reason is None:
            note(Chosen(operation, candidate.name, refused))
            return candidate.run(*args)
        refused[candidate.name] = reason
    raise AssertionError(f"all implementations of {operation} refuse: {refused}")


def unnoted(chosen: Chosen) -> None:
    """Takes no note."""
