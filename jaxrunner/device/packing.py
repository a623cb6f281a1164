"""Packs a tree of small arrays into one int32 vector, so that a step uploads once."""

import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrunner.types import Array


class Layout:
    """Where each array of a tree lies in the packed int32 vector. Computed once for a `spec`."""

    def __init__(self, spec: Any):
        """spec: a tree of abstract arrays, whose dtypes have 32 bits or are bool."""
        leaves, self._treedef = jax.tree.flatten(spec)
        ends = [0, *itertools.accumulate(math.prod(leaf.shape) for leaf in leaves)]
        self.size = ends[-1]
        places = [slice(*pair) for pair in itertools.pairwise(ends)]
        self._parts = [(p, x.shape, x.dtype) for p, x in zip(places, leaves, strict=True)]

    def pack(self, tree: Any) -> np.ndarray:
        """Packs numpy arrays or scalars, shaped as `spec`, into one vector.

        Raises:
          ValueError: an array has another shape.
        """
        out = np.empty(self.size, np.int32)
        values = self._treedef.flatten_up_to(tree)
        for (place, shape, dtype), value in zip(self._parts, values, strict=True):
            array = np.asarray(value, np.int32 if dtype == np.bool_ else dtype)
            if array.shape != shape:
                raise ValueError(f"packed arrays must be {shape}, got {array.shape}")
            out[place] = np.ascontiguousarray(array).reshape(-1).view(np.int32)
        return out

    def read(self, vector: np.ndarray) -> Any:
        """Returns the tree that was packed into `vector`: views of it, but copies of bools."""
        out = []
        for place, shape, dtype in self._parts:
            part = vector[place].reshape(shape)
            out.append(part != 0 if dtype == np.bool_ else part.view(dtype))
        return self._treedef.unflatten(out)


def packed_size(spec: Any) -> int:
    """Returns the length of the vector that holds a tree of `spec`, abstract arrays."""
    return Layout(spec).size


def pack(spec: Any, tree: Any) -> np.ndarray:
    """Packs one tree as `Layout.pack` does."""
    return Layout(spec).pack(tree)


def unpack(spec: Any, vector: Array) -> Any:
    """Returns the tree that `pack` packed, on the device: for use inside a program."""
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


@jax.named_scope("finish")
def pack_on_device(tree: Any) -> Array:
    """Packs arrays of 32 bits or bools into one vector, on the device: for use inside a program."""

    def words(x: Array) -> Array:
        x = x.astype(jnp.int32) if x.dtype == jnp.bool else x
        return (x if x.dtype == jnp.int32 else jax.lax.bitcast_convert_type(x, jnp.int32)).ravel()

    return jnp.concatenate([words(x) for x in jax.tree.leaves(tree)])


def pad(values: Any, size: int, fill: int) -> np.ndarray:
    """Returns `values` as int32, [size], with `fill` behind them."""
    out = np.full(size, fill, np.int32)
    out[: len(values)] = values
    return out
