"""The token budget of a step, chosen among the compiled sizes.

While more requests wait than there are slots, prompts are spread over steps: requests that end
together let as many start, and one long step would hold up all that decode, and each stage of a
pipeline but one. A size is filled exactly, so a step of many requests has little padding.
Otherwise padding matters on devices with few cores: a prompt is cut into the steps that take the
least time together.
"""

from collections.abc import Sequence
import functools

from jaxrunner.scheduling.request import Request
from jaxrunner.scheduling.request_queue import RequestQueue

STEPS = 8  # over which prompts are spread


class ChunkBudget:
    """Chooses each step's tokens."""

    def __init__(self, sizes: Sequence[int], most: int, step_cost: int = 0, interval: int = 0):
        """sizes: padded sizes of steps with a prefill; most: tokens of any step.
        step_cost: fixed time of a step, in tokens; 0 where padding is free.
        interval: tokens between checkpoints of states, where chunks end; 0 for none.
        """
        self._sizes, self._most = sorted(size for size in sizes if size <= most), most
        self.step_cost, self._interval = step_cost, interval

    def of(
        self, due: Sequence[Request], waiting: RequestQueue, num_slots: int, most_drafts: int
    ) -> int:
        """Returns the most tokens of a step whose requests verify `most_drafts` each.

        due: running requests. num_slots: for requests of `waiting`.
        """
        fits = len(waiting) <= num_slots
        if fits and not self.step_cost:
            return self._most
        counts = [request.num_missing for request in due]
        lengths = [request.num_tokens for request in waiting.first(num_slots)]
        if interval := self._interval:
            pairs = zip(counts, due, strict=True)
            counts = [min(n, interval - r.num_computed % interval) for n, r in pairs]
            lengths = [min(n, interval) for n in lengths]
        num_due = sum(counts) + sum(lengths)
        num_drafts = sum(min(most_drafts, request.num_drafts) for request in due)
        sizes = counts.count(1) + num_drafts, num_due + num_drafts
        return self.least_padded(*sizes) if fits else self.spread(*sizes)

    def spread(self, num_decodes: int, num_due: int) -> int:
        """Returns the least size that holds all decodes and one of `STEPS` parts of other tokens.

        num_decodes: requests that are due one token, and their drafts. num_due: all tokens that
        could be computed, those of new requests with a slot included.
        """
        least = num_decodes + -(-(num_due - num_decodes) // STEPS)
        return next((size for size in self._sizes if size >= least), self._most)

    def least_padded(self, num_decodes: int, num_due: int) -> int:
        """Returns what `spread` does where no request waits for another one's slot."""
        sizes = tuple(size for size in self._sizes if size > num_decodes)
        if not sizes or num_decodes >= num_due:
            return self._most
        return -_cut(sizes, self.step_cost, num_due)[1]


@functools.lru_cache(maxsize=4096)
def _cut(sizes: tuple[int, ...], step_cost: int, num_tokens: int) -> tuple[int, int]:
    """Returns what steps of some `sizes` cost that hold so many tokens, and less the first's."""
    if not num_tokens:
        return 0, 0
    found = [(size + step_cost, -size) for size in sizes if size >= num_tokens][:1]
    for size in sizes:
        num, rest = divmod(num_tokens, size)
        if num:
            found.append((num * (size + step_cost) + _cut(sizes, step_cost, rest)[0], -size))
    return min(found)
