"""Mamba-2's state space: matrices that decay by a number a head and gain a product of a token.

H = exp(a) H + x b', y = H c, and a chunk at once as attention with decays: the state space dual of
arXiv:2405.21060, section 6.
"""

import functools

import jax
import jax.numpy as jnp

from jaxrunner.model import Recurrence
from jaxrunner.pytree import leaf, pytree
from jaxrunner.types import Array

_einsum = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)


@pytree
class StateSpaceInputs:
    """What a token brings; heads share b and c by groups. Padding is 0, which changes nothing."""

    x: Array = leaf("T heads rows", jnp.float32)
    decay: Array = leaf("T heads", jnp.float32)  # its logarithm, a
    b: Array = leaf("T groups columns", jnp.float32)
    c: Array = leaf("T groups columns", jnp.float32)


def state_space(heads: int, rows: int, columns: int) -> Recurrence:
    """Returns how the matrices of a Mamba-2 mixer go on."""
    return Recurrence((heads, rows, columns), step, _chunk, reads="c")


def step(state: Array, token: StateSpaceInputs) -> tuple[Array, Array]:
    """Takes in one token. Returns the state, and y, [heads, rows]."""
    b, c = (_of_heads(one, state.shape[0]) for one in (token.b, token.c))
    state = jnp.exp(token.decay)[:, None, None] * state + token.x[:, :, None] * b[:, None]
    return state, (state * c[:, None]).sum(-1)


def _chunk(state: Array, tokens: StateSpaceInputs) -> tuple[Array, Array]:
    """Takes in C tokens. Returns the state, and y, [C, heads, rows]."""
    x, (C, H, _) = tokens.x, tokens.x.shape
    b, c = (jax.vmap(functools.partial(_of_heads, heads=H))(one) for one in (tokens.b, tokens.c))
    total = jnp.cumsum(tokens.decay, 0)
    seen = jnp.tril(jnp.ones((C, C), bool))[:, :, None]
    since = jnp.exp(jnp.where(seen, total[:, None] - total[None], -jnp.inf))  # [i, j, heads]
    y = _einsum("ijh,jhp->ihp", _einsum("ihn,jhn->ijh", c, b) * since, x)
    y += jnp.exp(total)[:, :, None] * _einsum("ihn,hpn->ihp", c, state)
    left = jnp.exp(total[-1][None] - total)[:, :, None]
    gained = _einsum("jhp,jhn->hpn", x * left, b)
    return jnp.exp(total[-1])[:, None, None] * state + gained, y


def _of_heads(groups: Array, heads: int) -> Array:
    """Returns what each head has of its group: [groups, N] -> [heads, N]."""
    return jnp.repeat(groups, heads // groups.shape[0], axis=0)
