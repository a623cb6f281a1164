"""Steps of rows with states, and how kernels of states are run and lowered."""

from typing import Any

import jax
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np

from jaxrunner.types import Batch, Inputs

pallas: Any = plgpu  # the interpreter is in newer ones alone


def batch_of(rows: list[tuple[int, int, int]], T: int, B: int, query_len: int = 0) -> Batch:
    """Returns a step of rows of (block, first position, tokens), padded."""
    blocks = np.zeros((B, 1), np.int32)
    blocks[: len(rows), 0] = [block for block, _, _ in rows]
    nums = np.array([num for *_, num in rows] + [0] * (B - len(rows)), np.int32)
    seq_lens = np.zeros(B, np.int32)
    seq_lens[: len(rows)] = [first + num for _, first, num in rows]
    width = np.full(B, query_len) if query_len else nums
    start = np.concatenate([[0], np.cumsum(width)]).astype(np.int32)
    row = np.full(T, B, np.int32)
    for i, num in enumerate(nums):
        row[start[i] : start[i] + num] = i
    none = jnp.zeros(T, jnp.int32)
    return Batch(
        inputs=Inputs(none, none, none), row=jnp.asarray(row), slot=none, cache_index=(),
        query_start=jnp.asarray(start), seq_lens=jnp.asarray(seq_lens),
        blocks=(jnp.asarray(blocks),), logits_indices=none, query_len=query_len,
    )  # fmt: skip


def interpreted(*, detect_races: bool = True) -> Any:
    """Returns how kernels run here: on a GPU as they are.

    detect_races: JAX 0.12 raises where threads use memory without order, 0.11 says so.
    """
    if jax.default_backend() != "cpu":
        return None
    return pallas.InterpretGPUParams(detect_races=detect_races)


def sized(*sizes: int, dtype: Any = jnp.float32) -> Any:
    """Returns the shape and dtype of an array, which is never made."""
    return jax.ShapeDtypeStruct(sizes, jnp.dtype(dtype))
