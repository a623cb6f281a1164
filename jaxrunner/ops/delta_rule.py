"""The gated delta rule: matrices that decay, and whose value at a key is moved towards another.

S = exp(g) S, then S += k (beta (v - S'k))', o = S'q. A chunk at once by the WY form of products of
Householder-like matrices: arXiv:2406.06484, section 3, with decays as in arXiv:2412.06464.
"""

import functools

import jax
import jax.numpy as jnp

from jaxrunner.model import Recurrence
from jaxrunner.pytree import leaf, pytree
from jaxrunner.types import Array

_einsum = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)


@pytree
class DeltaRuleInputs:
    """What a token brings; heads share q and k by groups. Padding is 0, which changes nothing."""

    q: Array = leaf("T groups rows", jnp.float32)
    k: Array = leaf("T groups rows", jnp.float32)  # of length 1
    v: Array = leaf("T heads columns", jnp.float32)
    decay: Array = leaf("T heads", jnp.float32)  # its logarithm, g
    beta: Array = leaf("T heads", jnp.float32)  # from 0 to 1


def delta_rule(heads: int, rows: int, columns: int) -> Recurrence:
    """Returns how the matrices of a gated delta net go on."""
    return Recurrence((heads, rows, columns), step, _chunk, reads="q")


def step(state: Array, token: DeltaRuleInputs) -> tuple[Array, Array]:
    """Takes in one token. Returns the state, and o, [heads, columns]."""
    q, k = (_of_heads(one, 0, state.shape[0])[:, :, None] for one in (token.q, token.k))
    state = jnp.exp(token.decay)[:, None, None] * state
    moved = token.beta[:, None] * (token.v - (state * k).sum(1))
    state = state + k * moved[:, None]
    return state, (state * q).sum(1)


def _chunk(state: Array, tokens: DeltaRuleInputs) -> tuple[Array, Array]:
    """Takes in C tokens. Returns the state, and o, [C, heads, columns]."""
    (C, H, columns), beta = tokens.v.shape, tokens.beta[:, :, None]
    q, k = (_of_heads(one, 1, H) for one in (tokens.q, tokens.k))
    total = jnp.cumsum(tokens.decay, 0)
    seen = jnp.tril(jnp.ones((C, C), bool))[None]
    since = total.T[:, :, None] - total.T[:, None]
    since = jnp.exp(jnp.where(seen, since, -jnp.inf))  # [heads, i, j]
    # What each token moves depends on what those before it moved: a triangle to solve.
    lower = jnp.tril(_einsum("ihk,jhk->hij", beta * k, k) * since, -1)
    grown = jnp.exp(total)[:, :, None]
    given = jnp.concatenate([beta * tokens.v, beta * grown * k], -1).swapaxes(0, 1)
    solved = jax.lax.linalg.triangular_solve(
        lower + jnp.eye(C)[None], given, left_side=True, lower=True, unit_diagonal=True
    )
    u, w = solved[:, :, :columns], solved[:, :, columns:]
    moved = u - _einsum("hik,hkv->hiv", w, state)
    out = _einsum("hij,hjv->ihv", _einsum("ihk,jhk->hij", q, k) * since, moved)
    out += _einsum("ihk,hkv->ihv", grown * q, state)
    left = jnp.exp(total[-1][None] - total)[:, :, None]
    gained = _einsum("jhk,hjv->hkv", left * k, moved)
    return jnp.exp(total[-1])[:, None, None] * state + gained, out


def _of_heads(groups: Array, axis: int, heads: int) -> Array:
    """Returns what each head has of its group, which lie along an axis."""
    return jnp.repeat(groups, heads // groups.shape[axis], axis=axis)
