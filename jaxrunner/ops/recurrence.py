"""Carries the matrices of requests on over the rows of a step, as a `Recurrence` says.

Rows of J tokens at most, which decode and verify drafts, run side by side, a token after the other.
Longer rows run a chunk after the other: the matrices of a chunk's end are those that the next one
begins with.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from jaxrunner.caches.state import StateCache
from jaxrunner.indexing import find_rows, take
from jaxrunner.model import Recurrence
from jaxrunner.operation import Note, Operation, run_first, unnoted
from jaxrunner.ops.state_rows import StateRows, flat, state_rows
from jaxrunner.types import Array, Batch


def recur(
    candidates: Iterable[Operation], batch: Batch, rule: Recurrence, inputs: Any,
    cache: StateCache, group: int, *, note: Note = unnoted,
) -> tuple[Array, StateCache]:  # fmt: skip
    """Returns what each token makes of the matrices, [T, ...], zeros for padding; and the cache.

    candidates: of rows of J tokens at most, which `PLAIN` serves all.
    """
    assert cache.recurrent is not None, "a kind without matrices"
    rows, states = state_rows(batch, group, cache), flat(cache.recurrent)
    query_len = batch.query_len if batch.query_len <= rows.shape[1] else 0
    args = rule, rows, inputs, states, query_len
    states, out = run_first("recur", candidates, *args, note=note)
    if not query_len:
        states, out = _long_rows(rule, rows, inputs, states, out)
    return out, replace(cache, recurrent=states.reshape(cache.recurrent.shape))


def _short_rows(
    rule: Recurrence, rows: StateRows, inputs: Any, states: Array, query_len: int
) -> tuple[Array, Array]:
    """Runs rows of J tokens at most, which may be drafts, and keeps the state behind each.

    query_len: places that each row has for its tokens, if there are as many and no longer row.
    Returns all states, [N * J, ...], and what tokens make, [T, ...].
    """
    T, J = jax.tree.leaves(inputs)[0].shape[0], rows.shape[1]
    old = rows.before(states, rows.num <= J).astype(jnp.float32)
    out = None
    for j in range(J):
        here = (rows.num > j) & (rows.num <= J)
        token = jnp.where(here, rows.start + j, T)
        old, made = jax.vmap(rule.step)(old, _taken(inputs, token))
        kept = old.astype(states.dtype)
        old = kept.astype(jnp.float32)  # as if each token had a step
        out = jnp.zeros((T, *made.shape[1:]), made.dtype) if out is None else out
        out = out.at[token].set(made, mode="drop")
        behind = jnp.where(here, rows.place(jnp.full_like(rows.num, j + 1)), rows.nowhere)
        states = states.at[behind].set(kept, mode="drop")
    assert out is not None, "J is 1 at least"
    return states, out


PLAIN = (Operation("plain JAX", _short_rows),)


def _long_rows(
    rule: Recurrence, rows: StateRows, inputs: Any, states: Array, out: Array
) -> tuple[Array, Array]:
    """Runs rows of over J tokens. Returns all states, [N * J, ...], and what tokens make."""
    T, C, J = out.shape[0], rule.chunk_size, rows.shape[1]
    num_chunks = jnp.where(rows.num > J, -(-rows.num // C), 0)
    ends = jnp.cumsum(num_chunks)
    sources, places = rows.place(jnp.zeros_like(rows.num)), rows.place(rows.num)

    def one(i: Array, carried: tuple[Array, Array]) -> tuple[Array, Array]:
        states, out = carried
        i = jnp.asarray(i)  # a number where nothing is compiled
        row = find_rows(ends, i[None])[0]
        nth = i - (ends[row] - num_chunks[row])
        offset = nth * C + jnp.arange(C)
        tokens = jnp.where(offset < rows.num[row], rows.start[row] + offset, T)
        place = places[row]
        old = states[jnp.where(nth == 0, sources[row], place)].astype(jnp.float32)
        old = jnp.where((rows.first[row] == 0) & (nth == 0), 0.0, old)
        new, made = rule.chunk(old, _taken(inputs, tokens))
        states = states.at[place].set(new.astype(states.dtype), mode="drop")
        return states, out.at[tokens].set(made, mode="drop")

    return jax.lax.fori_loop(0, ends[-1], one, (states, out))


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
        return jax.lax.scan(rule.chunk, jnp.zeros(rule.matrices, jnp.float32), inputs)[1]

    made = jax.vmap(run)(jax.tree.map(chunks, inputs))
    made = made.reshape(batch_size, length + padding, *made.shape[3:])[:, :length]
    return made.reshape(T, *made.shape[2:]), cache


def _taken(inputs: Any, tokens: Array) -> Any:
    """Returns the inputs of some tokens, [*tokens, ...]; zeros where one is T."""
    return jax.tree.map(lambda x: take(x, tokens), inputs)
