"""What products with weights of few bits run through on a GPU, by what the weights are."""

import math

import jax
import jax.numpy as jnp

from jaxrunner.kernels_pallas import quantized_matmul
from jaxrunner.operation import Operation
from jaxrunner.quantization.fp8 import E4M3
from jaxrunner.quantization.quantized_linear import QuantizedLinear
from jaxrunner.types import Array

MANY = 16  # fp8 products want tokens, and both sides, in multiples


def _matrices(w: QuantizedLinear) -> tuple[Array, ...]:
    """Returns weights, scales and, if any, zero points as matrices."""
    outputs = w.weight.ndim - w.num_in
    weight = w.weight.reshape(math.prod(w.weight.shape[:outputs]), -1)
    scale = w.scale.reshape(math.prod(w.scale.shape[:outputs]), -1)
    zeros = () if w.zero is None else (w.zero.reshape(scale.shape),)
    return weight, scale, *zeros


def _matmul(x: Array, w: QuantizedLinear) -> Array:
    numbers, x_scale = w.inputs(x)
    dtype = x.dtype if x_scale is None else jnp.dtype(jnp.float32)
    y = quantized_matmul.quantized_matmul(numbers, *_matrices(w), code=w.scheme.code, dtype=dtype)
    return w.outputs(y, x_scale, x.dtype)


def _parts(x: Array, w: QuantizedLinear) -> Array:
    numbers, x_scale = w.inputs(x)
    most = quantized_matmul.MAX_PARTS
    y = quantized_matmul.quantized_matmul(
        numbers, *_matrices(w), code=w.scheme.code, max_parts=most, dtype=jnp.dtype(jnp.float32)
    )
    return y if x_scale is None else y * jnp.broadcast_to(x_scale, y.shape)


def _refuses(x: Array, w: QuantizedLinear, max_parts: int = 1) -> str | None:
    if w.order is not None:
        return "wants groups that are runs of inputs"
    if max_parts > 1 and w.bias is not None:
        return "wants weights without bias"
    flat = jax.ShapeDtypeStruct((x.shape[0], math.prod(x.shape[1:])), x.dtype)
    weight, scale, *_ = jax.eval_shape(_matrices, w)
    return quantized_matmul.refuses(flat, weight, scale, w.scheme.code, max_parts)


def _refuses_parts(x: Array, w: QuantizedLinear) -> str | None:
    return _refuses(x, w, quantized_matmul.MAX_PARTS)


def _fp8_product(x: Array, w: QuantizedLinear) -> Array:
    """Multiplies fp8 with fp8, which are the numbers that both sides are rounded to."""
    numbers, x_scale = w.inputs(x)
    weight, *_ = _matrices(w)
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
WHOLE = (Operation("quantized_matmul", _matmul, _refuses), OF_FP8)
IN_PARTS = (Operation("quantized_matmul in parts", _parts, _refuses_parts), OF_FP8)
