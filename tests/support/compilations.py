"""JAX's own count of compilations, those that no ledger of programs knows."""

from collections.abc import Iterator
from contextlib import contextmanager

from jax import monitoring


@contextmanager
def compilations() -> Iterator[list[str]]:
    """Lists what JAX compiles meanwhile, by the names of its events."""
    events: list[str] = []
    monitoring.register_event_duration_secs_listener(
        lambda event, *_, **__: events.append(event) if "compile" in event else None
    )
    try:
        yield events
    finally:
        monitoring.clear_event_listeners()
