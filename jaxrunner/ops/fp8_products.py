"""Products of fp8 with fp8 whose scales are of blocks, and what rounds their inputs, on a GPU."""

import math
from typing import Any

import jax
import jax.numpy as jnp

from jaxrunner.kernels_pallas.mosaic import Shaped
from jaxrunner.kernels_pallas.quantized import add_norm_fp8, fp8_blocks
from jaxrunner.kernels_pallas.quantized.fp8_gates import fp8_gates
from jaxrunner.kernels_pallas.quantized.fp8_gates import refuses as refuses_fp8_gates
from jaxrunner.kernels_pallas.quantized.fp8_rounding import fp8_rounding
from jaxrunner.kernels_pallas.quantized.fp8_rounding import refuses as refuses_rounding
from jaxrunner.kernels_pallas.quantized.fp8_tiles import TERMS, TuningConfig
from jaxrunner.kernels_pallas.quantized.fp8_tiles import refuses as refuses_fp8
from jaxrunner.linear import Weights
from jaxrunner.operation import Note, Operation
from jaxrunner.ops.rounded_tokens import RoundedTokens, norm_in_fp8
from jaxrunner.quantization.fp8 import E4M3
from jaxrunner.quantization.quantized_linear import QuantizedLinear
from jaxrunner.types import Array

FEWEST = 64  # tokens: for fewer, weights are widened as they are read


def _blocks(x: Array | RoundedTokens, w: QuantizedLinear) -> Array:
    """Multiplies fp8 with fp8, which share scales by runs of inputs."""
    y = of_rounded(_rounding(x), w, 1, x.dtype)
    return w.outputs(y, None, x.dtype)


def _in_parts(x: Array | RoundedTokens, w: QuantizedLinear) -> Array:
    return of_rounded(_rounding(x), w, _num_parts(x.shape[0], w), jnp.float32)


def _rounding(x: Array | RoundedTokens) -> tuple[Array, Array]:
    if isinstance(x, RoundedTokens):
        return x.numbers, x.scale
    return fp8_rounding(x.reshape(x.shape[0], -1))


def of_rounded(
    rounded: tuple[Array, Array], w: QuantizedLinear, parts: int, dtype: Any, *, pairs: bool = False
) -> Array:
    """Multiplies rows in fp8 and their scales, which `pairs` are in bands, as `fp8_blocks` does."""
    how: Any = dict(dtype=dtype, pairs=pairs, config=TuningConfig(parts=parts))
    return fp8_blocks.fp8_blocks(*rounded, *w.matrices(), **how)


def of_units(
    units: tuple[Array, Array], w: QuantizedLinear, dtype: Any, *, pairs: bool = False
) -> Array:  # fmt: skip
    """Returns [T, *outputs], or parts of it, [parts, T, E] in float32."""
    parts = _num_parts(units[0].shape[0], w)
    if parts > 1 and w.bias is None:
        return of_rounded(units, w, parts, jnp.float32, pairs=pairs)
    return w.outputs(of_rounded(units, w, 1, dtype, pairs=pairs), None, dtype)


def of_gates(both: Array, w: QuantizedLinear) -> Array:
    """Multiplies the units of a SwiGLU, of gates and units, [T, 2, *inputs], in fp8.

    Returns [T, *outputs], or parts of it, [parts, T, E] in float32.
    """
    return of_units(fp8_rounding(both.reshape(both.shape[0], 2, -1)), w, both.dtype)


def refuses_gates(x: Array, w: Weights, activation: str) -> str | None:
    """Says why `of_gates` does not serve the units of tokens, [T, E], or None."""
    if activation != "silu":
        return f"wants gates of silu, got {activation}"
    if not isinstance(w, QuantizedLinear) or w.num_in != 1:
        return "wants weights of few bits with one axis of inputs"
    return _refuses(jax.ShapeDtypeStruct((x.shape[0], w.num_inputs), x.dtype), w)


def _num_parts(T: int, w: QuantizedLinear) -> int:
    return fp8_blocks.num_parts(T, w.num_inputs, w.weight.size // w.num_inputs)


def _refuses_parts(x: Shaped, w: QuantizedLinear) -> str | None:
    if (reason := _refuses(x, w)) is not None:
        return reason
    if w.bias is not None:
        return "wants weights without bias"
    parts = _num_parts(x.shape[0], w)
    return "is ahead where tiles are too few for the chip" if parts == 1 else None


def _refuses(x: Shaped, w: QuantizedLinear) -> str | None:
    activation = w.scheme.activation
    if w.scheme.code != E4M3 or activation is None or activation.code != E4M3:
        return "wants weights and inputs in fp8"
    if activation.group != TERMS or activation.static or w.zero is not None:
        return f"wants inputs of a token that share a scale by {TERMS}, and no zero points"
    if w.permutation is not None:
        return "wants inputs that are held as they come"
    if x.shape[0] < FEWEST:
        return f"is for at least {FEWEST} tokens, got {x.shape[0]}"
    tokens = jax.ShapeDtypeStruct((x.shape[0], math.prod(x.shape[1:])), x.dtype)
    return refuses_rounding(tokens) or refuses_fp8(*sides(tokens, w))


def sides(tokens: Shaped, w: QuantizedLinear) -> tuple[Shaped, Shaped, Shaped, Shaped]:
    """Returns the shapes of tokens, [T, E], in fp8, of their scales, and of weights and theirs."""
    (T, E), (_, weight, scale) = tokens.shape, w.product_shapes(tokens)
    x_scale = jax.ShapeDtypeStruct((E // TERMS, T), jnp.float32)
    return jax.ShapeDtypeStruct((T, E), E4M3), x_scale, weight, scale


def _mlp(
    x: Array | RoundedTokens,
    gate_up: QuantizedLinear,
    down: QuantizedLinear,
    activation: str,
    note: Note,
) -> Array:
    units = fp8_gates(*_rounding(x), *gate_up.matrices(), dtype=x.dtype)
    return of_units(units, down, x.dtype)


def _refuses_mlp(
    x: Array, gate_up: Weights, down: Weights, activation: str, note: Note
) -> str | None:
    if (reason := refuses_gates(x, down, activation)) is not None:
        return reason
    if not isinstance(gate_up, QuantizedLinear) or gate_up.num_in != 1:
        return "wants weights of few bits with one axis of inputs"
    if gate_up.bias is not None:
        return "wants gates without bias"
    return _refuses(x, gate_up) or refuses_gates_kernel(x, gate_up)


def refuses_gates_kernel(rows: Shaped, gate_up: QuantizedLinear) -> str | None:
    """Says why `fp8_gates` does not serve rows in fp8 of these shapes, [rows, E], or None."""
    return refuses_fp8_gates(*sides(rows, gate_up))


BLOCKS = Operation("fp8_blocks", _blocks, _refuses)
IN_PARTS = Operation("fp8_blocks in parts", _in_parts, _refuses_parts)
MLP = Operation("two products in fp8", _mlp, _refuses_mlp)
# Rounded as all that read it would round it.
NORM = norm_in_fp8(
    "add_norm_fp8", add_norm_fp8.add_norm_fp8, add_norm_fp8.refuses, RoundedTokens, _refuses
)
