"""One mesh over the devices of several processes, joined by `jax.distributed`.

All of them make the same calls in the same order, and so launch the same programs: nothing that
only one of them knows, a clock or its own memory, may decide what is launched.
"""

from typing import Any

import jax
from jax.experimental import multihost_utils
from jax.sharding import Mesh
import numpy as np


def is_shared(mesh: Mesh | None) -> bool:
    """Whether a mesh is over the devices of several processes."""
    return mesh is not None and mesh.is_multi_process


def check_own(mesh: Mesh | None, asked: str, cure: str) -> None:
    """Checks that a mesh is one process's own.

    Raises:
      ValueError: it is over several processes; names what was asked for.
    """
    if is_shared(mesh):
        raise ValueError(
            f"{asked} wants a mesh of one process, this one is over {jax.process_count()}, which "
            f"must all launch the same: {cure}"
        )


def agreed_least(mesh: Mesh | None, number: int) -> int:
    """Returns the least of the numbers that the processes of a mesh say."""
    if not is_shared(mesh):
        return number
    halves = np.array(divmod(number, 2**31), np.int32)  # integers of JAX have 32 bits
    return min(
        int(high) * 2**31 + int(low) for high, low in multihost_utils.process_allgather(halves)
    )


def host_copy(x: jax.Array | np.ndarray) -> np.ndarray:
    """Returns a whole array, of all devices of a mesh, on the host of each process."""
    if isinstance(x, np.ndarray):
        return x
    if x.is_fully_addressable:
        # A JAX array keeps the host copy made of it for life: let a copy of it do so.
        return np.asarray(x.copy())
    return np.asarray(multihost_utils.process_allgather(x, tiled=True))


def to_host(params: Any) -> Any:
    """Returns weights that leave the devices: whole, on the host of each process."""
    if all(x.is_fully_addressable for x in jax.tree.leaves(params)):
        return jax.device_get(params)
    return jax.tree.map(host_copy, params)
