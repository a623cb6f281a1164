"""Sums of rows over the devices of a process, in the kernel that adds and norms them.

Devices write into each other's memory (`kernels_pallas.products.peer_rows`), whose addresses
programs take beside the weights. Sums that the kernel does not serve are psums. vLLM has a custom
all-reduce for the same sums.
"""

from typing import Any

import jax
from jax.sharding import Mesh

from jaxrunner.config import EngineConfig, ModelConfig
from jaxrunner.kernels_pallas.products import peer_rows, reduce_add_norm
from jaxrunner.kernels_pallas.products.peer_rows import Peers
from jaxrunner.model import Ops
from jaxrunner.operation import Note, Operation, run_first
from jaxrunner.ops.plain import summed
from jaxrunner.parallel.mesh import TENSOR, mesh_of
from jaxrunner.parallel.requirements import FAST_SUMS_JAX, can_access_peers
from jaxrunner.parallel.stages import stages_of
from jaxrunner.program.program import Program
from jaxrunner.pytree import leaf, pytree, static
from jaxrunner.types import Array

FEW_ROWS = 256  # of more than two devices, whose latency counts


@pytree
class DeviceParts:
    """A residual, [T, E], which is the sum of parts of all devices.

    Models ask it how many axes it has, and for itself in a dtype.
    """

    parts: Array = leaf("parts T E", "param")  # of one device, in float32 or in `dtype`
    dtype: Any = static()  # of x, in which devices send the sums of their parts
    ndim: int = static(default=2)

    def astype(self, dtype: Any) -> Array:
        """Returns the sum, by psum."""
        return jax.lax.psum(summed(self.parts, self.dtype), TENSOR).astype(dtype)


def device_parts(residual: Array, dtype: Any) -> DeviceParts:
    """Returns what a device has of a residual, [T, E] or parts of it, for `add_norm` to sum."""
    return DeviceParts(residual if residual.ndim == 3 else residual[None], dtype)


def refuses(config: ModelConfig, engine: EngineConfig, backend: str) -> str | None:
    """Says why devices do not write into each other's memory; None if they do.

    backend: of attention, as `EngineConfig.attention_backend` names them.
    """
    meshes = _meshes_of(config)
    if not meshes or meshes[0].shape[TENSOR] == 1:
        return "wants several devices"
    if backend != "mosaic_gpu":
        return f"wants kernels, got {backend}"
    if engine.disable_custom_all_reduce:
        return "is off by disable_custom_all_reduce"
    if any(mesh.is_multi_process for mesh in meshes):
        return "wants devices of one process"
    if engine.enable_lora:
        return "takes no residual of adapters"
    if jax.__version_info__ < FAST_SUMS_JAX:
        return "wants JAX 0.12, which loads all kernels of a program before one waits"
    if not all(map(can_access_peers, meshes)):
        return "wants devices that reach each other's memory"
    return None


def num_rows(config: ModelConfig, engine: EngineConfig, backend: str) -> int:
    """Returns the tokens of a step, at most, whose rows devices write into each other's memory.

    0 where `refuses`, whose arguments these are, says why. Each of N devices sends a row N - 1
    times, and by a ring of psum's 2 (N - 1) / N times.
    """
    if refuses(config, engine, backend) is not None:
        return 0
    num = _meshes_of(config)[0].shape[TENSOR]
    return min(engine.max_num_batched_tokens, peer_rows.MAX_ROWS if num == 2 else FEW_ROWS)


def _meshes_of(config: ModelConfig) -> list[Mesh]:
    """Returns the mesh of a model, or those of its stages."""
    return [mesh for stage in stages_of(config) or (config,) if (mesh := mesh_of(stage))]


def report(program: Program, backend: str) -> str:
    """Returns the line of `LLM.report` on sums over devices; "" for one device."""
    mesh = program.mesh
    if mesh is None or mesh.shape[TENSOR] == 1:
        return ""
    chosen = "reduce_add_norm"
    if not program.peer_rows:
        chosen = f"psum, as {chosen} {refuses(program.config, program.engine, backend)}"
    return f"sums over devices: {chosen}\n"


def add_norm(
    ops: Ops, peers: Peers | None, note: Note, x: Array, residual: Any, weight: Array, *how: Any,
    **told: Any,
) -> tuple[Array, Array]:  # fmt: skip
    """Returns as `Ops.add_norm`, whose arguments behind `weight` are `how`; sums `DeviceParts`."""

    def by_psum(x: Array, residual: DeviceParts, peers: Peers, *how: Any) -> tuple[Array, Array]:
        return ops.add_norm(x, residual.astype(x.dtype), *how, **told)

    if not isinstance(residual, DeviceParts):
        return ops.add_norm(x, residual, weight, *how, **told)
    known = KERNEL, Operation("psum, add_norm", by_psum)
    return run_first("all-reduce, add_norm", known, x, residual, peers, weight, *how, note=note)


def _reduce(
    x: Array, residual: DeviceParts, peers: Peers, weight: Array, eps: float,
    one_more: bool = False,
) -> tuple[Array, Array]:  # fmt: skip
    args = x, residual.parts, weight, peers
    return reduce_add_norm.reduce_add_norm(*args, eps=eps, one_more=one_more)


def _refuses(
    x: Array, residual: DeviceParts, peers: Peers, weight: Array, eps: float,
    one_more: bool = False, end: Array | None = None,
) -> str | None:  # fmt: skip
    if end is not None:
        return "norms no residual before it is added"
    return reduce_add_norm.refuses(x, residual.parts, weight, peers)


KERNEL = Operation("reduce_add_norm", _reduce, _refuses)
