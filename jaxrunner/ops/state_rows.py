"""Where the tokens of each row of a step lie, and the state that it carries on."""

from typing import NamedTuple

import jax.numpy as jnp

from jaxrunner.caches.state import StateCache
from jaxrunner.indexing import take
from jaxrunner.types import Array, Batch


class StateRows(NamedTuple):
    """Rows of a step, as layers with states see them."""

    source: Array  # [B], block of the state before it
    block: Array  # [B], of the state behind it; N for a row that computes nothing
    start: Array  # [B], its first token
    num: Array  # [B], its tokens
    is_new: Array  # [B], whether its first token is the first of its request

    def of_rows(self, states: Array) -> Array:
        """Returns the state before each row, [B, ...], given all, [N, ...]; zeros for a new one.

        Whoever had the block before is not read, so that no NaN of his is either.
        """
        old = take(states, self.source)
        shape = (-1, *(1,) * (old.ndim - 1))
        return jnp.where(self.is_new.reshape(shape), jnp.zeros((), old.dtype), old)


def state_rows(batch: Batch, group: int, cache: StateCache) -> StateRows:
    """Returns the rows of a batch, whose states a layer of a cache group keeps."""
    start, B, Q, N = batch.query_start, batch.seq_lens.shape[0], batch.query_len, len(cache.conv)
    num = (batch.row < B).reshape(B, Q).sum(1, dtype=jnp.int32) if Q else start[1:] - start[:-1]
    num = jnp.where(batch.seq_lens > 0, num, 0)
    last = batch.seq_lens - 1
    source, block = (
        jnp.where(num > 0, _block_of(batch.blocks[group], position // cache.S), N)
        for position in (last - num, last)
    )
    return StateRows(source, block, start[:-1], num, batch.seq_lens == num)


def _block_of(table: Array, place: Array) -> Array:
    """Returns the block at a place of each row's table, [B, M]; the first one before that."""
    return jnp.take_along_axis(table, jnp.maximum(place, 0)[:, None], 1)[:, 0]
