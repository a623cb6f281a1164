"""A test of draws against their distribution."""

import numpy as np


def excess(seen: np.ndarray, expected: np.ndarray) -> float:
    """Returns how far chi-square is above its mean, in standard deviations."""
    assert expected.min() > 5 and abs(expected.sum() - seen.sum()) < 1
    freedom = seen.size - 1
    return (((seen - expected) ** 2 / expected).sum() - freedom) / np.sqrt(2 * freedom)
