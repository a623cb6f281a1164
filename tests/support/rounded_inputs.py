"""Inputs of products, rounded by the definition of a format."""

from typing import Any

import numpy as np

from tests.support.quantized_formats import E4M3


def rounded(x: np.ndarray, activation: Any, scale: Any) -> np.ndarray:
    """Returns inputs, [T, inputs], as the format's definition rounds them, in float64."""
    x = np.asarray(x, np.float32).reshape(len(x), -1, activation.group or x.shape[1])
    most = dict(int8=127, float8_e4m3fn=448)[activation.code]
    if scale is None:
        scale = np.abs(x).max(-1, keepdims=True) / np.float32(most)
    numbers = np.clip(x / scale, -most - (activation.code == "int8"), most)
    numbers = np.round(numbers) if activation.code == "int8" else numbers.astype(E4M3)
    return (numbers.astype(np.float64) * scale).reshape(len(x), -1)
