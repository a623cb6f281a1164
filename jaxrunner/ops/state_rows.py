"""Where the tokens of each row of a step lie, and the states that it goes on from and leaves."""

from typing import NamedTuple

import jax.numpy as jnp

from jaxrunner.caches.state import StateCache
from jaxrunner.indexing import take
from jaxrunner.types import Array, Batch


class StateRows(NamedTuple):
    """Rows of a step, as layers with states see them. States have indices, block * J + column."""

    start: Array  # [B], its first token
    num: Array  # [B], its tokens
    first: Array  # [B], position of its first token
    blocks: Array  # [B, M]
    shape: tuple[int, int, int]  # N, J and S of the cache

    @property
    def nowhere(self) -> int:
        """The index of no state."""
        return self.shape[0] * self.shape[1]

    def place(self, num: Array) -> Array:
        """Returns where the state behind the first `num` tokens of each row is, [B].

        A row without tokens has none. Those behind each of its first J tokens have places of their
        own, so that the next step goes on from the last of its drafts that stands.
        """
        (_, J, S), count = self.shape, self.first + num
        at = jnp.maximum(count - 1, 0) // S
        block = jnp.take_along_axis(self.blocks, at[:, None], 1)[:, 0]
        return jnp.where(self.num > 0, block * J + count % J, self.nowhere)

    def source(self, wanted: Array | bool = True) -> Array:
        """Returns where the state before each row is, [B]; nowhere for new ones and unwanted ones.

        Whoever had the block before is not read, so that no NaN of his is either.
        """
        place = self.place(jnp.zeros_like(self.num))
        return jnp.where(wanted & (self.first > 0), place, self.nowhere)

    def before(self, states: Array, wanted: Array | bool = True) -> Array:
        """Returns the state before each row, [B, ...], of [N * J, ...]; zeros where it has none."""
        return take(states, self.source(wanted))


def state_rows(batch: Batch, group: int, cache: StateCache) -> StateRows:
    """Returns the rows of a batch, whose states a layer of a cache group keeps."""
    start, B, Q = batch.query_start, batch.seq_lens.shape[0], batch.query_len
    num = (batch.row < B).reshape(B, Q).sum(1, dtype=jnp.int32) if Q else start[1:] - start[:-1]
    num = jnp.where(batch.seq_lens > 0, num, 0)
    N, J = cache.conv.shape[:2]
    return StateRows(start[:-1], num, batch.seq_lens - num, batch.blocks[group], (N, J, cache.S))


def flat(states: Array) -> Array:
    """Returns all states of a cache by their indices: [N, J, ...] -> [N * J, ...]."""
    return states.reshape(-1, *states.shape[2:])
