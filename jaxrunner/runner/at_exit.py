"""Waits for running steps when Python exits: an exit beside one crashes in threads of XLA."""

import atexit
import contextlib
from typing import Any, Protocol
import weakref

import jax  # imported first: handlers run in reverse, so ours runs before JAX releases its devices


class Stateful(Protocol):
    """An object with device work in flight."""

    @property
    def state(self) -> Any:
        """Arrays that steps in flight produce; None, or deleted, if there are none."""


_alive: weakref.WeakSet[Any] = weakref.WeakSet()


def awaited_at_exit(owner: Stateful) -> None:
    """Makes Python's exit wait for the last step of `owner`, while it is alive."""
    _alive.add(owner)


def not_awaited_at_exit(owner: Stateful) -> None:
    """Makes Python exit without waiting for `owner`, whose step may hang."""
    _alive.discard(owner)


@atexit.register
def _wait() -> None:
    for owner in list(_alive):
        if "_state" not in vars(owner):
            continue  # reading `state` would create it
        arrays: list[Any] = []
        with contextlib.suppress(Exception):  # of a failed step, which nobody reads any more
            arrays = jax.tree.leaves(owner.state)
        for x in arrays:
            with contextlib.suppress(Exception):
                if not x.is_deleted():
                    x.block_until_ready()
