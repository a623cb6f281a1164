"""What drafts by code of the user's, as far as it is known without JAX."""

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
        """What drafts them."""
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
        """What drafts a token."""
        ...
