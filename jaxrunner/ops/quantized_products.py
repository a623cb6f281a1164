"""Chooses implementations of products with quantised weights on a GPU, by their scheme."""

from collections.abc import Callable
import functools
import math

import jax
import jax.numpy as jnp

from jaxrunner.kernels_pallas.quantized import (
    quantized_fit,
    quantized_matmul,
    quantized_mlp,
    quantized_tile,
)
from jaxrunner.linear import Weights
from jaxrunner.operation import Note, Operation
from jaxrunner.ops import banded_products, fp8_products, paired_products, word_products
from jaxrunner.quantization.fp8 import E4M3
from jaxrunner.quantization.quantized_linear import QuantizedLinear
from jaxrunner.types import Array

MANY = 16  # fp8 products want tokens, and both sides, in multiples


def _matmul(x: Array, w: QuantizedLinear) -> Array:
    return _whole(quantized_matmul.quantized_matmul, x, w)


def _tiles(x: Array, w: QuantizedLinear) -> Array:
    return _whole(quantized_tile.multiply, x, w)


def _whole(product: Callable[..., Array], x: Array, w: QuantizedLinear) -> Array:
    numbers, x_scale = w.inputs(x)
    dtype = x.dtype if x_scale is None else jnp.dtype(jnp.float32)
    y = product(numbers, *w.matrices(), code=w.scheme.code, dtype=dtype)
    return w.outputs(y, x_scale, x.dtype)


def _matmul_parts(x: Array, w: QuantizedLinear) -> Array:
    most = quantized_matmul.MAX_PARTS
    return _parts(functools.partial(quantized_matmul.quantized_matmul, max_parts=most), x, w)


def _tiles_parts(x: Array, w: QuantizedLinear) -> Array:
    return _parts(functools.partial(quantized_tile.multiply, in_parts=True), x, w)


def _parts(product: Callable[..., Array], x: Array, w: QuantizedLinear) -> Array:
    numbers, x_scale = w.inputs(x)
    wide = jnp.dtype(jnp.float32)
    y = product(numbers, *w.matrices(), code=w.scheme.code, dtype=wide)
    return y if x_scale is None else y * jnp.broadcast_to(x_scale, y.shape)


def _refuses(x: Array, w: QuantizedLinear, max_parts: int = 1) -> str | None:
    if (reason := _unlike(w, max_parts > 1)) is not None:
        return reason
    return quantized_matmul.refuses(*w.product_shapes(x), w.scheme.code, max_parts)


def _refuses_parts(x: Array, w: QuantizedLinear) -> str | None:
    return _refuses(x, w, quantized_matmul.MAX_PARTS)


def _refuses_tiles(x: Array, w: QuantizedLinear, in_parts: bool = False) -> str | None:
    if (reason := _unlike(w, in_parts)) is not None:
        return reason
    if w.zero is not None:
        return "wants weights without zero points"
    found = quantized_fit.fit(*w.product_shapes(x), w.scheme.code, in_parts=in_parts)
    return found if isinstance(found, str) else None


def _refuses_tiles_parts(x: Array, w: QuantizedLinear) -> str | None:
    return _refuses_tiles(x, w, in_parts=True)


def _unlike(w: QuantizedLinear, in_parts: bool) -> str | None:
    """Says why no kernel serves these weights."""
    if w.permutation is not None and w.num_inputs % w.scheme.block[1]:
        return "wants whole groups of inputs"
    if in_parts and w.bias is not None:
        return "wants weights without bias"
    return None


def _fp8_product(x: Array, w: QuantizedLinear) -> Array:
    """Multiplies fp8 with fp8, which are the numbers that both sides are rounded to."""
    numbers, x_scale = w.inputs(x)
    weight, *_ = w.matrices()
    y = jax.lax.dot_general(
        numbers.astype(E4M3), weight, (((1,), (1,)), ((), ())), precision=jax.lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )  # fmt: skip
    return w.outputs(w.scaled(y), x_scale, x.dtype)


def _refuses_fp8(x: Array, w: QuantizedLinear) -> str | None:
    scheme = w.scheme
    if scheme.code != E4M3 or scheme.activation is None or scheme.activation.code != E4M3:
        return "wants weights and inputs in fp8"
    if scheme.is_grouped or scheme.activation.group:
        return "wants a scale for all inputs of a token, and of an output"
    if x.shape[0] % MANY or w.weight.size % (MANY * math.prod(x.shape[1:])):
        return f"wants tokens and outputs in multiples of {MANY}"
    return None


def _whole_mlp(
    x: Array, gate_up: QuantizedLinear, down: QuantizedLinear, activation: str, note: Note
) -> Array:
    first, second = (quantized_mlp.Few(*w.matrices()) for w in (gate_up, down))
    return quantized_mlp.quantized_mlp(x, first, second, code=gate_up.scheme.code)


def _refuses_whole_mlp(
    x: Array, gate_up: Weights, down: Weights, activation: str, note: Note
) -> str | None:
    if activation != "silu":
        return f"wants gates of silu, got {activation}"
    if not (isinstance(gate_up, QuantizedLinear) and isinstance(down, QuantizedLinear)):
        return "wants weights of few bits"
    for w in gate_up, down:
        if (reason := _unlike(w, in_parts=True)) is not None:
            return reason
        if w.permutation is not None:
            return "wants inputs that are held as they come"
        if w.zero is not None or w.scheme.activation is not None or w.num_in != 1:
            return "wants weights without zero points, with one axis of inputs that stay floats"
    code = gate_up.scheme.code
    if code != down.scheme.code:
        return f"wants weights of one kind, got {code} and {down.scheme.code}"
    first, second = (quantized_mlp.Few(*w.product_shapes(x)[1:]) for w in (gate_up, down))
    return quantized_mlp.refuses(x, first, second, code)


MLP = Operation("quantized_mlp", _whole_mlp, _refuses_whole_mlp)
OF_FP8 = Operation("fp8 product", _fp8_product, _refuses_fp8)
TILES = Operation("quantized_tile", _tiles, _refuses_tiles)
TILES_IN_PARTS = Operation("quantized_tile in parts", _tiles_parts, _refuses_tiles_parts)
MATMUL = Operation("quantized_matmul", _matmul, _refuses)
MATMUL_IN_PARTS = Operation("quantized_matmul in parts", _matmul_parts, _refuses_parts)
WHOLE = (
    fp8_products.BLOCKS,
    banded_products.PRODUCT,
    paired_products.TILES,
    word_products.TILES,
    TILES,
    MATMUL,
    OF_FP8,
)
QKV = (word_products.QKV,)
IN_PARTS = (
    fp8_products.IN_PARTS,
    fp8_products.BLOCKS,
    paired_products.TILES_IN_PARTS,
    paired_products.TILES,
    word_products.TILES_IN_PARTS,
    word_products.TILES,
    TILES_IN_PARTS,
    MATMUL_IN_PARTS,
    OF_FP8,
)
