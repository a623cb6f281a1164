"""Products of weights in fp8 with 64 tokens as pairs of fp8 in bands, and their norm, on a GPU.

Gates and what they gate are one product whose units come as pairs, so neither is written.
"""

import functools

import jax

from jaxrunner.kernels_pallas.mosaic import Shaped
from jaxrunner.kernels_pallas.quantized import add_norm_fp8, fp8_tiles
from jaxrunner.kernels_pallas.quantized.fp8_gates import fp8_gates
from jaxrunner.linear import Weights
from jaxrunner.operation import Note, Operation
from jaxrunner.ops import fp8_products
from jaxrunner.ops.rounded_tokens import BandedTokens, norm_in_fp8
from jaxrunner.quantization.fp8 import E4M3
from jaxrunner.quantization.quantized_linear import QuantizedLinear
from jaxrunner.types import Array

TOKENS = 64  # fewer do not fill a tile, more fill two: others are ahead


def _refuses_reader(x: Array, w: QuantizedLinear) -> str | None:
    if w.weight.ndim != 3 or w.weight.shape[0] != 2 or w.bias is not None:
        return "wants gates and what they gate, without bias"
    return _unlike(x, w) or fp8_products.refuses_gates_kernel(_rows(x), w)


def _product(x: BandedTokens, w: QuantizedLinear) -> Array:
    y = fp8_products.of_rounded((x.numbers, x.scale), w, 1, x.dtype, pairs=True)
    return w.outputs(y, None, x.dtype)


def _refuses(x: Array | BandedTokens, w: Weights) -> str | None:
    return None if isinstance(x, BandedTokens) else "wants tokens that come as pairs in bands"


def _mlp(
    x: BandedTokens, gate_up: QuantizedLinear, down: QuantizedLinear, activation: str, note: Note
) -> Array:
    units = fp8_gates(x.numbers, x.scale, *gate_up.matrices(), dtype=x.dtype, pairs=True)
    return fp8_products.of_units(units, down, x.dtype, pairs=True)


def _refuses_mlp(
    x: Array | BandedTokens, gate_up: Weights, down: Weights, activation: str, note: Note
) -> str | None:
    if (reason := _refuses(x, gate_up)) is not None:
        return reason
    if activation != "silu":
        return f"wants gates of silu, got {activation}"
    if not isinstance(down, QuantizedLinear):
        return "wants weights of few bits"
    return _unlike(jax.ShapeDtypeStruct((x.shape[0], down.num_inputs), x.dtype), down)


def _unlike(x: Shaped, w: QuantizedLinear) -> str | None:
    """Says why these weights are not multiplied with tokens, [T, E], in bands, or None."""
    if w.scheme.code != E4M3 or w.scheme.activation is not None or w.zero is not None:
        return "wants weights in fp8, without zero points, and inputs that stay floats"
    if w.permutation is not None or w.num_in != 1:
        return "wants one axis of inputs, held as they come"
    if x.shape[0] != TOKENS:
        return f"is ahead for {TOKENS} tokens, got {x.shape[0]}"
    return fp8_tiles.refuses(*fp8_products.sides(_rows(x), w))


def _rows(x: Shaped) -> Shaped:
    """Returns the shape of the rows of tokens, [T, E]."""
    return jax.ShapeDtypeStruct((2 * x.shape[0], x.shape[1]), x.dtype)


PRODUCT = Operation("fp8_blocks of pairs", _product, _refuses)
MLP = Operation("two products of pairs", _mlp, _refuses_mlp)
NORM = norm_in_fp8(  # that gates alone read
    "add_norm_bands",
    functools.partial(add_norm_fp8.add_norm_fp8, pairs=True),
    functools.partial(add_norm_fp8.refuses, pairs=True),
    BandedTokens,
    _refuses_reader,
)
