"""The devices of an engine, and which axes of its weights and caches are cut into shards.

`leaf` names the axes of every array; one table maps these to axes of the mesh.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
import numpy as np

from jaxrunner import pytree

TENSOR = "tensor"  # axis of the mesh: each layer's heads, MLP units and vocabulary
DATA = "data"  # axis of the mesh: ranks with requests of their own, and with `TENSOR` whole experts
# Of the axes that `leaf` names, those that are cut; of a mixture's experts, their units or, where
# `EXPERT_PARALLEL` is a flag of the dims, the experts themselves.
CUT = frozenset((*"KHFV", "shared_units", "inner"))
UNITS, EXPERTS, EXPERT_PARALLEL = "expert_units", "experts", "expert_parallel"
# Of layers with states, where `SPLIT_MIXERS` is a flag of the dims; else they are whole everywhere.
GROUPS, SPLIT_MIXERS = "mix_groups", "split_mixers"
OF_MIXERS = "mix_groups", "mixer_heads", "mix_inputs"
# Of caches that have no heads, the tokens, where `DEALT_OUT` is a flag of the dims.
TOKENS, DEALT_OUT = "block_tokens", "dealt_out"


def make_mesh(
    tensor_parallel_size: int, devices: Sequence[Any] | None = None, num_ranks: int = 1
) -> Mesh:
    """Returns a mesh of the first devices of this process, or of the first that are given.

    Takes devices of all processes that `jax.distributed` has joined if this one has too few.

    num_ranks: data ranks, each of so many devices; over 1 the mesh has an axis of ranks.

    Raises:
      ValueError: there are too few devices.
    """
    devices = _devices(tensor_parallel_size) if devices is None else devices
    if tensor_parallel_size > len(devices):
        raise ValueError(
            f"tensor_parallel_size={tensor_parallel_size} needs as many devices, there are "
            f"{len(devices)} ({devices[0].device_kind}): lower it"
        )
    if num_ranks == 1:
        return Mesh(np.array(devices[:tensor_parallel_size]), (TENSOR,))
    ranks = np.array(devices[: num_ranks * tensor_parallel_size]).reshape(num_ranks, -1)
    return Mesh(ranks, (DATA, TENSOR))


def _devices(num: int) -> Sequence[Any]:
    local = jax.local_devices()
    return local if num <= len(local) else jax.devices()


def mesh_of(config: Any) -> Mesh | None:
    """Returns the mesh that a `ModelConfig` is for; None for the first device of the process."""
    return getattr(config, "mesh", None)


def devices_of(config: Any) -> list[Any]:
    """Returns the devices of this process that a `ModelConfig` is for."""
    mesh = mesh_of(config)
    return jax.local_devices()[:1] if mesh is None else list(mesh.local_devices)


def shardings(cls: type, dims: Mapping[str, Any], mesh: Mesh) -> Any:
    """Returns the sharding of each array of a pytree, by the axes that its class declares."""

    def over(axis: str) -> Any:
        name = mesh_axis(axis, dims)
        return (DATA, TENSOR) if name and axis == EXPERTS and DATA in mesh.shape else name

    def one(axes: tuple[str, ...], *_: Any) -> NamedSharding:
        return NamedSharding(mesh, PartitionSpec(*map(over, axes)))

    return pytree.build(one, cls, dims)


def mesh_axis(axis: str, dims: Mapping[str, Any]) -> str | None:
    """Returns the mesh axis that an array's axis is cut over; "F/2" is cut as F is."""
    own = EXPERTS if dims.get(EXPERT_PARALLEL) else UNITS
    mixers = OF_MIXERS if dims.get(SPLIT_MIXERS) else ()
    tokens = (TOKENS,) if dims.get(DEALT_OUT) else ()
    return TENSOR if axis.partition("/")[0] in (*CUT, own, *mixers, *tokens) else None


def spec_of(leaf: Any) -> PartitionSpec:
    """Returns the spec of an array, or of an abstract one; replicated if it has no sharding."""
    sharding = getattr(leaf, "sharding", None)
    return sharding.spec if isinstance(sharding, NamedSharding) else PartitionSpec()


def whole_on(mesh: Mesh | None) -> NamedSharding | None:
    """Returns the sharding of a replicated array; None without a mesh."""
    return None if mesh is None else NamedSharding(mesh, PartitionSpec())


def placed(tree: Any, mesh: Mesh) -> Any:
    """Returns abstract arrays with a sharding each: those without one become replicated."""
    whole = whole_on(mesh)

    def one(x: Any) -> Any:
        return x if isinstance(x.sharding, NamedSharding) else x.update(sharding=whole)

    return jax.tree.map(one, tree)


def num_ranks(mesh: Mesh | None) -> int:
    """Returns the number of data ranks of a mesh; 1 without such an axis."""
    return 1 if mesh is None else mesh.shape.get(DATA, 1)


def ranked(tree: Any, mesh: Mesh) -> Any:
    """Returns abstract arrays of one rank as arrays of all data ranks, joined along the first axis.

    Scalars, and leaves that are no arrays, stay as they are.
    """

    def one(x: Any) -> Any:
        if not getattr(x, "shape", ()):
            return x
        first, *rest = (*spec_of(x), None)
        over = DATA if first is None else (DATA, first)
        at = NamedSharding(mesh, PartitionSpec(over, *rest[: x.ndim - 1]))
        shape = num_ranks(mesh) * x.shape[0], *x.shape[1:]
        return jax.ShapeDtypeStruct(shape, x.dtype, sharding=at)

    return jax.tree.map(one, tree)


def check_one_rank(mesh: Mesh | None, asked: str, cure: str) -> None:
    """Checks that a mesh has no data ranks.

    Raises:
      ValueError: it has data ranks; names the feature that refuses them.
    """
    if (num := num_ranks(mesh)) > 1:
        raise ValueError(
            f"{asked} does not go with data_parallel_size={num} and enable_expert_parallel: {cure}"
        )
