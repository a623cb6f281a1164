"""One mesh over the devices of several processes, joined by `jax.distributed`.

All processes make the same calls in the same order, and so launch the same programs. What only one
of them knows, such as a clock or its free memory, must not decide what is launched.
"""

import builtins
from collections.abc import Callable
from typing import Any

import jax
from jax.experimental import multihost_utils
from jax.sharding import Mesh
import numpy as np

TOLD_BYTES = 2048  # of what one process tells all


def is_shared(mesh: Mesh | None) -> bool:
    """Whether a mesh is over devices of this process and of others."""
    return mesh is not None and mesh.is_multi_process and len(mesh.local_devices) > 0


def check_own(mesh: Mesh | None, asked: str, cure: str) -> None:
    """Checks that a mesh is one process's own.

    Raises:
      ValueError: it is over several processes; names the feature that refuses them.
    """
    if is_shared(mesh):
        raise ValueError(
            f"{asked} wants a mesh of one process, this one is over {jax.process_count()}, which "
            f"must all launch the same: {cure}"
        )


def is_first(mesh: Mesh | None) -> bool:
    """Whether this is the process of a mesh that writes files for all."""
    return not is_shared(mesh) or jax.process_index() == 0


def together(mesh: Mesh | None, run: Callable[[], str | None]) -> list[str]:
    """Runs a function in each process of a mesh, and waits for all. Returns all results, in order.

    Where it raises in one process, for example for an error of its disk, it raises in all, so that
    no process goes on to a launch that another never makes.
    """
    if not is_shared(mesh):
        return [run() or ""]
    said, failed, own = "", "", None
    try:
        said = run() or ""
    except Exception as error:
        failed, own = f"{type(error).__name__}\n{error}", error
    told = np.zeros(TOLD_BYTES, np.uint8)
    data = f"{'!' if failed else '='}{failed or said}".encode()[:TOLD_BYTES]
    told[: len(data)] = np.frombuffer(data, np.uint8)
    rows = np.asarray(multihost_utils.process_allgather(told))
    texts = [bytes(row).rstrip(b"\0").decode(errors="ignore") for row in rows]
    if own is not None:
        raise own
    for text in texts:
        if text[0] == "!":
            raise _error_of(*text[1:].split("\n", 1))
    return [text[1:] for text in texts]


def _error_of(name: str, words: str) -> Exception:
    """Returns an error of another process, as what it was there if Python has that."""
    kind = getattr(builtins, name, None)
    if kind in (ValueError, TypeError, RuntimeError):
        return kind(words)
    if isinstance(kind, type) and issubclass(kind, OSError):
        return kind(words)
    return RuntimeError(f"{name} in another process: {words}")


def agreed_least(number: int, *, shared: bool) -> int:
    """Returns the least `number` of all processes; this process's own if not `shared`."""
    if not shared:
        return number
    halves = np.array(divmod(number, 2**31), np.int32)  # integers of JAX have 32 bits
    return min(
        int(high) * 2**31 + int(low) for high, low in multihost_utils.process_allgather(halves)
    )


def host_copy(x: jax.Array | np.ndarray) -> np.ndarray:
    """Copies a whole array, gathered from all devices of a mesh, to the host of each process."""
    if isinstance(x, np.ndarray):
        return x
    if x.is_fully_addressable:
        # A JAX array keeps the host copy made of it for life: let a copy of it do so.
        return np.asarray(x.copy())
    return np.asarray(multihost_utils.process_allgather(x, tiled=True))


def to_host(params: Any) -> Any:
    """Copies whole weights to the host of each process."""
    if all(x.is_fully_addressable for x in jax.tree.leaves(params)):
        return jax.device_get(params)
    return jax.tree.map(host_copy, params)
