"""The ragged all-to-all that sends tokens to the devices of their experts, and results back.

Each device has an even share of its rank's tokens. A token goes once to each device that has any of
its experts, so buffers hold all rows under any skew, and none is dropped. Every device knows all
routes, and so the number and offsets of the rows that each device sends.
"""

from collections.abc import Callable
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxrunner.indexing import take
from jaxrunner.mixtures.experts import Routes
from jaxrunner.ops.plain import summed
from jaxrunner.parallel.mesh import DATA, TENSOR
from jaxrunner.types import Array

Run = Callable[[Array, Routes], Array]  # x [rows, E] through a device's own experts, as `experts`
Axes = tuple[str, ...]


class Sent(NamedTuple):
    """The rows that each device sends to each of M devices, of its n tokens."""

    is_sent: Array  # [M, n, M], bool: from a device, a token of it, to a device
    row: Array  # [M, n, M], int32: its place among those of the two devices, in the order of tokens
    sizes: Array  # [M, M], int32: rows from a device to a device


def exchanged(run: Run, x: Array, routes: Routes, num_own: int, axes: Axes) -> Array:
    """Runs a rank's tokens, x [T, E], through the experts of all devices of the mesh axes.

    num_own: experts of a device. Returns [T, E] on each device of the rank. The parts of a token's
    sum are added in the order of their devices, so it does not depend on the rest of the step.
    """
    M, me, (T, E) = jax.lax.axis_size(axes), jax.lax.axis_index(axes), x.shape
    n = -(-T // jax.lax.axis_size(TENSOR))
    x, every = _even(x, n, 0), _every(routes, n, M * num_own, axes)
    sent = _plan(every.experts // num_own, M)
    starts = jnp.cumsum(sent.sizes, 1, dtype=jnp.int32) - sent.sizes  # in what a device sends
    most = n * min(routes.experts.shape[1], M)  # rows that a device sends
    at = jnp.where(sent.is_sent[me], starts[me][None] + sent.row[me], most)  # [n, M]
    token = _token_of_row(sent, me)
    if DATA in axes:
        own = jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index(TENSOR) * n, n)
        index = jnp.broadcast_to(jnp.arange(n, dtype=jnp.int32)[:, None], at.shape)
        rows = own[jnp.zeros(most, jnp.int32).at[at].set(index, mode="drop")]
        first = jnp.full(M, me * n, jnp.int32)
        x = _all_to_all(rows, M * n, starts[me], sent.sizes[me], first, sent.sizes[:, me], axes)
    else:  # each device has all tokens
        x = take(x, token)
    own_routes = _routes_of(every, token, me * num_own, num_own)
    made = summed(own_parts(run(x, own_routes), own_routes, num_own), x.dtype)
    first = jnp.arange(M, dtype=jnp.int32) * n
    back = _all_to_all(made, most, first, sent.sizes[:, me], starts[:, me], sent.sizes[me], axes)
    total = jnp.zeros((n, E), jnp.float32)
    for device in range(M):
        total += take(back, at[:, device]).astype(jnp.float32)
    return jax.lax.all_gather(total.astype(made.dtype), TENSOR, tiled=True)[:T]


def _even(x: Array, n: int, padding: float) -> Array:
    """Returns rows, [T, ...], padded so that each device of a rank has n of them."""
    more = n * jax.lax.axis_size(TENSOR) - x.shape[0]
    return jnp.pad(x, ((0, more), (0, 0)), constant_values=padding)


def _every(routes: Routes, n: int, none: int, axes: Axes) -> Routes:
    """Returns the routes of all devices' tokens, [M * n, k]."""
    padded = Routes(_even(routes.experts, n, none), _even(routes.weights, n, 0))
    if DATA not in axes:
        return padded
    return jax.tree.map(lambda x: jax.lax.all_gather(x, DATA, tiled=True), padded)


def _plan(device: Array, M: int) -> Sent:
    """Returns what is sent. device: of each route, [M * n, k]; M for none."""
    is_sent = (device[:, :, None] == jnp.arange(M, dtype=jnp.int32)[None, None]).any(1)
    is_sent = is_sent.reshape(M, -1, M)
    count = jnp.cumsum(is_sent, 1, dtype=jnp.int32)
    return Sent(is_sent, count - 1, count[:, -1])


def _token_of_row(sent: Sent, me: Array) -> Array:
    """Returns the token of each row that a device gets, [M * n]; M * n where there is none.

    Those of a device begin where all of its tokens would.
    """
    M, n, _ = sent.is_sent.shape
    first = jnp.arange(M, dtype=jnp.int32)[:, None] * n
    row = jnp.where(sent.is_sent[:, :, me], first + sent.row[:, :, me], M * n)
    index = jnp.arange(M * n, dtype=jnp.int32)
    return jnp.full(M * n, M * n).at[row.reshape(-1)].set(index, mode="drop", unique_indices=True)


def _routes_of(every: Routes, token: Array, first: Array, num_own: int) -> Routes:
    """Returns the routes of rows to a device's own experts, by their numbers there."""
    known = jnp.minimum(token, every.experts.shape[0] - 1)
    own = every.experts[known] - first
    here = (own >= 0) & (own < num_own) & (token < every.experts.shape[0])[:, None]
    return Routes(jnp.where(here, own, num_own), jnp.where(here, every.weights[known], 0.0))


def own_parts(residual: Array, routes: Routes, num_own: int) -> Array:
    """Returns a residual, [T, E] or [k, T, E] in parts, with zeros for other devices' experts.

    A kernel leaves these parts uninitialised.
    """
    if residual.ndim < 3:
        return residual
    return jnp.where((routes.experts < num_own).T[..., None], residual, 0)


def _all_to_all(
    x: Array, num_rows: int, start: Array, size: Array, first: Array, got: Array, axes: Axes
) -> Array:
    """Sends rows start[m] to start[m] + size[m] of x to each device m, which has them from first[m]
    on. Returns num_rows, 0 where none came. got: rows that come from each."""
    out = jnp.zeros((num_rows, x.shape[1]), x.dtype)
    send = functools.partial(jax.lax.ragged_all_to_all, axis_name=axes)
    gather = functools.partial(_by_gather, axes=axes)  # XLA has no ragged one for a CPU
    return jax.lax.platform_dependent(x, out, start, size, first, got, cpu=gather, default=send)


def _by_gather(
    x: Array, out: Array, start: Array, size: Array, first: Array, got: Array, *, axes: Axes
) -> Array:
    """Does what `jax.lax.ragged_all_to_all` does, by what all devices have."""
    me, row = jax.lax.axis_index(axes), jnp.arange(out.shape[0], dtype=jnp.int32)
    every = (jax.lax.all_gather(one, axes) for one in (x, start, size, first))
    for sent, starts, sizes, firsts in zip(*every, strict=True):
        index = row - firsts[me]
        comes = (index >= 0) & (index < sizes[me])
        out = jnp.where(comes[:, None], sent[jnp.where(comes, starts[me] + index, 0)], out)
    return out
