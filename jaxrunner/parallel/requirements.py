"""Checks of several devices: one kind, versions of JAX and NCCL, and transfers between them.

They run before weights are read: a later failure would be an obscure error of XLA, or hang.
"""

from collections import Counter
from collections.abc import Callable
import ctypes
import importlib.metadata
from itertools import pairwise, permutations
from typing import Any
import warnings

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
import numpy as np

from jaxrunner.parallel.mesh import mesh_of
from jaxrunner.parallel.placement import put
from jaxrunner.parallel.processes import is_shared
from jaxrunner.parallel.stage_link import links_of
from jaxrunner.parallel.stages import is_spread, stages_of
from jaxrunner.parallel.time_limit import ends_within

Version = tuple[int, ...]
FAST_SUMS_JAX = (0, 12)  # from here on a small psum is XLA's own kernel, in the graph of a step
FAST_SUMS_NCCL = (2, 32)  # which that JAX wants: with an older one the first psum fails
SUM_TIMEOUT_S = 60.0  # compiling it and meeting all peers take a few seconds


def describe(mesh: Mesh) -> str:
    """Returns the devices of a mesh and its axes in words: "4 x NVIDIA H200, tensor 4"."""
    kinds = Counter(device.device_kind for device in mesh.devices.flat)
    axes = (f"{name} {size}" for name, size in mesh.shape.items())
    return ", ".join([*(f"{count} x {kind}" for kind, count in kinds.items()), *axes])


def report(mesh: Mesh | None) -> str:
    """Returns the line of `LLM.report` that names devices."""
    if mesh is None:
        return f"device: {jax.local_devices()[0].device_kind}"
    return f"devices: {describe(mesh)}"


def check_mesh(mesh: Mesh) -> None:
    """Checks the devices of a mesh, and on GPUs the versions of JAX and NCCL.

    Raises:
      ValueError: the devices are of several kinds, or some of its processes have others too.
      RuntimeError: a sum over them would fail.
    """
    kinds = {device.device_kind for device in mesh.devices.flat}
    if len(kinds) > 1:
        raise ValueError(
            f"a mesh wants devices of one kind, got {describe(mesh)}: name devices of one kind, "
            "or let CUDA_VISIBLE_DEVICES do so"
        )
    if is_shared(mesh) and mesh.size != jax.device_count():
        raise ValueError(
            f"a mesh over {jax.process_count()} processes wants all of their devices, "
            f"{jax.device_count()}, got {describe(mesh)}: take all, or as many as one process has"
        )
    if mesh.size > 1 and mesh.devices.flat[0].platform in ("gpu", "cuda"):
        check_versions(jax.__version_info__, find_nccl())


def check_versions(of_jax: Version, of_nccl: Version | None) -> None:
    """Checks that sums over GPUs work, and warns where they are slow. NCCL None is not known.

    Raises:
      RuntimeError: they would fail.
    """
    named = ".".join(map(str, of_jax))
    if of_jax < FAST_SUMS_JAX:
        warnings.warn(
            f"several GPUs with JAX {named}: each sum over them takes 20 us, with JAX 0.12 and "
            "NCCL 2.32 or newer 5 to 9 us: upgrade both for speed",
            stacklevel=3,
        )
    elif of_nccl is not None and of_nccl < FAST_SUMS_NCCL:
        raise RuntimeError(
            f"several GPUs with JAX {named} want NCCL 2.32 or newer, there is "
            f"{'.'.join(map(str, of_nccl))}, with which the first sum fails: upgrade the package "
            "nvidia-nccl-cu13 (nvidia-nccl-cu12 with JAX for CUDA 12)"
        )


def find_nccl() -> Version | None:
    """Returns the version of NCCL that was installed for JAX's CUDA; None where none is known."""
    for cuda in ("13", "12"):
        try:
            importlib.metadata.version(f"jax-cuda{cuda}-plugin")
            found = importlib.metadata.version(f"nvidia-nccl-cu{cuda}")
            return tuple(int(part) for part in found.split(".")[:3])
        except (importlib.metadata.PackageNotFoundError, ValueError):
            continue
    return None


def can_access_peers(mesh: Mesh) -> bool:
    """Whether the GPUs of a mesh can write into each other's memory, by CUDA's driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    ordinals = [device.local_hardware_id for device in mesh.devices.flat]
    return all(_can_access(driver, *pair) for pair in permutations(ordinals, 2))


def _can_access(driver: Any, ordinal: int, peer: int) -> bool:
    handles, found = [ctypes.c_int(), ctypes.c_int()], ctypes.c_int()
    for handle, of in zip(handles, (ordinal, peer), strict=True):
        if driver.cuDeviceGet(ctypes.byref(handle), of):
            return False
    failed = driver.cuDeviceCanAccessPeer(ctypes.byref(found), *handles)
    return not failed and bool(found.value)


def check_links(config: Any, timeout_s: float | None = None) -> None:
    """Tries a sum over each mesh of a config, and what the stages of a pipeline send each other.

    timeout_s: of each; `SUM_TIMEOUT_S` where None.

    Raises:
      RuntimeError: one did not end in time, or failed.
    """
    limit_s = SUM_TIMEOUT_S if timeout_s is None else timeout_s
    stages = stages_of(config) or (config,)
    meshes = [mesh for stage in stages if (mesh := mesh_of(stage)) is not None]
    for mesh in meshes:
        check_sum(mesh, limit_s)
    # Hidden states go to the next stage, sampled tokens from the last one to all.
    for source, target in dict.fromkeys(
        (*pairwise(meshes), *((meshes[-1], m) for m in meshes[:-1]))
    ):
        check_transfer(source, target, limit_s)
    for link in links_of(config) if is_spread(config) else ():
        if link is not None:
            _try_link("a transfer to a stage of another process", str(link), link.check, limit_s)


def check_sum(mesh: Mesh, timeout_s: float) -> None:
    """Sums a one of each device over all of them.

    Raises:
      RuntimeError: it did not end in `timeout_s`, or failed.
    """

    def run() -> None:
        every = PartitionSpec(mesh.axis_names)
        ones = put(np.ones(mesh.size, np.float32), NamedSharding(mesh, every))
        add = jax.shard_map(
            lambda x: jax.lax.psum(x, mesh.axis_names), mesh=mesh, in_specs=every,
            out_specs=PartitionSpec(), check_vma=False,
        )  # fmt: skip
        (total,) = np.asarray(jax.jit(add)(ones))
        assert total == mesh.size, f"it gave {total}, not {mesh.size}"

    _try_link("a sum over the devices of this mesh", describe(mesh), run, timeout_s)


def check_transfer(source: Mesh, target: Mesh, timeout_s: float) -> None:
    """Sends an array from one stage to another.

    Raises:
      RuntimeError: it did not end in `timeout_s`, or failed.
    """

    def run() -> None:
        sent = np.arange(8, dtype=np.float32)
        there, here = (put(sent, NamedSharding(m, PartitionSpec())) for m in (target, source))
        got = np.asarray(jax.device_put(here, there.sharding))
        assert (got == sent).all(), f"it gave {got}, not {sent}"

    where = " to ".join(str(mesh.devices.flat[0]) for mesh in (source, target))
    _try_link("a transfer from stage to stage", where, run, timeout_s)


def _try_link(what: str, where: str, run: Callable[[], None], timeout_s: float) -> None:
    try:
        if ends_within(timeout_s, run):
            return
    except Exception as error:  # of JAX, XLA and NCCL
        raise RuntimeError(
            f"{what} failed ({where}): see the cause above, NCCL_DEBUG=INFO tells more; with fewer "
            "devices it may work"
        ) from error
    raise RuntimeError(
        f"{what} did not end in {timeout_s} s ({where}): a peer cannot be reached, or another "
        "program holds its device; restart the process"
    )
