"""Places arrays of the host on the devices of an engine: each device gets its own shards."""

from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import Mesh, Sharding
import numpy as np

from jaxrunner.parallel.mesh import shardings


def declared(params: Any, cls: type, dims: Mapping[str, Any], mesh: Mesh) -> Any:
    """Returns the shapes and dtypes of weights, with the shardings that their class declares.

    Raises:
      ValueError: the tree has another structure.
    """
    where = shardings(cls, {**dims, "param": "float32"}, mesh)
    if jax.tree.structure(params) != jax.tree.structure(where):
        raise ValueError(
            f"params must be a {cls.__name__} with the leaves that its config says, got "
            f"{jax.tree.structure(params)!s:.200}"
        )
    return jax.tree.map(lambda x, at: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at),
                        params, where)  # fmt: skip


def place(params: Any, spec: Any) -> Any:
    """Moves weights to the shardings of `spec`; those that lie there, or are abstract, stay."""

    def one(x: Any, spec: Any) -> Any:
        at = spec.sharding
        if isinstance(x, np.ndarray):
            return put(x, at)
        if at is None or not isinstance(x, jax.Array) or x.sharding.is_equivalent_to(at, x.ndim):
            return x
        return move(x, at)

    return jax.tree.map(one, params, spec)


def put(x: np.ndarray, at: Any) -> jax.Array:
    """Copies an array of the host to a sharding or device; None is the default device.

    With several processes each has the whole array, and copies the shards of its own devices.
    """
    if not isinstance(at, Sharding) or at.is_fully_addressable:
        return jax.device_put(x, at)
    return jax.make_array_from_callback(x.shape, at, lambda index: x[index])


def move(x: jax.Array, at: Any) -> jax.Array:
    """Copies an array on devices of this process to another sharding."""
    return jax.device_put(x, at) if at.is_fully_addressable else put(np.asarray(x), at)
