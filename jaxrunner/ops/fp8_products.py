"""Products of many tokens with fp8 weights in blocks, whose inputs are rounded to fp8 by blocks."""

import math

import jax
import jax.numpy as jnp

from jaxrunner.kernels_pallas import fp8_blocks
from jaxrunner.kernels_pallas.fp8_blocks import TERMS
from jaxrunner.operation import Operation
from jaxrunner.ops.quantized_products import matrices
from jaxrunner.quantization.activations import rounded
from jaxrunner.quantization.fp8 import E4M3
from jaxrunner.quantization.quantized_linear import QuantizedLinear
from jaxrunner.types import Array

FEWEST = 257  # tokens: weights are read as they are stored, and widened, for fewer


def _product(x: Array, w: QuantizedLinear) -> Array:
    assert w.scheme.activation is not None
    flat = x.reshape(x.shape[0], -1)
    numbers, x_scale = rounded(flat, w.scheme.activation, w.input_scale, w.across)
    weight, scale = matrices(w)
    y = fp8_blocks.fp8_blocks(numbers.astype(E4M3), x_scale, weight, scale, dtype=x.dtype)
    return w.outputs(y, None, x.dtype)


def _refuses(x: Array, w: QuantizedLinear) -> str | None:
    activation = w.scheme.activation
    if w.scheme.code != E4M3 or activation is None or activation.code != E4M3:
        return "wants weights and inputs in fp8"
    if activation.group != TERMS or activation.static or w.zero is not None or w.order is not None:
        return f"wants inputs of a token that share a scale by {TERMS}, and no zero points or order"
    if x.shape[0] < FEWEST:
        return f"is for at least {FEWEST} tokens, got {x.shape[0]}"
    if x.dtype not in (jnp.bfloat16, jnp.float16):
        return f"wants tokens in bfloat16 or float16, got {x.dtype}"
    E, (weight, scale) = math.prod(x.shape[1:]), jax.eval_shape(matrices, w)
    numbers = jax.ShapeDtypeStruct((x.shape[0], E), E4M3)
    x_scale = jax.ShapeDtypeStruct((x.shape[0], E // TERMS), jnp.float32)
    return fp8_blocks.refuses(numbers, x_scale, weight, scale)


# Not run on a GPU yet, and so not chosen: to choose it, it joins `linear`, `project` and `gate_up`
# of QuantizedLinear in `products.KNOWN`.
OF_BLOCKS = Operation("fp8 blocks", _product, _refuses)
