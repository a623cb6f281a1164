"""What a model family is to the rest: its weights, two pure functions, and how to read it."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from jaxrunner.config import ModelConfig
from jaxrunner.types import Array, LayerCache


class AttentionSpec(NamedTuple):
    """What attention of one layer is told when it is traced."""

    group: int  # cache group of the layer
    window: int | None  # keys a token sees, itself included; None for all before it
    scale: float  # of the scores


# (q [T, H, D], k [T, K, D], v [T, K, D], cache, spec) -> (out [T, H, D], cache).
# Stores k and v where serving does, then attends; a trainer passes dense attention and no cache.
Attend = Callable[
    [Array, Array, Array, LayerCache | None, AttentionSpec], tuple[Array, LayerCache | None]
]


class Source(NamedTuple):
    """Where one of our weights lies in a checkpoint.

    `join` makes it of the named tensors; `split` is its inverse. Both see numpy arrays.
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    join: Callable[[list[np.ndarray]], np.ndarray]
    split: Callable[[np.ndarray], list[np.ndarray]]


class Model(NamedTuple):
    """A model family."""

    read: Callable[..., ModelConfig]  # (settings) -> config
    params: type  # pytree of weights, declared by axes
    forward: Callable[..., Any]  # (config, params, kv, inputs, attend) -> hidden [T, E], kv
    logits: Callable[..., Array]  # (config, params, hidden [..., E]) -> [..., V], float32
    sources: Callable[[ModelConfig], Any]  # -> `params` filled with `Source`
