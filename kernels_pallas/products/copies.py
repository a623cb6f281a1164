"""Copies of a product's weights and tokens into shared memory, step by step of its sum."""

from collections.abc import Callable
from typing import Any

from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from jaxrunner.kernels_pallas import pdl
from jaxrunner.kernels_pallas.mosaic import Index
from jaxrunner.types import Array

EARLY = 32 * 1024  # bytes of weights that a block asks for before the kernel before has ended


def begin(
    num: Index, size: int, weights: Callable[[Array], None], *others: Callable[[Array], None],
    is_device: bool = True,
) -> None:  # fmt: skip
    """Starts the copies of a block's first `num` steps, of `size` bytes of weights each.

    Those of `EARLY` bytes of weights do not wait for the kernel that makes what others copy. More
    would have that come late, as copies are served one after the other.
    is_device: an interpreter of kernels knows no launches to wait for.
    """
    most = max(1, EARLY // size)
    early = min(num, most) if isinstance(num, int) else jnp.minimum(num, most)
    each(0, early, weights)
    pdl.begin(is_device)
    each(0, early, *others)
    each(early, num, weights, *others)


def each(first: Index, last: Index, *actions: Callable[[Array], None]) -> None:
    """Does all of some steps."""

    def body(step: Array, _: None) -> None:
        for act in actions:
            act(step)
        return _

    lax.fori_loop(first, last, body, None)


def free_slots(stages: int, readers: int, cluster: int) -> Any:
    """Returns barriers by which the readers of each block of a cluster say that they have read."""
    if cluster == 1:
        return plgpu.Barrier(num_arrivals=readers, num_barriers=stages)
    return plgpu.ClusterBarrier(
        collective_axes=("peer",), num_arrivals=readers, num_barriers=stages
    )
