"""Mamba-2's state space: matrices that decay by a number a head and gain a product of a token.

H = exp(a) H + x b', y = H c, and a chunk at once as attention with decays: the state space dual of
arXiv:2405.21060, section 6.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxrunner.model import Recurrence
from jaxrunner.pytree import leaf, pytree
from jaxrunner.types import Array

_einsum = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)


@pytree
class StateSpaceInputs:
    """The inputs of one token to the state space; heads share b and c by groups.

    Padding is 0, which changes nothing.
    """

    x: Array = leaf("T heads rows", jnp.float32)
    decay: Array = leaf("T heads", jnp.float32)  # its logarithm, a
    b: Array = leaf("T groups columns", jnp.float32)
    c: Array = leaf("T groups columns", jnp.float32)


class _Chunk(NamedTuple):
    """The terms of a chunk of C tokens, which do not depend on the matrices before it."""

    made: Array  # [C, heads, rows], what tokens make of those before them in the chunk
    c: Array  # [C, groups, columns]
    grown: Array  # [C, heads], what is left of the matrices before the chunk
    gained: Array  # [heads, rows, columns], what the matrices behind it gain


def state_space(heads: int, rows: int, columns: int) -> Recurrence:
    """Returns how the matrices of a Mamba-2 mixer go on."""
    matrices = heads, rows, columns
    return Recurrence(matrices, step, _within, _carry, _read, reads="c")


def step(state: Array, token: StateSpaceInputs) -> tuple[Array, Array]:
    """Takes in one token. Returns the state, and y, [heads, rows]."""
    b, c = (_of_heads(one, state.shape[0]) for one in (token.b, token.c))
    state = jnp.exp(token.decay)[:, None, None] * state + token.x[:, :, None] * b[:, None]
    return state, (state * c[:, None]).sum(-1)


def _within(tokens: StateSpaceInputs) -> _Chunk:
    x, b, c, (C, H, _) = tokens.x, tokens.b, tokens.c, tokens.x.shape
    total = jnp.cumsum(tokens.decay, 0)
    seen = jnp.tril(jnp.ones((C, C), bool))[:, :, None]
    since = jnp.exp(jnp.where(seen, total[:, None] - total[None], -jnp.inf))  # [i, j, heads]
    scores = jnp.repeat(_einsum("ign,jgn->ijg", c, b), H // c.shape[1], axis=2)
    made = _einsum("ijh,jhp->ihp", scores * since, x)
    left = x * jnp.exp(total[-1][None] - total)[:, :, None]
    gained = _einsum("jgqp,jgn->gqpn", _by_groups(left, b), b).reshape(H, *x.shape[2:], -1)
    return _Chunk(made, c, jnp.exp(total), gained)


def _carry(state: Array, chunk: _Chunk) -> tuple[Array, Array]:
    return chunk.grown[-1][:, None, None] * state + chunk.gained, state


def _read(chunk: _Chunk, state: Array) -> Array:
    """Returns y, [C, heads, rows], given the matrices before the chunk."""
    groups = state.reshape(chunk.c.shape[1], -1, *state.shape[1:])
    y = _einsum("ign,gqpn->igqp", chunk.c, groups).reshape(chunk.made.shape)
    return chunk.made + chunk.grown[:, :, None] * y


def _by_groups(x: Array, of: Array) -> Array:
    """Returns x by the groups of another: [C, heads, ...] -> [C, groups, heads of each, ...]."""
    return x.reshape(x.shape[0], of.shape[1], -1, *x.shape[2:])


def _of_heads(groups: Array, heads: int) -> Array:
    """Returns what each head has of its group: [groups, N] -> [heads, N]."""
    return jnp.repeat(groups, heads // groups.shape[0], axis=0)
