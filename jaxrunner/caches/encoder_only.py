"""Nothing: layers of an encoder see a whole text in one step, and no later one."""

from dataclasses import dataclass
from typing import ClassVar

from jaxrunner.caches.nothing import Nothing


@dataclass(frozen=True)
class EncoderOnly(Nothing):
    """A block is the place of a whole text."""

    whole_prompts: ClassVar[bool] = True  # a prompt is computed in one step
