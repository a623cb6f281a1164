"""Inputs that are held sorted by their groups, so that groups are runs: GPTQ's `desc_act`.

A permutation says which input each place has. On a mesh places are cut as inputs are, while the
inputs of a device's places are those of any device, and each has the scales of all groups.
"""

import jax
import jax.numpy as jnp

from jaxrunner.types import Array


def by_place(x: Array, permutation: Array, across: str | None) -> Array:
    """Returns inputs, [..., inputs], as the weights have them: [..., places].

    across: the axis of a mesh that inputs are cut over; None where they are whole.
    """
    if across is not None:
        x = jax.lax.all_gather(x, across, axis=x.ndim - 1, tiled=True)
    return jnp.take(x, permutation, axis=-1, mode="clip")


def by_input(values: Array, permutation: Array, across: str | None) -> Array:
    """Returns weights, [..., places], as inputs come: [..., inputs]. Undoes `by_place`.

    permutation: [places], or [X, places] of values that begin with X.
    """
    num = values.shape[-1]
    if across is not None:
        values, permutation = (
            jax.lax.all_gather(a, across, axis=a.ndim - 1, tiled=True)
            for a in (values, permutation)
        )
    place = jnp.argsort(permutation, axis=-1)
    between = values.ndim - place.ndim
    place = place.reshape(*place.shape[:-1], *[1] * between, -1)
    place = jnp.broadcast_to(place, values.shape)
    values = jnp.take_along_axis(values, place, axis=-1)
    if across is None:
        return values
    return jax.lax.dynamic_slice_in_dim(values, jax.lax.axis_index(across) * num, num, -1)


def own_groups(scale: Array, num: int, size: int, across: str | None) -> Array:
    """Returns those of scales, [..., groups], that a device's `num` places have, whole groups."""
    if (own := num // size) == scale.shape[-1]:
        return scale
    assert across is not None, "a device with some of the inputs says so by `on_shard`"
    return jax.lax.dynamic_slice_in_dim(scale, jax.lax.axis_index(across) * own, own, -1)


def spread(scale: Array, num: int, size: int, across: str | None) -> Array:
    """Returns scales, [..., groups], of each of a device's `num` places, [..., places]."""
    if num % size == 0:
        return jnp.repeat(own_groups(scale, num, size, across), size, axis=-1)
    is_cut = -(-num // size) < scale.shape[-1]
    assert not is_cut or across is not None, "as in `own_groups`"
    first = jax.lax.axis_index(across) * num if is_cut and across is not None else 0
    return jnp.take(scale, (first + jnp.arange(num)) // size, axis=-1, mode="clip")
