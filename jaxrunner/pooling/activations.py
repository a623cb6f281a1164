"""The activations that run on pooled arrays on the host. Knows no JAX."""

from collections.abc import Callable

import numpy as np


def normalize(x: np.ndarray) -> np.ndarray:
    """Returns x, [..., X], with a length of one; zeros stay."""
    length = np.sqrt((x.astype(np.float64) ** 2).sum(-1, keepdims=True))
    return (x / np.maximum(length, 1e-12)).astype(np.float32)


def softmax(x: np.ndarray) -> np.ndarray:
    """Returns how likely each class of x, [..., X], is, where one is right."""
    x = np.exp(x.astype(np.float64) - x.max(-1, keepdims=True))
    return (x / x.sum(-1, keepdims=True)).astype(np.float32)


def sigmoid(x: np.ndarray) -> np.ndarray:
    """Returns how likely each class of x is by itself."""
    return (0.5 * (1 + np.tanh(0.5 * x.astype(np.float64)))).astype(np.float32)


def identity(x: np.ndarray) -> np.ndarray:
    """Returns x."""
    return x


ACTIVATIONS: dict[str, Callable[[np.ndarray], np.ndarray]] = dict(
    normalize=normalize, softmax=softmax, sigmoid=sigmoid, identity=identity
)
