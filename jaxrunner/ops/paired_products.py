"""Products of weights in fp8 with tokens as pairs of fp8, and what makes these, on a GPU."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxrunner.kernels_pallas.mosaic import Shaped
from jaxrunner.kernels_pallas.quantized import (
    add_norm_pairs,
    fp8_pairs,
    quantized_fit,
    quantized_tile,
)
from jaxrunner.linear import Weights
from jaxrunner.operation import Operation
from jaxrunner.ops.rounded_tokens import PairedTokens, norm_in_fp8
from jaxrunner.quantization.fp8 import E4M3
from jaxrunner.quantization.quantized_linear import QuantizedLinear
from jaxrunner.types import Array


def of_gates(both: Array, w: QuantizedLinear) -> Array:
    """Multiplies the units of a SwiGLU, of gates and units, [T, 2, *inputs], as pairs.

    Returns [T, *outputs], or parts of it, [parts, T, E] in float32.
    """
    pairs = fp8_pairs.fp8_pairs(both.reshape(both.shape[0], 2, -1))
    if _refuses_parts(both[:, 0], w) is None:
        return _product(*pairs, w, jnp.float32, in_parts=True)
    return w.outputs(_product(*pairs, w, both.dtype), None, both.dtype)


def refuses_gates(x: Array, w: Weights, activation: str) -> str | None:
    """Says why `of_gates` does not serve the units of tokens, [T, E], or None."""
    if activation != "silu":
        return f"wants gates of silu, got {activation}"
    if not isinstance(w, QuantizedLinear) or w.num_in != 1:
        return "wants weights of few bits with one axis of inputs"
    units = jax.ShapeDtypeStruct((x.shape[0], w.num_inputs), x.dtype)
    return fp8_pairs.refuses(units) or (_refuses_parts(units, w) and _unlike(units, w))


def _tiles(x: PairedTokens, w: QuantizedLinear) -> Array:
    return w.outputs(_product(x.numbers, x.scale, w, x.dtype), None, x.dtype)


def _tiles_parts(x: PairedTokens, w: QuantizedLinear) -> Array:
    return _product(x.numbers, x.scale, w, jnp.float32, in_parts=True)


def _product(
    numbers: Array, scale: Array, w: QuantizedLinear, dtype: Any, *, in_parts: bool = False
) -> Array:
    weight, own, *_ = w.matrices()
    how: Any = dict(code=w.scheme.code, in_parts=in_parts, dtype=dtype)
    return quantized_tile.multiply(numbers, weight, own, scale, **how)


def _refuses(x: Array | PairedTokens, w: QuantizedLinear) -> str | None:
    if not isinstance(x, PairedTokens):
        return "wants tokens that come as pairs of fp8"
    return _unlike(x, w)


def _refuses_tiles_parts(x: Array | PairedTokens, w: QuantizedLinear) -> str | None:
    return _refuses(x, w) or _refuses_parts(x, w)


def _refuses_parts(x: Shaped | PairedTokens, w: QuantizedLinear) -> str | None:
    return "wants weights without bias" if w.bias is not None else _unlike(x, w, in_parts=True)


def _unlike(x: Shaped | PairedTokens, w: QuantizedLinear, *, in_parts: bool = False) -> str | None:
    """Says why these weights are not multiplied with pairs of tokens, [T, E]."""
    if w.scheme.code != E4M3 or w.scheme.activation is not None or w.zero is not None:
        return "wants weights in fp8, without zero points, and inputs that stay floats"
    if w.permutation is not None or w.num_in != 1:
        return "wants one axis of inputs, held as they come"
    _, weight, scale = w.product_shapes(x)
    pairs = jax.ShapeDtypeStruct((2, *x.shape), E4M3)
    found = quantized_fit.fit(pairs, weight, scale, w.scheme.code, in_parts=in_parts)
    return found if isinstance(found, str) else None


TILES = Operation("quantized_tile of pairs", _tiles, _refuses)
TILES_IN_PARTS = Operation("quantized_tile of pairs in parts", _tiles_parts, _refuses_tiles_parts)
NORM = norm_in_fp8(
    "add_norm_pairs", add_norm_pairs.add_norm_pairs, add_norm_pairs.refuses, PairedTokens, _unlike
)
