"""A residual whose last part, what adapters add, is computed by the norm that takes it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jaxrunner.types import Array


@dataclass(frozen=True)
class AdaptedParts:
    """Stands for parts of a residual, [parts, T, E], in what models do with them.

    That is to ask how many axes they have, to change their dtype and to sum them up.
    """

    parts: Array  # of the base product, float32
    low: Array  # parts of a x, as of `lora_shrink`
    b: Array  # [1, places, rank, E]
    place: Array  # [T]
    whole: Callable[..., Array]  # (parts, low, b, place) -> parts with what adapters add
    ndim: int = 3

    def all(self) -> Array:
        """Returns the parts with what adapters add."""
        return self.whole(self.parts, self.low, self.b, self.place)

    def astype(self, dtype: Any) -> Array:
        """Returns the parts in a dtype."""
        return self.all().astype(dtype)

    def sum(self, axis: int, *, keepdims: bool = False) -> Array:
        """Returns the sum of the parts."""
        return self.all().sum(axis, keepdims=keepdims)
