"""Products of weights in 4 bits with tokens in the order of words, and what makes these, on a GPU.

Kernels then read eight weights at a time. The norm before a product has tokens in that order, and
so have the units of gates that one kernel multiplies with what they gate.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from jaxrunner.kernels_pallas.mosaic import Shaped
from jaxrunner.kernels_pallas.products import add_norm
from jaxrunner.kernels_pallas.quantized import quantized_fit, quantized_tile
from jaxrunner.linear import Weights
from jaxrunner.operation import Operation
from jaxrunner.ops.packed_parts import PackedParts
from jaxrunner.ops.rounded_tokens import NormForProducts, OrderedTokens, TokensForProducts
from jaxrunner.quantization.quantized_linear import QuantizedLinear
from jaxrunner.types import Array

CODE = "int4"


def units(
    x: Array | OrderedTokens, gate_up: QuantizedLinear, down: Weights, activation: str
) -> Any:
    """Returns the units of a gated MLP, [T, F], of tokens, [T, E], by one kernel, as `down` wants.

    SwiGLU: arXiv:2002.05202.
    """
    of_down = jax.ShapeDtypeStruct((x.shape[0], gate_up.weight.shape[1]), x.dtype)
    for_words, words = _unlike(of_down, down, in_parts=True) is None, isinstance(x, OrderedTokens)
    numbers = x.numbers if isinstance(x, OrderedTokens) else gate_up.inputs(x)[0]
    how: Any = dict(code=gate_up.scheme.code, activation=activation, dtype=x.dtype)
    how |= dict(words=words, for_words=for_words)
    y = quantized_tile.multiply(numbers, *gate_up.matrices(), **how)
    return OrderedTokens(y) if for_words else y


def refuses_units(x: Array | TokensForProducts, gate_up: Weights, activation: str) -> str | None:
    """Says why `units` does not serve these weights, [2, F, E], or None."""
    words = isinstance(x, OrderedTokens)
    if isinstance(x, TokensForProducts) and not words:
        return "wants tokens that come as floats"
    if not isinstance(gate_up, QuantizedLinear) or gate_up.weight.ndim - gate_up.num_in != 2:
        return "wants gates and what they gate, of few bits"
    if gate_up.bias is not None or gate_up.scheme.activation is not None:
        return "wants gates without bias, whose inputs stay floats"
    if gate_up.zero is not None:
        return "wants weights without zero points"
    if gate_up.permutation is not None and (words or gate_up.num_inputs % gate_up.scheme.block[1]):
        return "wants inputs that are held as they come, or whole groups of them"
    return _fit(x, gate_up, activation=activation, words=words)


def _norm(
    x: Array, residual: Array, weight: Array, end: Array | None, **how: Any
) -> tuple[Array, OrderedTokens]:
    total, norm = add_norm.add_rms_norm(x, residual, weight, end=end, for_words=True, **how)
    return total, OrderedTokens(norm)


def _refuses_norm(x: Array, residual: Array, weight: Array, end: Array | None) -> str | None:
    return add_norm.refuses(x, residual, weight, end=end) or add_norm.refuses_words(x)


def _tiles(x: OrderedTokens, w: QuantizedLinear) -> Array:
    return w.outputs(_product(x, w, x.dtype), None, x.dtype)


def _tiles_parts(x: OrderedTokens, w: QuantizedLinear) -> Array:
    return _product(x, w, jnp.float32, in_parts=True)


def _qkv(x: OrderedTokens, w: QuantizedLinear) -> PackedParts:
    y = _product(x, w, jnp.float32, in_parts=True)
    return PackedParts(y.reshape(*y.shape[:2], *w.weight.shape[:-1]), x.dtype)


def _refuses_qkv(x: Array | TokensForProducts, w: QuantizedLinear) -> str | None:
    if (reason := _refuses(x, w, in_parts=True)) is not None:
        return reason
    return quantized_fit.refuses_parts(*w.product_shapes(x), w.scheme.code, words=True)


def _product(x: OrderedTokens, w: QuantizedLinear, dtype: Any, *, in_parts: bool = False) -> Array:
    how: Any = dict(code=w.scheme.code, in_parts=in_parts, dtype=dtype, words=True)
    return quantized_tile.multiply(x.numbers, *w.matrices(), **how)


def _refuses(
    x: Array | TokensForProducts, w: QuantizedLinear, *, in_parts: bool = False
) -> str | None:
    if not isinstance(x, OrderedTokens):
        return "wants tokens in the order of words"
    return _unlike(x, w, in_parts=in_parts)


def _unlike(x: Shaped | OrderedTokens, w: Weights, *, in_parts: bool = False) -> str | None:
    """Says why these weights are not multiplied with tokens, [T, E], in the order of words."""
    if not isinstance(w, QuantizedLinear) or w.scheme.code != CODE:
        return "wants weights in 4 bits"
    if w.scheme.activation is not None or w.zero is not None or (in_parts and w.bias is not None):
        return "wants weights without zero points, parts without bias, inputs that stay floats"
    if w.permutation is not None or w.num_in != 1:
        return "wants one axis of inputs, held as they come"
    return _fit(x, w, in_parts=in_parts, words=True)


def _fit(x: Shaped | OrderedTokens, w: QuantizedLinear, **how: Any) -> str | None:
    found = quantized_fit.fit(*w.product_shapes(x), w.scheme.code, **how)
    return found if isinstance(found, str) else None


QKV = Operation("quantized_tile of words in parts", _qkv, _refuses_qkv)
TILES = Operation("quantized_tile of words", _tiles, _refuses)
TILES_IN_PARTS = Operation(
    "quantized_tile of words in parts", _tiles_parts, functools.partial(_refuses, in_parts=True)
)
NORM = NormForProducts("add_rms_norm for words", _norm, _refuses_norm, _unlike)
