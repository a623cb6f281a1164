"""Python ends once devices rest: an end beside a step at work crashes in threads of XLA."""

import atexit
import contextlib
from typing import Any, Protocol
import weakref

import jax  # first: what is registered last is called first, before JAX gives its devices up


class Stateful(Protocol):
    """What has work in flight."""

    @property
    def state(self) -> Any:
        """Arrays that steps in flight make; None, or deleted, where there is none."""


_alive: weakref.WeakSet[Any] = weakref.WeakSet()


def awaited_at_exit(owner: Stateful) -> None:
    """Has Python wait at its end for the last step of `owner`, if it is still there."""
    _alive.add(owner)


def not_awaited_at_exit(owner: Stateful) -> None:
    """Has Python end without the last step of `owner`, which may hang."""
    _alive.discard(owner)


@atexit.register
def _wait() -> None:
    for owner in list(_alive):
        # Made when first used, which is not now.
        for x in jax.tree.leaves(vars(owner).get("state")):
            with contextlib.suppress(Exception):  # a step that failed, with none left to tell
                if not x.is_deleted():
                    x.block_until_ready()
