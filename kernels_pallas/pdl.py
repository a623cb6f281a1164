"""Programmatic dependent launch: a kernel starts while the one before it still ends.

Blocks that call `begin` are placed as soon as there is room, set themselves up, and wait here for
the results of the kernel before. Ahead of it they may read weights, which no kernel of a step
makes.
"""

from jax.experimental.pallas import mosaic_gpu as plgpu


def begin(is_device: bool = True) -> None:
    """Waits for all earlier kernels, then lets the next one be placed.

    is_device: an interpreter of kernels knows no launches.
    """
    if is_device:
        plgpu.griddepcontrol_wait()
        plgpu.griddepcontrol_launch_dependents()
