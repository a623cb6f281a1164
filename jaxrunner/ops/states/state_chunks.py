"""The state update of rows of many tokens: kernels, for the rules that they know."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from jaxrunner.indexing import find_rows, take
from jaxrunner.kernels_pallas.states import delta_chunks, state_chunks
from jaxrunner.kernels_pallas.states.delta_chunks import Chunks
from jaxrunner.kernels_pallas.states.state_chunks import CHUNK, Rows, Tokens
from jaxrunner.model import Recurrence
from jaxrunner.operation import Operation
from jaxrunner.ops.states import recurrence, state_space
from jaxrunner.ops.states.state_rows import StateRows
from jaxrunner.ops.states.state_steps import AXES
from jaxrunner.types import Array


def long_rows(
    rule: Recurrence, rows: StateRows, inputs: Any, waiting: Any, states: Array, out: Array,
    *, interpret: Any = None,
) -> tuple[Array, Array]:  # fmt: skip
    """Does what plain JAX does with long rows, each state read and written once.

    inputs and out: `CHUNK` tokens longer than the rows.
    """
    longs = rows.where(~rows.is_short)
    source, place = longs.source(), longs.places[:, 0]
    if waiting is not None:
        states, source = _replayed(rule, longs, waiting, states, source, place)
    chunks, before = _chunks(longs, out.shape[0] - CHUNK)
    tokens, beta = _tokens(rule, chunks, inputs)
    if beta is not None:
        given = tokens.value, tokens.key, tokens.total, beta
        value, moved = delta_chunks.delta_chunks(chunks, *given, interpret=interpret)
        tokens = tokens._replace(value=value, moved=moved)
    where = Rows(source, place, longs.start, longs.num, before)
    axis = AXES[rule.step]
    return state_chunks.state_chunks(states, where, tokens, out, axis=axis, interpret=interpret)


def _replayed(
    rule: Recurrence, rows: StateRows, waiting: Any, states: Array, source: Array, place: Array
) -> tuple[Array, Array]:
    """Returns states and where those before each row are, once rows have taken in what waits for
    them: in the places that they write anyway."""
    num = rows.where(rows.waiting > 0).num
    row = jnp.where(num > 0, jnp.arange(num.shape[0]), num.shape[0])
    place = jnp.where(num > 0, place, rows.nowhere)

    def run(states: Array) -> Array:
        begun = take(states, source).astype(jnp.float32)
        begun = recurrence.replayed(rule, waiting, rows.waiting, states.dtype, row, begun)
        return states.at[place].set(begun.astype(states.dtype), mode="drop")

    states = jax.lax.cond((num > 0).any(), run, lambda states: states, states)
    return states, jnp.where(num > 0, place, source)


def _chunks(rows: StateRows, num_tokens: int) -> tuple[Chunks, Array]:
    """Returns the chunks of rows, one row's behind another's, at most as many as there can be, and
    how many are before each row's, [B]."""
    B, least = rows.num.shape[0], 2 + rows.shape[1]  # tokens of a long row
    most = num_tokens // CHUNK + min(B, num_tokens // least)
    num_chunks = -(-rows.num // CHUNK)
    ends = jnp.cumsum(num_chunks)
    before, chunk = ends - num_chunks, jnp.arange(most, dtype=jnp.int32)
    row = find_rows(ends, chunk)
    nth = (chunk - take(before, row)) * CHUNK
    num = jnp.clip(take(rows.num, row) - nth, 0, CHUNK)
    return Chunks(take(rows.start, row) + nth, jnp.where(row < B, num, 0)), before


def _tokens(rule: Recurrence, chunks: Chunks, inputs: Any) -> tuple[Tokens, Array | None]:
    """Returns what tokens bring in the kernels' words, and beta of a delta rule, by chunk."""

    def by_chunk(x: Array) -> Array:
        nth = jnp.arange(CHUNK)[None]
        token = jnp.where(nth < chunks.num[:, None], chunks.first[:, None] + nth, x.shape[0])
        return take(x, token).swapaxes(1, 2)

    total = jnp.cumsum(by_chunk(inputs.decay), 2)
    if rule.step is state_space.step:
        return Tokens(inputs.x, inputs.b, inputs.c, total), None
    return Tokens(inputs.v, inputs.k, inputs.q, total), by_chunk(inputs.beta)


def _refuses(
    rule: Recurrence, rows: StateRows, inputs: Any, waiting: Any, states: Array, out: Array
) -> str | None:
    if rule.step not in AXES:
        return "wants the rule of a state space or a gated delta net"
    if rule.chunk_size != CHUNK:
        return f"wants chunks of {CHUNK} tokens, got {rule.chunk_size}"
    B, T = rows.num.shape[0], out.shape[0]
    one: Any = jax.ShapeDtypeStruct((T // CHUNK + B,), jnp.int32)
    tokens, beta = jax.eval_shape(functools.partial(_tokens, rule), Chunks(one, one), inputs)
    if beta is not None:
        if why := delta_chunks.refuses(tokens.value, tokens.key, tokens.total, beta):
            return why
    return state_chunks.refuses(states, tokens, axis=AXES[rule.step])


KERNEL = Operation("state_chunks", long_rows, _refuses)
