"""What products with weights of few bits run through on a GPU, by what the weights are."""

from collections.abc import Callable
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from jaxrunner.kernels_pallas import quantized_fit, quantized_matmul
from jaxrunner.operation import Operation
from jaxrunner.quantization.fp8 import E4M3
from jaxrunner.quantization.quantized_linear import QuantizedLinear
from jaxrunner.types import Array

MANY = 16  # fp8 products want tokens, and both sides, in multiples


def matrices(w: QuantizedLinear) -> tuple[Array, ...]:
    """Returns weights, scales and, if any, zero points as matrices."""
    outputs = w.weight.ndim - w.num_in
    weight = w.weight.reshape(math.prod(w.weight.shape[:outputs]), -1)
    scale = w.scale.reshape(math.prod(w.scale.shape[:outputs]), -1)
    zeros = () if w.zero is None else (w.zero.reshape(scale.shape),)
    return weight, scale, *zeros


def _matmul(x: Array, w: QuantizedLinear) -> Array:
    return _whole(quantized_matmul.quantized_matmul, x, w)


def _tiles(x: Array, w: QuantizedLinear) -> Array:
    return _whole(quantized_fit.multiply, x, w)


def _whole(product: Callable[..., Array], x: Array, w: QuantizedLinear) -> Array:
    numbers, x_scale = w.inputs(x)
    dtype = x.dtype if x_scale is None else jnp.dtype(jnp.float32)
    y = product(numbers, *matrices(w), code=w.scheme.code, dtype=dtype)
    return w.outputs(y, x_scale, x.dtype)


def _matmul_parts(x: Array, w: QuantizedLinear) -> Array:
    most = quantized_matmul.MAX_PARTS
    return _parts(functools.partial(quantized_matmul.quantized_matmul, max_parts=most), x, w)


def _tiles_parts(x: Array, w: QuantizedLinear) -> Array:
    return _parts(functools.partial(quantized_fit.multiply, in_parts=True), x, w)


def _parts(product: Callable[..., Array], x: Array, w: QuantizedLinear) -> Array:
    numbers, x_scale = w.inputs(x)
    wide = jnp.dtype(jnp.float32)
    y = product(numbers, *matrices(w), code=w.scheme.code, dtype=wide)
    return y if x_scale is None else y * jnp.broadcast_to(x_scale, y.shape)


def _refuses(x: Array, w: QuantizedLinear, max_parts: int = 1) -> str | None:
    if (reason := _unlike(w, max_parts > 1)) is not None:
        return reason
    return quantized_matmul.refuses(*_shapes(x, w), w.scheme.code, max_parts)


def _refuses_parts(x: Array, w: QuantizedLinear) -> str | None:
    return _refuses(x, w, quantized_matmul.MAX_PARTS)


def _refuses_tiles(x: Array, w: QuantizedLinear, in_parts: bool = False) -> str | None:
    if (reason := _unlike(w, in_parts)) is not None:
        return reason
    if w.zero is not None:
        return "wants weights without zero points"
    found = quantized_fit.fit(*_shapes(x, w), w.scheme.code, in_parts=in_parts)
    return found if isinstance(found, str) else None


def _refuses_tiles_parts(x: Array, w: QuantizedLinear) -> str | None:
    return _refuses_tiles(x, w, in_parts=True)


def _unlike(w: QuantizedLinear, in_parts: bool) -> str | None:
    """Says why no kernel serves these weights."""
    if w.order is not None:
        return "wants groups that are runs of inputs"
    if in_parts and w.bias is not None:
        return "wants weights without bias"
    return None


def _shapes(x: Array, w: QuantizedLinear) -> tuple[Any, Any, Any]:
    """Returns the shapes of tokens, weights and scales as kernels take them."""
    weight, scale, *_ = jax.eval_shape(matrices, w)
    return jax.ShapeDtypeStruct((x.shape[0], math.prod(x.shape[1:])), x.dtype), weight, scale


def _fp8_product(x: Array, w: QuantizedLinear) -> Array:
    """Multiplies fp8 with fp8, which are the numbers that both sides are rounded to."""
    numbers, x_scale = w.inputs(x)
    weight, *_ = matrices(w)
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


OF_FP8 = Operation("fp8 product", _fp8_product, _refuses_fp8)
# Right on a GPU, and not chosen before their times are measured there: they go first, then.
TILES = Operation("quantized_tile", _tiles, _refuses_tiles)
TILES_IN_PARTS = Operation("quantized_tile in parts", _tiles_parts, _refuses_tiles_parts)
WHOLE = (Operation("quantized_matmul", _matmul, _refuses), OF_FP8)
IN_PARTS = (Operation("quantized_matmul in parts", _matmul_parts, _refuses_parts), OF_FP8)
