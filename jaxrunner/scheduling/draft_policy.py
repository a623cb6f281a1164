"""Adaptive drafts: chooses the number of drafts that gives the most tokens a second. Knows no JAX.

A step of B requests with K drafts each gives B * (1 + a_1 + ... + a_K) tokens, where a_i is the
share of requests that accept at least i drafts. Shares and times of steps are measured while they
run, times by bucket; now and then the choice that was not made is tried.
"""

from bisect import bisect_left
from collections.abc import Iterable
import time

import numpy as np

from jaxrunner.scheduling.request import SchedulerOutput

PRIOR = 0.7  # assumed chance that a draft is accepted if all before it are
PRIOR_WEIGHT = 8  # requests that the assumption counts as
DECAY = 0.99  # weight of earlier acceptance, for each step that verifies drafts
NUM_TRIALS = 3  # steps after which a time counts as known
DRIFT = 1.01  # growth of the least time, for each step that takes longer
MARGIN = 1.02  # ratio of tokens a second at which the choice changes
PERIOD = 256  # steps of a size from one trial of the other choice to the next
NUM_TRIED = 2  # steps of a trial: one proposes drafts, the next verifies them


class DraftPolicy:
    """Chooses between no drafts and some for each size of a decode step."""

    def __init__(self, buckets: Iterable[tuple[int, int]]):
        """buckets: the requests, and drafts of each, of decode steps; the fewer come first."""
        rows: dict[int, list[int]] = {}
        for num_rows, num_drafts in buckets:
            rows.setdefault(num_drafts, []).append(num_rows)
        self._rows = dict(sorted(rows.items()))
        K = max(self._rows)
        self._verified = np.full(K, float(PRIOR_WEIGHT))  # by position, as those accepted
        self._accepted = PRIOR_WEIGHT * PRIOR ** np.arange(1, K + 1)
        self._seconds: dict[tuple[int, int], tuple[int, float]] = {}  # number of steps, time of one
        self._chosen: dict[int, int] = {}  # by the requests of the bucket without drafts
        self._turns: dict[int, int] = {}
        self._read_at = 0.0

    def choose(self, num_rows: int) -> int:
        """Returns the drafts that a step of `num_rows` requests should verify and propose."""
        sizes = {k: bucket for k in self._rows if (bucket := self._bucket(k, num_rows))}
        least = min(sizes.values(), default=0)
        sizes = {k: bucket for k, bucket in sizes.items() if bucket == least}
        if len(sizes) < 2:
            return next(iter(sizes), 0)
        for k in sorted(sizes, reverse=True):
            if self._seconds.get((k, sizes[k]), (0, 0))[0] < NUM_TRIALS:
                return k
        size = sizes[min(sizes)]
        turn = self._turns[size] = self._turns.get(size, 0) + 1
        rates = {k: self.tokens_of_a_step(k) / self._seconds[k, sizes[k]][1] for k in sizes}
        best, last = max(rates, key=rates.__getitem__), self._chosen.get(size)
        if last is None or rates[best] > MARGIN * rates[last]:
            self._chosen[size] = last = best
        if turn % PERIOD < NUM_TRIED:
            return next(k for k in sizes if k != last)
        return last

    def tokens_of_a_step(self, num_drafts: int) -> float:
        """Returns the tokens that a step is expected to give each request."""
        shares = self._accepted[:num_drafts] / self._verified[:num_drafts]
        return 1 + float(shares.sum())

    def observe(
        self, output: SchedulerOutput, launched_at: float, drafts: np.ndarray | None
    ) -> None:
        """Measures a step that was just read.

        launched_at: of `time.perf_counter`.
        drafts: `StepOutput.drafts`, [B, 3 + K]. A step that was to verify drafts and had none
            counts as one that accepted none.
        """
        began, self._read_at = max(launched_at, self._read_at), time.perf_counter()
        if drafts is not None:
            verified, _, _, *accepted = drafts.sum(0).tolist()
            if verified:
                most = max(output.num_drafts.values())  # drafts behind these were not verified
                for counts, new in ((self._verified, verified), (self._accepted, accepted[:most])):
                    counts[:most] = DECAY * counts[:most] + new
        K, counts = output.num_proposed, output.num_scheduled_tokens
        if output.scheduled_new_reqs or max(counts.values()) > output.num_steps * (1 + K):
            return  # it computes prompts
        if bucket := self._bucket(K, output.num_rows):
            self._take_time(K, bucket, (self._read_at - began) / output.num_steps)

    def _take_time(self, num_drafts: int, bucket: int, seconds: float) -> None:
        """Keeps the least recent time: longer ones include pauses of the host."""
        count, least = self._seconds.get((num_drafts, bucket), (0, seconds))
        self._seconds[num_drafts, bucket] = count + 1, min(seconds, DRIFT * least)

    def _bucket(self, num_drafts: int, num_rows: int) -> int:
        """Returns the requests of the smallest bucket that holds so many; 0 where none does."""
        rows = self._rows.get(num_drafts, [])
        at = bisect_left(rows, num_rows)
        return rows[at] if at < len(rows) else 0
