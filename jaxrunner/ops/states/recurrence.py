"""Carries the matrices of requests on over the rows of a step, as a `Recurrence` says.

Rows of 1 + K tokens at most, which decode and verify drafts, run side by side, a token after the
other, once the drafts of the step before that stand were replayed. Longer rows run by chunks: the
matrices of a chunk's end are those that the next one begins with.
"""

from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrunner.caches.state import StateCache
from jaxrunner.indexing import find_rows, take
from jaxrunner.model import Recurrence
from jaxrunner.operation import Note, Operation, run_first, unnoted
from jaxrunner.ops import replay
from jaxrunner.ops.states.state_rows import StateRows, counted, put, state_rows
from jaxrunner.types import Array, Batch


class Candidates(NamedTuple):
    """The implementations that may run rows; the last of each serves all."""

    short: tuple[Operation, ...]  # rows of 1 + K tokens at most
    long: tuple[Operation, ...]  # others
    padding: int = 0  # tokens behind the last one that those of `long` may read beside longer rows


def recur(
    candidates: Candidates, batch: Batch, rule: Recurrence, inputs: Any, cache: StateCache,
    group: int, *, note: Note = unnoted,
) -> tuple[Array, StateCache]:  # fmt: skip
    """Returns what each token makes of the matrices, [T, ...], zeros for padding; and the cache."""
    assert cache.recurrent is not None, "a kind without matrices"
    rows, states, drafted = state_rows(batch, group, cache), cache.recurrent, cache.drafted
    query_len = batch.query_len if batch.query_len <= 1 + rows.shape[1] else 0
    waiting = None if drafted is None else _waiting(rule, rows, inputs, drafted)
    T, padding = batch.row.shape[0], 0 if query_len else candidates.padding
    if padding:  # all read the longer arrays, so that XLA makes no others
        inputs = jax.tree.map(
            lambda x: jnp.pad(x, [(0, padding)] + [(0, 0)] * (x.ndim - 1)), inputs
        )
    args = rule, rows, inputs, waiting, states, query_len
    states, out = run_first("recur", candidates.short, *args, note=note)
    if not query_len:
        args = rule, rows, inputs, waiting, states, out
        states, out = run_first("recur by chunks", candidates.long, *args, note=note)
    if drafted is not None:
        drafted = put(drafted, rows, rows.drafted(replay.packed(rule, inputs)))
    count = counted(rows, cache.count)
    return out[:T], replace(cache, recurrent=states, drafted=drafted, count=count)


def _waiting(rule: Recurrence, rows: StateRows, inputs: Any, drafted: Array) -> Any:
    """Returns the inputs that the state before each row has not taken in, [B, K, ...]; zeros behind
    them, which change nothing."""
    is_there = jnp.arange(drafted.shape[1])[None] < rows.waiting[:, None]
    kept = jnp.where(is_there[:, :, None], take(drafted, rows.source()), 0)
    return replay.unpacked(rule, kept, inputs)


def _short_rows(
    rule: Recurrence, rows: StateRows, inputs: Any, waiting: Any, states: Array, query_len: int
) -> tuple[Array, Array]:
    """Runs rows of 1 + K tokens at most, which may be drafts, and keeps the state behind the first.

    waiting: [B, K, ...], inputs that come before; None where K is 0. query_len: places that each
    row has for its tokens, if there are as many and no longer row.
    Returns all states, [N, ...], and what tokens make, [T, ...].
    """
    T, K = jax.tree.leaves(inputs)[0].shape[0], rows.shape[1]

    def advance(state: Array, token: Any) -> tuple[Array, Array]:
        state, made = jax.vmap(rule.step)(state, token)
        return state.astype(states.dtype).astype(jnp.float32), made  # as if each token had a step

    state = take(states, rows.source(rows.is_short)).astype(jnp.float32)
    for k in range(K):
        state, _ = advance(state, jax.tree.map(lambda x, k=k: x[:, k], waiting))
    out = None
    for j in range(1 + K):
        token = jnp.where(rows.is_short & (rows.num > j), rows.start + j, T)
        state, made = advance(state, _taken(inputs, token))
        if out is None:
            states = put(states, rows.where(rows.is_short), state)
            out = jnp.zeros((T, *made.shape[1:]), made.dtype)
        out = out.at[token].set(made, mode="drop")
    assert out is not None, "a row has a token at least"
    return states, out


def long_rows(
    rule: Recurrence, rows: StateRows, inputs: Any, waiting: Any, states: Array, out: Array,
    *, at_once: int = 4,
) -> tuple[Array, Array]:  # fmt: skip
    """Runs rows of over 1 + K tokens. Returns all states, [N, ...], and what tokens make.

    Their chunks, one row's behind another's, are computed several at once, `at_once`, whose
    matrices before and behind lie in memory; the matrices alone go from chunk to chunk.
    """
    T, C, is_long = out.shape[0], rule.chunk_size, ~rows.is_short
    L = min(at_once, -(-T // C))
    num_chunks = jnp.where(is_long, -(-rows.num // C), 0)
    ends = jnp.cumsum(num_chunks)
    sources, places = rows.source(is_long), rows.where(is_long).places[:, 0]

    def several(i: Array, carried: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        states, out, state = carried
        chunk = i * L + jnp.arange(L)
        row = find_rows(ends, chunk)  # the number of rows for a chunk that there is not
        nth = chunk - take(ends - num_chunks, row)
        offset = nth[:, None] * C + jnp.arange(C)[None]
        is_there = offset < take(rows.num, row)[:, None]
        tokens = jnp.where(is_there, take(rows.start, row)[:, None] + offset, T)
        is_last = is_there[:, 0] & (nth + 1 == take(num_chunks, row))
        is_first = is_there[:, 0] & (nth == 0)
        begins = jnp.where(is_first, row, len(ends))
        begun = take(states, sources.at[begins].get(mode="fill", fill_value=rows.nowhere))
        begun = begun.astype(jnp.float32)
        if waiting is not None:
            begun = replayed(rule, waiting, rows.waiting, states.dtype, begins, begun)
        chunks = jax.vmap(rule.within)(_taken(inputs, tokens))

        def one(state: Array, of: Any) -> tuple[Array, tuple[Array, Any]]:
            is_first, begun, chunk = of
            state, told = rule.carry(jnp.where(is_first, begun, state), chunk)
            state = state.astype(states.dtype).astype(jnp.float32)  # as if each chunk had a step
            return state, (state, told)

        state, (behind, told) = jax.lax.scan(one, state, (is_first, begun, chunks), unroll=L)
        made = jax.vmap(rule.read)(chunks, told)
        place = jnp.where(is_last, take(places, row), rows.nowhere)
        states = states.at[place].set(behind.astype(states.dtype), mode="drop")
        return states, out.at[tokens].set(made, mode="drop"), state

    start = jnp.zeros(states.shape[1:], jnp.float32)
    num = -(-ends[-1] // L)
    states, out, _ = jax.lax.fori_loop(0, num, several, (states, out, start))
    return states, out


PLAIN = Candidates((Operation("plain JAX", _short_rows),), (Operation("plain JAX", long_rows),))


def replayed(
    rule: Recurrence, waiting: Any, num: Array, dtype: Any, row: Array, states: Array
) -> Array:
    """Returns states, [L, ...], behind the inputs that wait for these rows' first chunks.

    num: [B], how many there are of each row.
    """

    def run(states: Array) -> Array:
        for k in range(jax.tree.leaves(waiting)[0].shape[1]):
            token = jax.tree.map(lambda x, k=k: take(x[:, k], row), waiting)
            states, _ = jax.vmap(rule.step)(states, token)
            states = states.astype(dtype).astype(jnp.float32)
        return states

    return jax.lax.cond(take(num, row).any(), run, lambda states: states, states)


def trained(
    batch_size: int, rule: Recurrence, inputs: Any, cache: Any, group: int
) -> tuple[Array, Any]:
    """Returns what each token makes of matrices that begin as zeros, and the cache.

    inputs: [T, ...], `batch_size` equal sequences. It has gradients.
    """
    C, T = rule.chunk_size, jax.tree.leaves(inputs)[0].shape[0]
    length = T // batch_size
    padding = -length % C

    def chunks(x: Array) -> Array:
        x = x.reshape(batch_size, length, *x.shape[1:])
        x = jnp.pad(x, ((0, 0), (0, padding), *((0, 0),) * (x.ndim - 2)))
        return x.reshape(batch_size, -1, C, *x.shape[2:])

    def run(inputs: Any) -> Array:
        chunks = jax.vmap(rule.within)(inputs)
        _, told = jax.lax.scan(rule.carry, jnp.zeros(rule.matrices, jnp.float32), chunks)
        return jax.vmap(rule.read)(chunks, told)

    made = jax.vmap(run)(jax.tree.map(chunks, inputs))
    made = made.reshape(batch_size, length + padding, *made.shape[3:])[:, :length]
    return made.reshape(T, *made.shape[2:]), cache


def _taken(inputs: Any, tokens: Array) -> Any:
    """Returns the inputs of some tokens, [*tokens, ...]; zeros where one is T."""
    return jax.tree.map(lambda x: take(x, tokens), inputs)
