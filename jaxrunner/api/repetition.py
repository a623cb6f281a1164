"""When a request has begun to repeat itself. Knows no JAX."""

from collections.abc import Sequence
from dataclasses import dataclass

from jaxrunner.api.validation import Bound, validate


@dataclass(frozen=True, kw_only=True)
class RepetitionDetectionParams:
    """Ends a request whose last tokens are one pattern, `min_count` times over.

    Raises:
      TypeError, ValueError: a field is of the wrong type or out of range; names it.
    """

    max_pattern_size: int  # tokens of a pattern
    min_pattern_size: int = 1
    min_count: int = 2

    def __post_init__(self):
        low = dict(max_pattern_size=1, min_pattern_size=1, min_count=2)
        for name, least in low.items():
            full = f"repetition_detection.{name}"
            validate(full, getattr(self, name), Bound(int, least, 4096))
        if self.min_pattern_size > self.max_pattern_size:
            raise ValueError(
                f"repetition_detection.min_pattern_size={self.min_pattern_size} exceeds "
                f"max_pattern_size={self.max_pattern_size}: lower it"
            )

    def found(self, token_ids: Sequence[int]) -> bool:
        """Whether the last tokens repeat."""
        ids, end = token_ids, len(token_ids)
        longest = min(self.max_pattern_size, end // self.min_count)
        return any(
            all(ids[i] == ids[i - size] for i in range(end - 1, end - 1 - rest, -1))
            for size in range(self.min_pattern_size, longest + 1)
            if (rest := size * (self.min_count - 1))
        )
