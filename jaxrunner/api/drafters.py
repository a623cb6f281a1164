"""The interfaces of a user's own drafting code, as far as they are known without JAX."""

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class OwnSpeculator(Protocol):
    """A `Speculator`."""

    @property
    def name(self) -> str:
        """In messages."""
        ...

    @property
    def num_drafts(self) -> int:
        """Tokens of each request that it drafts in a step, K."""
        ...

    @property
    def propose(self) -> Callable[..., Any]:
        """The function that drafts them."""
        ...


@runtime_checkable
class OwnDrafter(Protocol):
    """A `Drafter`, whose weights are a checkpoint of their own."""

    @property
    def name(self) -> str:
        """In messages."""
        ...

    @property
    def layers(self) -> Callable[..., Any]:
        """The function that drafts a token."""
        ...
