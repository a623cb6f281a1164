"""What products with weights of few bits run through on a GPU, by what the weights are."""

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from jaxrunner.kernels_pallas import quantized_matmul
from jaxrunner.operation import Operation
from jaxrunner.types import Array

if TYPE_CHECKING:
    from jaxrunner.quantization.quantized_linear import QuantizedLinear


def _flat(x: Array, w: "QuantizedLinear") -> tuple[Array, ...]:
    """Returns tokens, weights, scales and zero points as matrices."""
    outputs = w.weight.ndim - w.num_in
    weight = w.weight.reshape(np.prod(w.weight.shape[:outputs]), -1)
    scale = w.scale.reshape(np.prod(w.scale.shape[:outputs]), -1)
    zeros = () if w.zero is None else (w.zero.reshape(scale.shape),)
    return x.reshape(x.shape[0], -1), weight, scale, *zeros


def _matmul(x: Array, w: "QuantizedLinear") -> Array:
    y = quantized_matmul.quantized_matmul(*_flat(x, w), code=w.scheme.code)
    y = y.reshape(x.shape[0], *w.weight.shape[: w.weight.ndim - w.num_in])
    return y if w.bias is None else y + jnp.broadcast_to(w.bias, y.shape)


def _parts(x: Array, w: "QuantizedLinear") -> Array:
    most = quantized_matmul.MAX_PARTS
    return quantized_matmul.quantized_matmul(*_flat(x, w), code=w.scheme.code, max_parts=most)


def _refuses(x: Array, w: "QuantizedLinear", max_parts: int = 1) -> str | None:
    if w.scheme.activation is not None:
        return f"wants inputs in {x.dtype}, the scheme rounds them to {w.scheme.activation.code}"
    if w.order is not None:
        return "wants groups that are runs of inputs"
    if max_parts > 1 and w.bias is not None:
        return "wants weights without bias"
    x, weight, scale, *_ = jax.eval_shape(_flat, x, w)
    return quantized_matmul.refuses(x, weight, scale, w.scheme.code, max_parts)


def _refuses_parts(x: Array, w: "QuantizedLinear") -> str | None:
    return _refuses(x, w, quantized_matmul.MAX_PARTS)


WHOLE = Operation("quantized_matmul", _matmul, _refuses)
IN_PARTS = Operation("quantized_matmul in parts", _parts, _refuses_parts)
