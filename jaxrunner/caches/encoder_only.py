"""Nothing: layers of an encoder see a whole text in one step, and no later one."""

from dataclasses import dataclass
from typing import Any, ClassVar

from jaxrunner.caches.nothing import NoCache
from jaxrunner.caches.one_block import OneBlock


@dataclass(frozen=True)
class EncoderOnly(OneBlock):
    """A block is the place of a whole text."""

    leaves: ClassVar[type] = NoCache
    whole_prompts: ClassVar[bool] = True  # a prompt is computed in one step

    @property
    def dims(self) -> dict[str, Any]:
        """None of its own."""
        return {}
