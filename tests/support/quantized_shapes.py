"""Shapes of quantised weights, for kernels that are lowered alone."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from jaxrunner.quantization.quantized_linear import QuantizedLinear
from jaxrunner.quantization.scheme import CODES, Activation, Scheme

FP8 = "float8_e4m3fn"
BOTH_IN_BLOCKS = Scheme(FP8, (128, 128), activation=Activation(FP8, group=128))


def shaped(*shape: int, dtype: Any = jnp.bfloat16) -> Any:
    """Returns the shape and dtype of an array, which is never made."""
    return jax.ShapeDtypeStruct(shape, dtype)


def weights(scheme: Scheme, outputs: int = 512, inputs: int = 1024) -> QuantizedLinear:
    """Returns shapes of weights, [outputs, inputs]."""
    rows, cols = scheme.block
    code = CODES[scheme.code]
    of_scale = (outputs // rows, -(-inputs // cols)) if cols else (outputs // rows,)
    return QuantizedLinear(
        shaped(outputs, inputs // code.packed, dtype=code.stored),
        shaped(*of_scale, dtype=jnp.float32),
        shaped(*of_scale, dtype=jnp.int8) if scheme.has_zero else None,
        shaped(inputs, dtype=jnp.int32) if scheme.has_order else None,
        None, None, scheme,
    )  # fmt: skip


def mlp_weights(scheme: Scheme, E: int = 4096, F: int = 14336) -> tuple[Any, QuantizedLinear]:
    """Returns shapes of the weights of an MLP, gates and what they gate on an axis of outputs."""
    w = weights(scheme, 2 * F, E)
    both = jax.tree.map(lambda a: shaped(2, a.shape[0] // 2, *a.shape[1:], dtype=a.dtype), w)
    return replace(both, permutation=w.permutation), weights(scheme, E, F)
