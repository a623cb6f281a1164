"""Carries the matrices of requests on over the rows of a step, as a `Recurrence` says.

Rows of one token, which decode, run side by side. Longer rows run a chunk after the other: the
matrices of a chunk's end are those that the next one begins with.
"""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from jaxrunner.caches.state import StateCache
from jaxrunner.indexing import find_rows, take
from jaxrunner.model import Recurrence
from jaxrunner.ops.state_rows import StateRows, state_rows
from jaxrunner.types import Array, Batch


def recur(
    batch: Batch, rule: Recurrence, inputs: Any, cache: StateCache, group: int
) -> tuple[Array, StateCache]:
    """Returns what each token makes of the matrices, [T, ...], zeros for padding; and the cache."""
    assert cache.recurrent is not None, "a kind without matrices"
    N, T = cache.recurrent.shape[0], batch.row.shape[0]
    rows = state_rows(batch, group, cache)
    source, of_one, first = (
        jnp.where(rows.num == 1, x, none)
        for x, none in ((rows.source, N), (rows.block, N), (rows.start, T))
    )
    states = rows._replace(source=source).of_rows(cache.recurrent).astype(jnp.float32)
    states, made = jax.vmap(rule.step)(states, _taken(inputs, first))
    out = jnp.zeros((T, *made.shape[1:]), made.dtype).at[first].set(made, mode="drop")
    new = cache.recurrent.at[of_one].set(states.astype(cache.recurrent.dtype), mode="drop")
    if batch.query_len != 1:
        new, out = _long_rows(rule, rows, inputs, new, out)
    return out, replace(cache, recurrent=new)


def _long_rows(
    rule: Recurrence, rows: StateRows, inputs: Any, states: Array, out: Array
) -> tuple[Array, Array]:
    """Runs rows of several tokens. Returns all states, [N, ...], and what tokens make, [T, ...]."""
    T, C = out.shape[0], rule.chunk_size
    num_chunks = jnp.where(rows.num > 1, -(-rows.num // C), 0)
    ends = jnp.cumsum(num_chunks)

    def one(i: Array, carried: tuple[Array, Array]) -> tuple[Array, Array]:
        states, out = carried
        i = jnp.asarray(i)  # a number where nothing is compiled
        row = find_rows(ends, i[None])[0]
        nth = i - (ends[row] - num_chunks[row])
        offset = nth * C + jnp.arange(C)
        tokens = jnp.where(offset < rows.num[row], rows.start[row] + offset, T)
        block = rows.block[row]
        old = states[jnp.where(nth == 0, rows.source[row], block)].astype(jnp.float32)
        old = jnp.where(rows.is_new[row] & (nth == 0), 0.0, old)
        new, made = rule.chunk(old, _taken(inputs, tokens))
        states = states.at[block].set(new.astype(states.dtype), mode="drop")
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
