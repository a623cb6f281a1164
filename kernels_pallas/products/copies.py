"""Copies of a product's weights and tokens into shared memory, step by step of its sum."""

from collections.abc import Callable
from typing import Any, NamedTuple

from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from jaxrunner.kernels_pallas import mosaic, pdl
from jaxrunner.kernels_pallas.mosaic import Barrier, Index
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


class Producer(NamedTuple):
    """Copies of all steps of a block into slots of shared memory, each as soon as its slot is free.

    `run` is for a warpgroup that copies alone. Where none does, those that multiply `refill` slots
    of their own, while tensor cores have products to make.
    """

    slots: int
    total: Array  # steps
    free: Barrier  # of `free_slots`
    weights: Callable[[Index], None]
    others: tuple[Callable[[Index], None], ...]

    def begin(self, size: int, is_device: bool = True) -> None:
        """Fills the slots for the first time. size, is_device: those of `copies.begin`."""
        begin(self.slots, size, self.weights, *self.others, is_device=is_device)

    def run(self, size: int, is_device: bool = True) -> None:
        """Copies all steps, and waits until the last ones have been read."""
        self.begin(size, is_device)
        each(self.slots, self.total, self._wait, self.weights, *self.others)
        # A block may not end while its peer still tells it that a slot is free.
        each(self.total, self.total + self.slots, self._wait)

    def refill(self, wg: Array, warpgroups: int, step: Array, turns: int = 1) -> None:
        """Fills the slot of the step before the one that warpgroup wg is at, if it is wg's own.

        turns: how many warpgroups have steps by turns; where more than one do, all have.
        """
        later = step - turns + self.slots
        is_due = (step >= turns) & (later < self.total)

        @pl.when(is_due & self._is_of(wg, warpgroups, later))
        def _() -> None:
            for act in (self._wait, self.weights, *self.others):
                act(later)

    def end(self, wg: Array, warpgroups: int) -> None:
        """Waits until the last steps in the slots of warpgroup wg have been read."""

        def wait(step: Array) -> None:
            pl.when(self._is_of(wg, warpgroups, step))(lambda: self._wait(step))

        each(self.total, self.total + self.slots, wait)

    def _is_of(self, wg: Array, warpgroups: int, step: Array) -> Array:
        # Whoever waits for a slot's barrier has to wait for each of its phases.
        slot = lax.rem(step, self.slots).astype(jnp.uint32)
        return lax.rem(slot, jnp.uint32(warpgroups)) == wg.astype(jnp.uint32)

    def _wait(self, step: Array) -> None:
        mosaic.barrier_wait(self.free.at[lax.rem(step, self.slots)])
