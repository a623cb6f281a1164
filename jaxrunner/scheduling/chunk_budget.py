"""The token budget of a step, chosen among the compiled sizes to reduce padding.

While more requests wait than there are slots, few prompts start in a step, and most of its size
would be padding. So prefills wait some steps until they fill a size, and then fill it exactly.
Otherwise padding matters on devices with few cores: a prompt is cut into the steps that take the
least time together.
"""

from collections import Counter
from collections.abc import Sequence
import functools

from jaxrunner.scheduling.request import Request
from jaxrunner.scheduling.request_queue import RequestQueue

MAX_HELD = 4  # the most steps that a prefill waits
WORTH, ENOUGH = 3.0, 1.5  # least size over the number of decodes, at once and after waiting


class ChunkBudget:
    """Chooses each step's tokens. Of four policies simulated on one mixed load (512 requests of
    32 to 1024 tokens, answers of 32 to 512, 256 at a time) this one padded least."""

    def __init__(self, sizes: Sequence[int], most: int, step_cost: int = 0, interval: int = 0):
        """sizes: padded sizes of steps with a prefill; most: tokens of any step.
        step_cost: fixed time of a step, in tokens; 0 where padding is free.
        interval: tokens between checkpoints of states, where chunks end; 0 for none.
        """
        self._sizes, self._most = sorted(size for size in sizes if size <= most), most
        self.step_cost, self._interval = step_cost, interval
        # Steps that a prefill has waited, by turn: a step of another turn neither ends nor counts.
        self._num_held = Counter[int]()

    def of(
        self, due: Sequence[Request], waiting: RequestQueue, num_slots: int, most_drafts: int,
        *, turn: int = 0,
    ) -> int:  # fmt: skip
        """Returns the most tokens of a step whose requests verify `most_drafts` each.

        due: running requests. num_slots: for requests of `waiting`.
        turn: of a pipeline's steps; those of another turn are of other requests.
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
        return self.least_padded(*sizes) if fits else self.next(*sizes, turn)

    def next(self, num_decodes: int, num_due: int, turn: int = 0) -> int:
        """Returns the most tokens of the next step.

        num_decodes: requests that are due one token, and their drafts. num_due: all tokens that
        could be computed, those of new requests with a slot included.
        """
        size = max((size for size in self._sizes if size <= num_due), default=0)
        hold = num_decodes < num_due and size < WORTH * num_decodes
        hold = hold and self._num_held[turn] < MAX_HELD
        self._num_held[turn] = self._num_held[turn] + 1 if hold else 0
        if hold:
            return min(num_decodes, self._most)  # with drafts they may be more
        return size if size > ENOUGH * num_decodes else self._most

    def least_padded(self, num_decodes: int, num_due: int) -> int:
        """Returns what `next` does where no request waits for another one's slot."""
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
