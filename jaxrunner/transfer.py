"""Packs a tree of small arrays into one int32 vector, so that a step uploads once."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrunner.types import Array


def packed_size(spec: Any) -> int:
    """Returns the length of the vector that holds a tree of `spec`, abstract arrays."""
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(spec))


def pack(spec: Any, tree: Any) -> np.ndarray:
    """Packs numpy arrays or scalars of 32 bits or bools, shaped as `spec`, into one vector."""
    want, treedef = jax.tree.flatten(spec)
    out, at = np.empty(packed_size(spec), np.int32), 0
    for leaf, value in zip(want, treedef.flatten_up_to(tree), strict=True):
        size = math.prod(leaf.shape)
        dtype = np.int32 if leaf.dtype == np.bool_ else leaf.dtype
        array = np.asarray(value, dtype)
        if array.shape != leaf.shape:
            raise ValueError(f"packed arrays must be {leaf.shape}, got {array.shape}")
        out[at : at + size] = np.ascontiguousarray(array).reshape(-1).view(np.int32)
        at += size
    return out


def unpack(spec: Any, vector: Array) -> Any:
    """Returns the tree that `pack` packed. Runs inside the program."""
    leaves, treedef = jax.tree.flatten(spec)
    out, at = [], 0
    for leaf in leaves:
        size = math.prod(leaf.shape)
        part = vector[at : at + size].reshape(leaf.shape)
        if leaf.dtype == jnp.bool:
            part = part != 0
        elif leaf.dtype != jnp.int32:
            part = jax.lax.bitcast_convert_type(part, leaf.dtype)
        out.append(part)
        at += size
    return jax.tree.unflatten(treedef, out)


def pack_on_device(tree: Any) -> Array:
    """Packs a program's arrays of 32 bits or bools into one vector. Runs inside the program."""

    def words(x: Array) -> Array:
        x = x.astype(jnp.int32) if x.dtype == jnp.bool else x
        return (x if x.dtype == jnp.int32 else jax.lax.bitcast_convert_type(x, jnp.int32)).ravel()

    return jnp.concatenate([words(x) for x in jax.tree.leaves(tree)])


def read(spec: Any, vector: np.ndarray) -> Any:
    """Returns the tree, shaped as `spec`, that `pack_on_device` packed: numpy views."""
    leaves, treedef = jax.tree.flatten(spec)
    out, at = [], 0
    for leaf in leaves:
        size = math.prod(leaf.shape)
        part = vector[at : at + size].reshape(leaf.shape)
        out.append(part != 0 if leaf.dtype == np.bool_ else part.view(leaf.dtype))
        at += size
    return jax.tree.unflatten(treedef, out)


def pad(values: Any, size: int, fill: int) -> np.ndarray:
    """Returns `values` as int32, filled up to `size`."""
    out = np.full(size, fill, np.int32)
    out[: len(values)] = values
    return out
