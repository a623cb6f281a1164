"""Where the tokens of each row of a step lie, and the states that it goes on from and leaves."""

from typing import NamedTuple

import jax.numpy as jnp

from jaxrunner.caches.state import StateCache
from jaxrunner.indexing import take
from jaxrunner.types import Array, Batch


class StateRows(NamedTuple):
    """Rows of a step, as layers with states see them. A state has the index of its block.

    Rows of at most 1 + K tokens are short: they may verify drafts, and leave the state behind their
    first token, with inputs of the others. Longer ones leave the state behind all tokens.
    """

    start: Array  # [B], its first token
    num: Array  # [B], its tokens
    first: Array  # [B], position of its first token
    blocks: Array  # [B, M]
    waiting: Array  # [B], tokens before it whose inputs its state has not taken in
    shape: tuple[int, int, int]  # N, K and S of the cache

    @property
    def nowhere(self) -> int:
        """The index of no state."""
        return self.shape[0]

    @property
    def is_short(self) -> Array:
        """Whether a row may verify drafts, [B]."""
        return self.num <= 1 + self.shape[1]

    def where(self, wanted: Array) -> "StateRows":
        """Returns the rows, those that are not wanted without tokens."""
        return self._replace(num=jnp.where(wanted, self.num, 0))

    @property
    def taken(self) -> Array:
        """The tokens of each row that the state which it leaves is behind, [B]."""
        return jnp.where(self.is_short, jnp.minimum(self.num, 1), self.num)

    @property
    def places(self) -> Array:
        """Where each row leaves its state, [B, P]; nowhere for what is not wanted.

        A row whose tokens lie in several blocks leaves it in each of them: the next one goes on
        from the last draft that stands, and others from the end of a block.
        """
        _, K, S = self.shape
        num_places = 1 + (-(-K // S) if self.blocks.shape[1] > 1 else 0)
        least = jnp.where(self.is_short, 1, self.num)
        blocks = [
            self._block_of(jnp.minimum(least + i * S, self.num) - 1) for i in range(num_places)
        ]
        before = [jnp.full_like(blocks[0], -1), *blocks]
        wanted = [(self.num > 0) & (b != old) for b, old in zip(blocks, before, strict=False)]
        pairs = zip(wanted, blocks, strict=True)
        return jnp.stack([jnp.where(w, b, self.nowhere) for w, b in pairs], 1)

    def drafted(self, x: Array) -> Array:
        """Returns what the tokens behind the first of each row have of x, [T, ...]: [B, K, ...].

        They are 0 of longer rows, and of tokens that a row does not have.
        """
        nth = 1 + jnp.arange(self.shape[1])[None]
        is_there = self.is_short[:, None] & (nth < self.num[:, None])
        return take(x, jnp.where(is_there, self.start[:, None] + nth, x.shape[0]))

    def source(self, wanted: Array | bool = True) -> Array:
        """Returns where the state before each row is, [B]; nowhere for new ones and unwanted ones.

        Whoever had the block before is not read, so that no NaN of his is either.
        """
        goes_on = (self.num > 0) & (self.first > 0)
        return jnp.where(wanted & goes_on, self._block_of(-1), self.nowhere)

    def _block_of(self, nth: Array | int) -> Array:
        """Returns the block of each row's token `nth`, [B]."""
        at = jnp.maximum(self.first + nth, 0) // self.shape[2]
        return jnp.take_along_axis(self.blocks, at[:, None], 1)[:, 0]


def state_rows(batch: Batch, group: int, cache: StateCache) -> StateRows:
    """Returns the rows of a batch, whose states a layer of a cache group keeps."""
    start, B, Q = batch.query_start, batch.seq_lens.shape[0], batch.query_len
    num = (batch.row < B).reshape(B, Q).sum(1, dtype=jnp.int32) if Q else start[1:] - start[:-1]
    num = jnp.where(batch.seq_lens > 0, num, 0)
    N, K = cache.conv.shape[0], 0 if cache.drafted_conv is None else cache.drafted_conv.shape[1]
    first, none = batch.seq_lens - num, jnp.zeros_like(num)
    rows = StateRows(start[:-1], num, first, batch.blocks[group], none, (N, K, cache.S))
    if cache.count is None:
        return rows
    source = rows.source()
    waiting = jnp.where(source < N, first - take(cache.count, source), 0)
    return rows._replace(waiting=waiting)


def put(states: Array, rows: StateRows, kept: Array) -> Array:
    """Returns states, [N, ...], with what each row leaves, [B, ...], in its places."""
    for place in rows.places.T:
        given = kept.astype(states.dtype)
        states = states.at[place].set(given, mode="drop", unique_indices=True)
    return states


def counted(rows: StateRows, count: Array | None) -> Array | None:
    """Returns the tokens that each state of a cache is behind, [N], once these rows left theirs."""
    if count is None:
        return None
    return put(count, rows, rows.first + rows.taken)
