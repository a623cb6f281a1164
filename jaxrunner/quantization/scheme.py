"""How quantised weights of a product are held: the code of numbers, and what shares a scale."""

from collections.abc import Mapping
from dataclasses import dataclass
import math
from typing import Any, NamedTuple

Given = Mapping[str, Any]  # a family's axes and flags, as `pytree.nested` has it


class Code(NamedTuple):
    """A kind of numbers. value = (number - zero point) * scale."""

    stored: str  # dtype of the array that holds them
    packed: int  # numbers in one of its elements, the first in the lowest bits
    most: float  # the largest


CODES = {
    "float8_e4m3fn": Code("float8_e4m3fn", 1, 448.0),
    "int8": Code("int8", 1, 127.0),
    "int4": Code("uint8", 2, 7.0),  # number + 8 in each half of a byte
    "float4_e2m1fn": Code("uint8", 2, 6.0),
}


@dataclass(frozen=True)
class Activation:
    """How the inputs of a product are rounded before it."""

    code: str  # "float8_e4m3fn" or "int8"
    static: bool = False  # whether the checkpoint has the scale; else each token has its own
    group: int = 0  # inputs of a token that share a scale; 0 for all


@dataclass(frozen=True)
class Scheme:
    """How the weights of a product are held. Lengths are in weights."""

    code: str  # in CODES
    block: tuple[int, int] = (1, 0)  # outputs and inputs that share a scale; 0 for all inputs
    has_zero: bool = False  # whether zero points are other than 0
    # Whether each input of a checkpoint says its group: they are held sorted by these.
    has_order: bool = False
    scale: str = "float32"  # dtype of scales; "uint8" is the exponent of a power of two, plus 127
    activation: Activation | None = None

    def describe(self) -> str:
        """Returns it in words, for a report."""
        rows, cols = self.block
        of = f"{rows} x {cols or 'all'}"
        zero, order = " with zero points" * self.has_zero, " in an order" * self.has_order
        inputs = f", inputs in {self.activation.code}" if self.activation else ""
        return f"{self.code} with a scale for {of} weights{zero}{order}{inputs}"

    @property
    def is_grouped(self) -> bool:
        """Whether an output's weights are more than its numbers times one scale."""
        return bool(self.block[1] or self.has_zero or CODES[self.code].packed > 1)

    def declare(self, given: Given, dims: Given) -> tuple[dict[str, Any], dict[str, Any]]:
        """Returns what is given for `QuantizedLinear` and its dims, from what is for `Linear`.

        given: "stack" is the axis of outputs of which each has inputs of its own, if there is one.

        Raises:
          ValueError: an odd number of inputs, of which two share a byte.
        """
        code, (rows, cols) = CODES[self.code], self.block
        outputs, inputs = given["outputs"].split(), given["inputs"].split()
        if dims[inputs[-1]] % code.packed:
            raise ValueError(
                f"{self.code} holds {code.packed} weights in a byte, got {dims[inputs[-1]]} inputs "
                f"along {inputs[-1]}: take a checkpoint of 8 bits"
            )
        static = self.activation is not None and self.activation.static
        own: dict[str, Any] = dict(
            stored_dtype=code.stored, scale_dtype=self.scale, scheme_zero=self.has_zero,
            scheme_order=self.has_order, static_inputs=static,
        )  # fmt: skip
        if self.has_order:
            own["groups"] = -(-math.prod(dims[axis] for axis in inputs) // cols)
        runs = [*inputs[:-1], _run(inputs[-1], cols, dims)] if cols else []
        axes = dict(
            stack=given.get("stack", ""),
            stored=" ".join([*inputs[:-1], _run(inputs[-1], code.packed)]),
            scale_outputs=" ".join([*outputs[:-1], _run(outputs[-1], rows, dims)]),
            scale_inputs="groups" if self.has_order else " ".join(runs),
        )
        flags = dict(zero="scheme_zero", permutation="scheme_order", input_scale="static_inputs")
        return {**given, **axes, **flags, "scheme": self}, {**dims, **own}


def _run(axis: str, length: int, dims: Given | None = None) -> str:
    """Returns the axis of runs along `axis`: of `length`, or with `dims` as long as divide it."""
    length = length if dims is None else math.gcd(length, dims[axis])
    return axis if length == 1 else f"{axis}/{length}"
