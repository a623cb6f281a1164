"""The gated delta rule: matrices that decay, and whose value at a key is moved towards another.

S = exp(g) S, then S += k (beta (v - S'k))', o = S'q. A chunk at once by the WY form of products of
Householder-like matrices: arXiv:2406.06484, section 3, with decays as in arXiv:2412.06464.
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
class DeltaRuleInputs:
    """The inputs of one token to the gated delta rule; heads share q and k by groups.

    Padding is 0, which changes nothing.
    """

    q: Array = leaf("T groups rows", jnp.float32)
    k: Array = leaf("T groups rows", jnp.float32)  # of length 1
    v: Array = leaf("T heads columns", jnp.float32)
    decay: Array = leaf("T heads", jnp.float32)  # its logarithm, g
    beta: Array = leaf("T heads", jnp.float32)  # from 0 to 1


class _Chunk(NamedTuple):
    """The terms of a chunk of C tokens, which do not depend on the matrices before it."""

    u: Array  # [heads, C, columns], what tokens move values by, to which
    w: Array  # [heads, C, rows], times the matrices before the chunk is added
    scores: Array  # [heads, C, C], of queries and keys that they see
    q: Array  # [heads, C, rows], with what is left of the matrices before the chunk
    k: Array  # [heads, C, rows], with what is left of a token behind the chunk
    left: Array  # [heads], of the matrices before the chunk


def delta_rule(heads: int, rows: int, columns: int) -> Recurrence:
    """Returns how the matrices of a gated delta net go on."""
    return Recurrence((heads, rows, columns), step, _within, _carry, _read, reads="q")


def step(state: Array, token: DeltaRuleInputs) -> tuple[Array, Array]:
    """Takes in one token. Returns the state, and o, [heads, columns]."""
    q, k = (_of_heads(one, 0, state.shape[0])[:, :, None] for one in (token.q, token.k))
    state = jnp.exp(token.decay)[:, None, None] * state
    moved = token.beta[:, None] * (token.v - (state * k).sum(1))
    state = state + k * moved[:, None]
    return state, (state * q).sum(1)


def _within(tokens: DeltaRuleInputs) -> _Chunk:
    (C, H, columns), beta = tokens.v.shape, tokens.beta.T[:, :, None]
    q, k = (_of_heads(one, 1, H).swapaxes(0, 1) for one in (tokens.q, tokens.k))
    total = jnp.cumsum(tokens.decay, 0).T  # [heads, C]
    seen = jnp.tril(jnp.ones((C, C), bool))[None]
    since = jnp.exp(jnp.where(seen, total[:, :, None] - total[:, None], -jnp.inf))
    # The update of each token depends on those of earlier ones: a triangular system.
    lower = jnp.tril(_einsum("hik,hjk->hij", beta * k, k) * since, -1)
    grown = jnp.exp(total)[:, :, None]
    given = jnp.concatenate([beta * tokens.v.swapaxes(0, 1), -beta * grown * k], -1)
    solved = jax.lax.linalg.triangular_solve(
        lower + jnp.eye(C)[None], given, left_side=True, lower=True, unit_diagonal=True
    )
    scores = _einsum("hik,hjk->hij", q, k) * since
    behind = jnp.exp(total[:, -1:] - total)[:, :, None] * k
    u, w = solved[:, :, :columns], solved[:, :, columns:]
    return _Chunk(u, w, scores, grown * q, behind, jnp.exp(total[:, -1]))


def _carry(state: Array, chunk: _Chunk) -> tuple[Array, tuple[Array, Array]]:
    moved = chunk.u + _einsum("hik,hkv->hiv", chunk.w, state)
    gained = _einsum("hjk,hjv->hkv", chunk.k, moved)
    return chunk.left[:, None, None] * state + gained, (state, moved)


def _read(chunk: _Chunk, told: tuple[Array, Array]) -> Array:
    """Returns o, [C, heads, columns], given the matrices before the chunk and what was moved."""
    state, moved = told
    out = _einsum("hij,hjv->ihv", chunk.scores, moved)
    return out + _einsum("hik,hkv->ihv", chunk.q, state)


def _of_heads(groups: Array, axis: int, heads: int) -> Array:
    """Returns what each head has of its group, which lie along an axis."""
    return jnp.repeat(groups, heads // groups.shape[axis], axis=axis)
