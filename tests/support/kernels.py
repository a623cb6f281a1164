"""Batches that kernels run on, and how far what they give is from an oracle."""

import jax.numpy as jnp
import numpy as np

from jaxrunner.kernels_pallas.cases.catalog import Case
from jaxrunner.types import Batch, Inputs
from tests.support import oracles

BOUND = dict(bfloat16=6e-3, float16=1e-3, float32=1e-6)  # of ||out - oracle|| / ||oracle||


def case_id(case: Case) -> str:
    """Returns the name of a case, with its kernel."""
    return f"{case.kernel}: {case.name}"


def error(got, want: np.ndarray) -> float:
    """Returns ||got - want|| / ||want||, and holds that all is finite."""
    got = oracles.wide(got)
    assert np.isfinite(got).all()
    return float(np.linalg.norm(got - want) / max(np.linalg.norm(want), 1e-30))


def batch_of(
    T: int, starts, lens, blocks, cache_shape: tuple[int, ...], *, query_len: int = 0, num=None
) -> Batch:
    """Lays out rows of which each has its last tokens at starts[b] and behind, padded to T.

    num: how many of its places up to starts[b + 1] have a token, all if None.
    """
    (N, _, S, _), B = cache_shape, len(lens)
    starts, lens, table = (np.asarray(x) for x in (starts, lens, blocks))
    row, positions, at = np.full(T, B), np.zeros(T, np.int64), np.full(T, N * S)
    for b in range(B):
        tokens = np.arange(starts[b], starts[b + 1] if num is None else starts[b] + num[b])
        row[tokens], p = b, lens[b] - len(tokens) + np.arange(len(tokens))
        positions[tokens], at[tokens] = p, table[b, p // S] * S + p % S
    row, positions, at = (jnp.asarray(x, jnp.int32) for x in (row, positions, at))
    return Batch(
        inputs=Inputs(positions, positions, positions),
        row=row,
        slot=row,  # the rows stand in the slots of their numbers
        cache_index=(at,),
        query_start=jnp.asarray(starts, jnp.int32),
        seq_lens=jnp.asarray(lens, jnp.int32),
        blocks=(jnp.clip(blocks, 0, N - 1),),
        logits_indices=jnp.zeros((B, 1), jnp.int32),
        query_len=query_len,
    )
