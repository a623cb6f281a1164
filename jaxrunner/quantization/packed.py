"""Unpacks numbers of few bits from the 32-bit words of checkpoints. Knows no JAX."""

import numpy as np

WORD = 32


def unpacked(words: np.ndarray, bits: int, axis: int, order: tuple[int, ...] = ()) -> np.ndarray:
    """Returns the numbers in int32 words as uint8, n words along `axis` as n * 32 / bits.

    order: which place of a word, from the lowest bits up, each number in turn has; all in turn
    where it is empty.
    """
    places = np.asarray(order or range(WORD // bits), np.uint32) * np.uint32(bits)
    words = np.moveaxis(words, axis, -1).astype(np.int32, copy=False).view(np.uint32)
    numbers = (words[..., None] >> places & np.uint32((1 << bits) - 1)).astype(np.uint8)
    return np.moveaxis(numbers.reshape(*words.shape[:-1], -1), -1, axis)
