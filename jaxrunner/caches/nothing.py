"""Nothing: layers that make what they give of one token alone."""

from dataclasses import dataclass
from typing import Any, ClassVar

from jaxrunner.caches.checkpointed import Checkpointed
from jaxrunner.pytree import leaf, pytree
from jaxrunner.types import Array


@pytree
class NoCache:
    """A number of each block, which nobody reads."""

    unused: Array = leaf("N")


@dataclass(frozen=True)
class Nothing(Checkpointed):
    """A block is the place of a state of which there is nothing: those of other layers count."""

    leaves: ClassVar[type] = NoCache
    rewinds: ClassVar[bool] = True

    @property
    def dims(self) -> dict[str, Any]:
        """None of its own."""
        return {}
