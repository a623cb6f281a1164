"""The padded sizes that cost the least for some traffic, by the time of a step of each size.

    sizes = plan(llm.engine.runner.traffic[1], interpolate({8: 4.8, 64: 7.0, 256: 16.4}), 5).sizes
    LLM(model, decode_buckets=sizes)

The sizes are the best there are: the least padded time is found by dynamic programming over where
each bucket ends, as for the segments of a one-dimensional clustering.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np


class Plan(NamedTuple):
    """Sizes of buckets, ascending, and what all steps take with them."""

    sizes: tuple[int, ...]
    seconds: float


def plan(steps: Mapping[int, int], seconds: Callable[[int], float], num_buckets: int) -> Plan:
    """Returns the `num_buckets` sizes that take the least time, fewer where there are fewer.

    steps: how many steps there were of each size, such as `ModelRunner.traffic` counts them.
    seconds: what a step of a size takes, not less for a larger one.

    Raises:
      ValueError: there are no steps or no buckets, or a larger size takes less.
    """
    if num_buckets < 1 or not steps:
        raise ValueError(f"plan wants steps and buckets, got {len(steps)} and {num_buckets}")
    sizes = sorted(steps)
    times = np.array([seconds(size) for size in sizes])
    if np.any(np.diff(times) < 0):
        at = int(np.argmin(np.diff(times)))
        raise ValueError(
            f"a step of {sizes[at + 1]} must not take less than one of {sizes[at]}, "
            f"got {times[at + 1]} and {times[at]}: smooth the times"
        )
    upto = np.concatenate([[0], np.cumsum([steps[size] for size in sizes])])
    # best[j]: the least time of the first j sizes in as many buckets as rounds have passed.
    best, choices = np.where(upto > 0, np.inf, 0.0), []
    for _ in range(min(num_buckets, len(sizes))):
        # A bucket that ends with size j - 1 and begins with size i, for each j and i.
        costs = best[None] + np.where(
            upto[:, None] > upto[None],
            np.append(0, times)[:, None] * (upto[:, None] - upto),
            np.inf,
        )
        choices.append(costs.argmin(1))
        best = np.where(upto > 0, costs.min(1), 0.0)  # 0: later rounds may leave buckets out
    chosen, j = [], len(sizes)
    for choice in reversed(choices):
        if j > 0:
            chosen.append(sizes[j - 1])
            j = int(choice[j])
    return Plan(tuple(reversed(chosen)), float(best[-1]))


def interpolate(times: Mapping[int, float]) -> Callable[[int], float]:
    """Returns a function of sizes from times measured at some: linear between and beyond them.

    Raises:
      ValueError: fewer than two sizes were measured.
    """
    if len(times) < 2:
        raise ValueError(f"times must be of at least 2 sizes, got {len(times)}")
    xs = np.array(sorted(times), float)
    ys = np.array([times[int(x)] for x in xs])

    def at(size: int) -> float:
        i = int(np.clip(np.searchsorted(xs, size), 1, len(xs) - 1))
        slope = (ys[i] - ys[i - 1]) / (xs[i] - xs[i - 1])
        return float(ys[i - 1] + slope * (size - xs[i - 1]))

    return at
