"""Programmatic dependent launch: a kernel starts while the one before it still ends.

Blocks that call `begin` are placed as soon as there is room, set themselves up, and wait here for
the results of the kernel before. Ahead of it they may read weights, which no kernel of a step
makes.
"""

from typing import Any

import jax
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxrunner.kernels_pallas.mosaic import CORES

IN_GRAPHS = jax.__version_info__ >= (0, 12)  # before, no kernel of a CUDA graph starts early
ALONE = 116 * 1024  # bytes of shared memory, of which a multiprocessor has room for one block's


def begin(is_device: bool = True) -> None:
    """Waits for all earlier kernels, then lets the next one be placed.

    is_device: an interpreter of kernels knows no launches.
    """
    if is_device:
        plgpu.griddepcontrol_wait()
        plgpu.griddepcontrol_launch_dependents()


def spread(num_blocks: int) -> dict[str, Any]:
    """Returns parameters of the compiler by which each of few small blocks has a multiprocessor.

    Placed while the kernel before ends, they would share the first few that it leaves.
    """
    return dict(reduction_scratch_bytes=ALONE) if IN_GRAPHS and num_blocks <= CORES else {}
