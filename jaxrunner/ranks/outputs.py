"""The outputs that a launch returns of all data ranks, read as of one."""

from typing import Any, cast

import jax
import numpy as np

from jaxrunner.device.packing import Layout
from jaxrunner.program.program import Program


def output_layout(program: Program, spec: Any) -> Layout:
    """Returns what reads packed outputs of `spec`, those of all data ranks where there are such."""
    layout, D = Layout(spec), program.num_ranks
    return layout if D == 1 else cast(Layout, RankedLayout(layout, D))


def scores_layout(program: Program, spec: Any) -> Layout:
    """Returns what reads packed scores of prompt tokens."""
    layout, D = Layout(spec), program.num_ranks
    scores = RankedScores(layout, D, program.dims["R"])
    return layout if D == 1 else cast(Layout, scores)


class RankedLayout:
    """Reads packed vectors that lie one behind another, into arrays that do so."""

    def __init__(self, layout: Layout, num_ranks: int):
        self._layout, self._num = layout, num_ranks

    def read(self, vector: np.ndarray) -> Any:
        """Returns the tree of all ranks."""
        parts = [self._layout.read(part) for part in np.split(vector, self._num)]
        return jax.tree.map(lambda *x: np.concatenate(x), *parts)


class RankedScores(RankedLayout):
    """Reads slots, positions and logprobs. Slots count on from rank to rank."""

    def __init__(self, layout: Layout, num_ranks: int, num_slots: int):
        super().__init__(layout, num_ranks)
        self._num_slots = num_slots

    def read(self, vector: np.ndarray) -> Any:
        """Returns the tree of all ranks."""
        slots, *rest = super().read(vector)
        rank = np.arange(slots.size) // (slots.size // self._num)
        return slots + rank * self._num_slots, *rest
