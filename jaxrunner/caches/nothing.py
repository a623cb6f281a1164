"""Nothing: layers that make what they give of one token alone, or of a text in one step."""

from dataclasses import dataclass
from typing import Any, ClassVar

from jaxrunner.caches.one_block import OneBlock
from jaxrunner.pytree import leaf, pytree
from jaxrunner.types import Array


@pytree
class NoCache:
    """A number of each block, which nobody reads."""

    unused: Array = leaf("N")


@dataclass(frozen=True)
class Nothing(OneBlock):
    """A block is the place of a request, in which nothing is kept."""

    leaves: ClassVar[type] = NoCache

    @property
    def dims(self) -> dict[str, Any]:
        """None of its own."""
        return {}
