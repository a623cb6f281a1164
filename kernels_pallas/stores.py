"""Stores that need not be as fast as can be."""

from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxrunner.types import Array


def put(ref, x: Array) -> None:
    """Writes x to a reference; from JAX 0.12 on only this does where banks of memory conflict."""
    if hasattr(plgpu, "store"):
        plgpu.store(ref, x, optimized=False)
    else:
        ref[...] = x
