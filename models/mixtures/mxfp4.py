"""MXFP4: runs of 32 numbers of 4 bits (e2m1) that share a power of two (e8m0). OCP MX 1.0."""

import ml_dtypes
import numpy as np

RUN = 32  # numbers of one scale, two in a byte
# What the lowest three bits mean; the fourth is the sign.
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
VALUES = np.array([*MAGNITUDES, *(-x for x in MAGNITUDES)], ml_dtypes.bfloat16)
BIAS = 127  # of the exponents


def dequantized(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Returns the numbers, [..., n * 32], of blocks, [..., n, 16], and scales, [..., n], uint8.

    In bfloat16, which holds each of them exactly. The low half of a byte comes first.
    """
    pairs = np.stack([VALUES[blocks & 15], VALUES[blocks >> 4]], -1)
    powers = np.ldexp(np.float32(1), scales.astype(np.int32) - BIAS).astype(ml_dtypes.bfloat16)
    runs = np.multiply(pairs.reshape(*scales.shape, RUN), powers[..., None])
    return runs.reshape(*scales.shape[:-1], -1)
