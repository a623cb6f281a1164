"""Chooses implementations of products of tokens and weights, by sizes and kind of weights."""

from collections.abc import Callable
import math
from typing import NamedTuple

import jax.numpy as jnp

from jaxrunner.kernels_pallas.products import gated_mlp, matmul
from jaxrunner.linear import Linear, Weights
from jaxrunner.operation import Note, Operation, run_first
from jaxrunner.ops import (
    banded_products,
    fp8_products,
    paired_products,
    quantized_products,
    word_products,
)
from jaxrunner.ops.packed_parts import Qkv
from jaxrunner.ops.plain import glu, multiply_parts
from jaxrunner.quantization.quantized_linear import QuantizedLinear
from jaxrunner.types import Array

# Where XLA, too, cuts the sum of a product into parts: they are summed by the norm that follows.
TILES, TILE, MAX_PARTS = 256, (64, 128), 8
# Our own products are ahead of XLA's for weights of so many numbers and so few tokens; with gates
# for more tokens too.
BIG, FEW = 1 << 24, 128


class Known(NamedTuple):
    """Candidates of each operation for one class of weights, in their order, before plain JAX."""

    linear: tuple[Operation, ...]
    project_qkv: tuple[Operation, ...]  # ahead of those of `linear`
    project: tuple[Operation, ...]
    gate_up: tuple[Operation, ...]  # of an MLP that is two products


def linear(x: Array, w: Weights, *, note: Note) -> Array:
    """Multiplies x, [T, *inputs]. Returns [T, *outputs]."""
    return run_first("linear", (*w.kernels, *_known(w).linear, PLAIN), x, w, note=note)


def project_qkv(x: Array, w: Weights, *, note: Note) -> Qkv:
    """Multiplies x, [T, E], by [K, P, D, E]. Returns [T, K, P, D], or parts of it."""
    known = _known(w)
    candidates = *w.kernels, *known.project_qkv, *known.linear, PLAIN
    return run_first("linear", candidates, x, w, note=note)


def project(x: Array, w: Weights, *, note: Note) -> Array:
    """Multiplies x, [T, *inputs]. Returns [T, E], or parts of it, [parts, T, E] in float32."""
    return run_first("project", (*w.kernels, *_known(w).project, PLAIN), x, w, note=note)


def mlp(
    x: Array, gate_up: Weights, down: Weights, activation: str = "silu", *,
    beside_experts: bool = False, note: Note,
) -> Array:  # fmt: skip
    """Runs a gated MLP on x, [T, E]. Returns what `project` does.

    beside_experts: leaves out kernels that wait for all of their blocks, which may find no room.
    """
    known = BESIDE_EXPERTS if beside_experts else MLP
    return run_first("mlp", known, x, gate_up, down, activation, note, note=note)


def _known(w: Weights) -> Known:
    """Returns what is asked for weights; for those of an unknown class what says why it refuses."""
    return KNOWN.get(type(w), KNOWN[Linear])


def _gemv(x: Array, w: Linear) -> Array:
    size = math.prod(x.shape[1:])
    terms = x.reshape(1, size).astype(jnp.float32) * w.weight.reshape(-1, size).astype(jnp.float32)
    return terms.sum(1).astype(x.dtype).reshape(1, *w.weight.shape[: w.weight.ndim - w.num_in])


def _refuses_gemv(x: Array, w: Weights) -> str | None:
    if (reason := _unlike(w, num_in=None)) is not None:
        return reason
    assert isinstance(w, Linear)
    if x.shape[0] > 1 or w.weight.size >= BIG:
        return f"is ahead for one token and fewer than {BIG} weights"
    return None


def _matmul(x: Array, w: Linear) -> Array:
    flat = w.weight.reshape(-1, w.weight.shape[-1])
    return matmul.matmul(x, flat).reshape(x.shape[0], *w.weight.shape[:-1])


def _refuses_matmul(x: Array, w: Weights) -> str | None:
    if (reason := _unlike(w)) is not None:
        return reason
    assert isinstance(w, Linear)
    if x.shape[0] > FEW or w.weight.size < BIG:
        return f"is ahead for at most {FEW} tokens and at least {BIG} weights"
    return matmul.refuses(x, w.weight.reshape(-1, w.weight.shape[-1]))


def _parts(x: Array, w: Linear) -> Array:
    return multiply_parts(x, w.weight, num_parts(x.shape[0], w.weight.shape[0]))


def _refuses_parts(x: Array, w: Weights) -> str | None:
    if (reason := _unlike(w, num_in=None)) is not None:
        return reason
    assert isinstance(w, Linear)
    if (parts := num_parts(x.shape[0], w.weight.shape[0])) == 1:
        return "is ahead where the tiles of the product are too few for the chip"
    if math.prod(x.shape[1:]) % (parts * TILE[1]):
        return f"wants sums of a multiple of {parts} x {TILE[1]} terms"
    return None


def refuses_parts(x: Array, w: Weights) -> str | None:
    """Returns why the product of x, [T, E], is not cut into parts for a later kernel, or None."""
    if (reason := _unlike(w)) is not None:
        return reason
    for name, refuses in ("gemv", _refuses_gemv), ("matmul", _refuses_matmul):
        if refuses(x, w) is None:
            return f"leaves the product to {name}"
    return None


def num_parts(T: int, E: int) -> int:
    """Returns the number of parts that sums of T tokens and E outputs are cut into."""
    return max(1, min(MAX_PARTS, TILES * TILE[0] * TILE[1] // (max(T, TILE[0]) * E)))


def _unlike(*weights: Weights, num_in: int | None = 1) -> str | None:
    """Says why kernels of bare arrays do not serve these weights."""
    for w in weights:
        if not isinstance(w, Linear):
            return f"wants weights that are Linear, got {type(w).__name__}"
        if w.bias is not None:
            return "wants weights without bias"
        if num_in is not None and w.num_in != num_in:
            return f"wants {num_in} axis of inputs, got {w.num_in}"
    return None


def _product(x: Array, w: Weights) -> Array:
    return w.product(x)


def _whole_mlp(x: Array, gate_up: Linear, down: Linear, activation: str, note: Note) -> Array:
    return gated_mlp.gated_mlp(x, gate_up.weight, down.weight, activation)


def _refuses_whole_mlp(
    x: Array, gate_up: Weights, down: Weights, activation: str, note: Note
) -> str | None:
    if (reason := _unlike(gate_up, down)) is not None:
        return reason
    assert isinstance(gate_up, Linear) and isinstance(down, Linear)
    return gated_mlp.refuses(x, gate_up.weight, down.weight, activation)


def _glu_mlp(x: Array, gate_up: Linear, down: Weights, activation: str, note: Note) -> Array:
    return project(matmul.glu(x, gate_up.weight, activation), down, note=note)


def _refuses_glu(
    x: Array, gate_up: Weights, down: Weights, activation: str, note: Note
) -> str | None:
    if (reason := _unlike(gate_up) or matmul.refuses_activation(activation)) is not None:
        return reason
    assert isinstance(gate_up, Linear)
    if gate_up.weight.size < BIG:
        return f"is ahead for at least {BIG} weights"
    return matmul.refuses(x, gate_up.weight)


def _tiles_mlp(
    x: Array, gate_up: QuantizedLinear, down: Weights, activation: str, note: Note
) -> Array:
    return project(word_products.units(x, gate_up, down, activation), down, note=note)


def _refuses_tiles(
    x: Array, gate_up: Weights, down: Weights, activation: str, note: Note
) -> str | None:
    return word_products.refuses_units(x, gate_up, activation)


def _by_units(
    name: str, of_gates: Callable[[Array, QuantizedLinear], Array],
    refuses_gates: Callable[[Array, Weights, str], str | None],
) -> Operation:  # fmt: skip
    """Returns an MLP of two products, of which the second makes units of gates by itself."""

    def run(x: Array, gate_up: Weights, down: Weights, activation: str, note: Note) -> Array:
        assert isinstance(down, QuantizedLinear)
        return of_gates(_gate_up(x, gate_up, note), down)

    def refuses(
        x: Array, gate_up: Weights, down: Weights, activation: str, note: Note
    ) -> str | None:
        return refuses_gates(x, down, activation)

    return Operation(f"two products, units {name}", run, refuses)


def _two_products(x: Array, gate_up: Weights, down: Weights, activation: str, note: Note) -> Array:
    return project(glu(_gate_up(x, gate_up, note), activation), down, note=note)


def _gate_up(x: Array, w: Weights, note: Note) -> Array:
    return run_first("gate_up", (*w.kernels, *_known(w).gate_up, PLAIN), x, w, note=note)


PLAIN = Operation("plain JAX", _product)
LINEAR = (Operation("gemv", _gemv, _refuses_gemv), Operation("matmul", _matmul, _refuses_matmul))
PARTS = Operation("plain JAX in parts", _parts, _refuses_parts)
BESIDE_EXPERTS = (
    Operation("glu", _glu_mlp, _refuses_glu),
    fp8_products.MLP,
    banded_products.MLP,
    _by_units("in fp8", fp8_products.of_gates, fp8_products.refuses_gates),
    _by_units("as pairs", paired_products.of_gates, paired_products.refuses_gates),
    Operation("quantized_tile of units", _tiles_mlp, _refuses_tiles),
    Operation("two products", _two_products),
)
MLP = (
    Operation("gated_mlp", _whole_mlp, _refuses_whole_mlp),
    quantized_products.MLP,
    *BESIDE_EXPERTS,
)
KNOWN: dict[type, Known] = {
    Linear: Known(LINEAR, (), (PARTS,), ()),
    QuantizedLinear: Known(
        quantized_products.WHOLE,
        quantized_products.QKV,
        quantized_products.IN_PARTS,
        quantized_products.WHOLE,
    ),
}
