"""How many tokens a step takes while more requests wait than there is room for.

A step is padded to a compiled size. With decodes about, the prompts of the few requests that come
and go leave most of it empty, so prefills wait some steps until they fill a size, and fill just it.
"""

from collections.abc import Sequence

MAX_HELD = 4  # steps that a prefill waits at most
WORTH, ENOUGH = 3.0, 1.5  # sizes, in decodes, that are filled at once, and after waiting


class ChunkBudget:
    """Chooses each step's tokens. Of four policies simulated on one mixed load (512 requests of
    32 to 1024 tokens, answers of 32 to 512, 256 at a time) this one padded least."""

    SAVED = ("_num_held",)

    def __init__(self, sizes: Sequence[int], most: int):
        """sizes: padded sizes of steps with a prefill; most: tokens of any step."""
        self._sizes, self._most = [size for size in sizes if size <= most], most
        self._num_held = 0

    def next(self, num_decodes: int, num_due: int) -> int:
        """Returns the most tokens of the next step.

        num_decodes: requests that are due one token, and their drafts; num_due: tokens that could
        be computed, these and those of requests for which there is a slot.
        """
        size = max((size for size in self._sizes if size <= num_due), default=0)
        hold = num_decodes < num_due and size < WORTH * num_decodes and self._num_held < MAX_HELD
        self._num_held = self._num_held + 1 if hold else 0
        if hold:
            return min(num_decodes, self._most)  # with drafts they may be more
        return size if size > ENOUGH * num_decodes else self._most
