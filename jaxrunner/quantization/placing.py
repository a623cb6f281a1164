"""Tensors of a quantised checkpoint, [outputs, inputs] each, in the layout of a family's weights.

A family's sources say how float tensors are joined, and so where each output goes. Quantised
numbers and scales are joined by the same sources. Works on numpy arrays only.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
import math
from typing import Any

import numpy as np

from jaxrunner.model import Source
from jaxrunner.quantization.quantized_linear import QuantizedLinear
from jaxrunner.quantization.scheme import CODES

Arrays = list[np.ndarray]


@dataclass(frozen=True)
class Placing:
    """One product's weights: where a float checkpoint has them, and how they are held."""

    source: Source  # of float weights
    num_in: int
    held: QuantizedLinear  # of shapes

    @property
    def modules(self) -> tuple[str, ...]:
        """The names of the modules that are joined."""
        return tuple(name.removesuffix(".weight") for name in self.source.names)

    @property
    def shapes(self) -> tuple[tuple[int, int], ...]:
        """Outputs and inputs of each module."""
        return tuple((rows, math.prod(rest)) for rows, *rest in self.source.shapes)

    def tensors(
        self,
        name: str,
        join: Callable[[Arrays], np.ndarray],
        *shapes: Sequence[int],
        dtypes: tuple[str, ...],
        split: Callable[[np.ndarray], Arrays] | None = None,
    ) -> Source:
        """Returns the source of what is made of one tensor of each module, named `name`."""
        names = tuple(f"{module}.{name}" for module in self.modules)
        return Source(names, tuple(map(tuple, shapes)), join, split, (dtypes,) * len(names))

    def numbers(self, parts: Arrays, groups: Arrays | None = None) -> np.ndarray:
        """Returns the leaf `weight` of what each module's weights are: [outputs, inputs] numbers.

        Those of 4 bits, in bytes, come from 0 to 15. groups: of each module's inputs, where these
        are held sorted by them.
        """
        if groups is not None:
            pairs = zip(parts, map(by_group, groups), strict=True)
            parts = [part.reshape(len(part), -1)[:, inputs] for part, inputs in pairs]
        shaped = [a.reshape(shape) for a, shape in zip(parts, self.source.shapes, strict=True)]
        joined = self.source.join(shaped)
        if CODES[self.held.scheme.code].packed == 1:
            return joined
        return joined[..., ::2] | joined[..., 1::2] << 4

    def scales(self, parts: Arrays) -> np.ndarray:
        """Returns the leaf `scale`, or `zero`, of what the outputs of each module have.

        parts: [outputs, runs of inputs], of as many inputs as `scheme.block` says.

        Raises:
          ValueError: outputs that the family holds side by side share a scale that they must not.
        """
        every = np.concatenate(parts)
        outputs, (rows, length) = self.outputs, self.held.scheme.block
        count = self.held.scale.shape[len(outputs) - 1]
        placed = every[self._rows().reshape(*outputs[:-1], count, -1)]  # [outputs, run, runs]
        placed, others = placed[..., 0, :], placed[..., 1:, :]
        if (others != placed[..., None, :]).any():
            raise ValueError(
                f"{self.modules[0]} has blocks of {rows} outputs that lie in another order here, "
                f"where {outputs[-1] // count} neighbours would share a scale: take a checkpoint "
                "with larger blocks, or with a scale for each output"
            )
        target = self.held.scale.shape[len(outputs) :]
        if length and not self.held.scheme.has_order:
            count = math.prod(target)
            runs = np.arange(count) * (self.shapes[0][1] // count) // length
            placed = placed[..., runs]
        return placed.reshape(self.held.scale.shape)

    def shared(
        self, parts: Arrays, what: str, names: tuple[str, ...], stack: tuple[int, ...]
    ) -> np.ndarray:
        """Returns what must be equal in modules that read the same inputs, [*stack, ...].

        parts: of each module. stack: experts, of which each has inputs of its own; () for none.

        Raises:
          ValueError: it differs between modules of one product.
        """
        modules = np.repeat(np.arange(len(parts)), [rows for rows, _ in self.shapes])
        found = [
            whole([parts[i] for i in own], what, tuple(names[i] for i in own))
            for own in map(np.unique, modules[self._rows()].reshape(math.prod(stack), -1))
        ]
        return np.stack(found).reshape((*stack, *found[0].shape))

    @property
    def outputs(self) -> tuple[int, ...]:
        """The shape of the outputs, as they are held."""
        shape = self.held.weight.shape
        return shape[: len(shape) - self.num_in]

    def _rows(self) -> np.ndarray:
        """Returns which output of the modules, counted through, each one that is held is."""
        counts = [rows for rows, _ in self.shapes]
        ids = np.split(np.arange(sum(counts), dtype=np.int32), np.cumsum(counts)[:-1])
        try:  # one column tells
            rows = self.source.join([own[:, None] for own in ids])
        except ValueError:  # to a join that knows how many there are
            wide = [np.broadcast_to(own[:, None], (len(own), self.shapes[0][1])) for own in ids]
            shaped = [a.reshape(s) for a, s in zip(wide, self.source.shapes, strict=True)]
            rows = self.source.join(shaped)
        return rows.reshape(*self.outputs, -1)[..., 0]


def whole(parts: Arrays, what: str, names: tuple[str, ...]) -> np.ndarray:
    """Returns what must be equal in modules that are joined, as they read the same inputs.

    Raises:
      ValueError: it is not.
    """
    for name, part in zip(names, parts, strict=True):
        if not np.array_equal(part, parts[0]):
            raise ValueError(
                f"{what} of {name} and {names[0]} must be equal, as one product computes both, "
                "got others: quantise them with one setting"
            )
    return parts[0]


def good_scales(parts: Arrays, names: tuple[str, ...], *, signed: bool = False) -> Arrays:
    """Returns scales in float32.

    signed: whether one may be negative, as of programs that use all integers from -8 to 7. Some may
    be 0, to which float16 rounds those of very small weights.

    Raises:
      ValueError: one is NaN, infinite or negative, or all are 0; names their tensor.
    """
    parts = [part.astype(np.float32, copy=False) for part in parts]
    for name, part in zip(names, parts, strict=True):
        good = np.isfinite(part) & part.any() & (signed | (part >= 0))
        if bad := part.size - np.count_nonzero(good):
            raise ValueError(
                f"{name} holds {bad} of {part.size} scales that are NaN, infinite"
                f"{'' if signed else ', negative'} or all 0: download the checkpoint again"
            )
    return parts


def build(held: QuantizedLinear, bias: Any, **leaves: Any) -> QuantizedLinear:
    """Returns the sources of a product's weights."""
    names = ("weight", "scale", "zero", "permutation", "input_scale")
    values: dict[str, Any] = dict.fromkeys(names) | leaves
    return QuantizedLinear(**values, bias=bias, scheme=held.scheme, num_in=held.num_in)


def read_permutation(placing: Placing, names: tuple[str, ...], parts: Arrays) -> np.ndarray:
    """Returns the leaf `permutation` of what each module's tensor says of its inputs' groups.

    Raises:
      ValueError: a group that is none, or has too few inputs, or modules that are joined differ.
    """
    held = placing.held
    assert held.permutation is not None
    num, size = held.scale.shape[-1], held.scheme.block[1]
    stack = held.permutation.shape[: held.permutation.ndim - held.num_in]
    for name, ids in zip(names, parts, strict=True):
        if ids.min() < 0 or ids.max() >= num:
            raise ValueError(
                f"{name} must name groups from 0 to {num - 1}, got {ids.min()} to {ids.max()}: "
                "download the checkpoint again"
            )
    ids = placing.shared(parts, "g_idx", names, stack)
    for name, own in zip(names, parts, strict=True):
        counts = np.bincount(own, minlength=num)
        if (short := np.flatnonzero(counts[:-1] != size)).size:
            group = int(short[0])
            raise ValueError(
                f"{name} must name each group but the last {size} times, got group {group} "
                f"{counts[group]} times: quantise the model again, with group_size={size}"
            )
    return by_group(ids).astype(np.int32).reshape(held.permutation.shape)


def by_group(ids: np.ndarray) -> np.ndarray:
    """Returns inputs sorted by their groups, [..., inputs]; those of one stay in turn."""
    return np.argsort(ids, axis=-1, kind="stable")


def read_scales(placing: Placing, parts: Arrays) -> np.ndarray:
    """Returns the leaf `scale` of tensors `scales`, [groups, outputs], as AWQ and GPTQ store them.

    Raises:
      ValueError: one is NaN or infinite, or all are 0.
    """
    names = tuple(f"{module}.scales" for module in placing.modules)
    return placing.scales([part.T for part in good_scales(parts, names, signed=True)])
