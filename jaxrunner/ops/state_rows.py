"""Where the tokens of each row of a step lie, and the state that it carries on."""

from typing import NamedTuple

import jax.numpy as jnp

from jaxrunner.indexing import take
from jaxrunner.types import Array, Batch


class StateRows(NamedTuple):
    """Rows of a step, as layers with states see them."""

    block: Array  # [B], of its state; N for a row that computes nothing
    start: Array  # [B], its first token
    num: Array  # [B], its tokens
    is_new: Array  # [B], whether its first token is the first of its request

    def of_rows(self, states: Array) -> Array:
        """Returns the state before each row, [B, ...], given all, [N, ...]; zeros for a new one.

        Whoever had the block before is not read, so that no NaN of his is either.
        """
        old = take(states, self.block)
        shape = (-1, *(1,) * (old.ndim - 1))
        return jnp.where(self.is_new.reshape(shape), jnp.zeros((), old.dtype), old)


def state_rows(batch: Batch, group: int, num_blocks: int) -> StateRows:
    """Returns the rows of a batch, whose states lie in the blocks, N, of a cache group."""
    start, B, Q = batch.query_start, batch.seq_lens.shape[0], batch.query_len
    num = (batch.row < B).reshape(B, Q).sum(1, dtype=jnp.int32) if Q else start[1:] - start[:-1]
    num = jnp.where(batch.seq_lens > 0, num, 0)
    block = jnp.where(num > 0, batch.blocks[group][:, 0], num_blocks)
    return StateRows(block, start[:-1], num, batch.seq_lens == num)
