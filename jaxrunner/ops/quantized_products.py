"""Chooses implementations of products with quantised weights on a GPU, by their scheme."""

from collections.abc import Callable
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from jaxrunner.kernels_pallas.mosaic import Shaped
from jaxrunner.kernels_pallas.quantized import (
    fp8_blocks,
    quantized_fit,
    quantized_matmul,
    quantized_mlp,
)
from jaxrunner.kernels_pallas.quantized.fp8_gates import fp8_gates
from jaxrunner.kernels_pallas.quantized.fp8_gates import refuses as refuses_fp8_gates
from jaxrunner.kernels_pallas.quantized.fp8_rounding import fp8_rounding
from jaxrunner.kernels_pallas.quantized.fp8_rounding import refuses as refuses_rounding
from jaxrunner.kernels_pallas.quantized.fp8_tiles import TERMS, TuningConfig
from jaxrunner.kernels_pallas.quantized.fp8_tiles import refuses as refuses_fp8
from jaxrunner.linear import Weights
from jaxrunner.operation import Note, Operation
from jaxrunner.quantization import sorted_inputs
from jaxrunner.quantization.fp8 import E4M3
from jaxrunner.quantization.quantized_linear import QuantizedLinear
from jaxrunner.types import Array

MANY = 16  # fp8 products want tokens, and both sides, in multiples
FEWEST = 64  # tokens of products of fp8 blocks: for fewer, weights are widened as they are read


def matrices(w: QuantizedLinear) -> tuple[Array, ...]:
    """Returns weights, scales and, if any, zero points as matrices."""
    outputs = w.weight.ndim - w.num_in
    weight = w.weight.reshape(math.prod(w.weight.shape[:outputs]), -1)
    scale = w.scale.reshape(math.prod(w.scale.shape[:outputs]), -1)
    zeros = () if w.zero is None else (w.zero.reshape(scale.shape),)
    if w.permutation is None:
        return weight, scale, *zeros
    size = w.scheme.block[1]
    own = (sorted_inputs.own_groups(a, w.num_inputs, size, w.across) for a in (scale, *zeros))
    return weight, *own


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
    if w.permutation is not None and w.num_inputs % w.scheme.block[1]:
        return "wants whole groups of inputs"
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


def _fp8_blocks(x: Array, w: QuantizedLinear) -> Array:
    """Multiplies fp8 with fp8, which share scales by runs of inputs."""
    y = _of_rounded(_rounding(x), w, 1, x.dtype)
    return w.outputs(y, None, x.dtype)


def _fp8_blocks_parts(x: Array, w: QuantizedLinear) -> Array:
    return _of_rounded(_rounding(x), w, _num_parts(x.shape[0], w), jnp.float32)


def _rounding(x: Array) -> tuple[Array, Array]:
    return fp8_rounding(x.reshape(x.shape[0], -1))


def _of_rounded(
    rounded: tuple[Array, Array], w: QuantizedLinear, parts: int, dtype: Any
) -> Array:
    config = TuningConfig(parts=parts)
    return fp8_blocks.fp8_blocks(*rounded, *matrices(w), dtype=dtype, config=config)


def _of_units(units: tuple[Array, Array], w: QuantizedLinear, dtype: Any) -> Array:
    """Returns [T, *outputs], or parts of it, [parts, T, E] in float32."""
    parts = _num_parts(units[0].shape[0], w)
    if parts > 1 and w.bias is None:
        return _of_rounded(units, w, parts, jnp.float32)
    return w.outputs(_of_rounded(units, w, 1, dtype), None, dtype)


def of_gates(both: Array, w: QuantizedLinear) -> Array:
    """Multiplies the units of a SwiGLU, of gates and units, [T, 2, *inputs], in fp8.

    Returns [T, *outputs], or parts of it, [parts, T, E] in float32.
    """
    return _of_units(fp8_rounding(both.reshape(both.shape[0], 2, -1)), w, both.dtype)


def refuses_gates(x: Array, w: Weights, activation: str) -> str | None:
    """Says why `of_gates` does not serve the units of tokens, [T, E], or None."""
    if activation != "silu":
        return f"wants gates of silu, got {activation}"
    if not isinstance(w, QuantizedLinear) or w.num_in != 1:
        return "wants weights of few bits with one axis of inputs"
    return _refuses_fp8_blocks(jax.ShapeDtypeStruct((x.shape[0], w.num_inputs), x.dtype), w)


def _num_parts(T: int, w: QuantizedLinear) -> int:
    return fp8_blocks.num_parts(T, w.num_inputs, w.weight.size // w.num_inputs)


def _refuses_fp8_blocks_parts(x: Shaped, w: QuantizedLinear) -> str | None:
    if (reason := _refuses_fp8_blocks(x, w) or _unlike(w, in_parts=True)) is not None:
        return reason
    parts = _num_parts(x.shape[0], w)
    return "is ahead where tiles are too few for the chip" if parts == 1 else None


def _refuses_fp8_blocks(x: Shaped, w: QuantizedLinear) -> str | None:
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
    return refuses_rounding(tokens) or refuses_fp8(*_sides(tokens, w))


def _sides(tokens: Shaped, w: QuantizedLinear) -> tuple[Shaped, Shaped, Shaped, Shaped]:
    """Returns the shapes of tokens, [T, E], in fp8, of their scales, and of weights and theirs."""
    (T, E), (weight, scale, *_) = tokens.shape, jax.eval_shape(matrices, w)
    x_scale = jax.ShapeDtypeStruct((E // TERMS, T), jnp.float32)
    return jax.ShapeDtypeStruct((T, E), E4M3), x_scale, weight, scale


def _fp8_mlp(
    x: Array, gate_up: QuantizedLinear, down: QuantizedLinear, activation: str, note: Note
) -> Array:
    units = fp8_gates(*_rounding(x), *matrices(gate_up), dtype=x.dtype)
    return _of_units(units, down, x.dtype)


def _refuses_fp8_mlp(
    x: Array, gate_up: Weights, down: Weights, activation: str, note: Note
) -> str | None:
    if (reason := refuses_gates(x, down, activation)) is not None:
        return reason
    if not isinstance(gate_up, QuantizedLinear) or gate_up.num_in != 1:
        return "wants weights of few bits with one axis of inputs"
    if (reason := _refuses_fp8_blocks(x, gate_up) or _unlike(gate_up, in_parts=True)) is not None:
        return reason
    return refuses_fp8_gates(*_sides(x, gate_up))


def _whole_mlp(
    x: Array, gate_up: QuantizedLinear, down: QuantizedLinear, activation: str, note: Note
) -> Array:
    first, second = (quantized_mlp.Few(*matrices(w)) for w in (gate_up, down))
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
    first, second = (quantized_mlp.Few(*_shapes(x, w)[1:]) for w in (gate_up, down))
    return quantized_mlp.refuses(x, first, second, code)


OF_FP8_BLOCKS = Operation("fp8_blocks", _fp8_blocks, _refuses_fp8_blocks)
OF_FP8_BLOCKS_IN_PARTS = Operation(
    "fp8_blocks in parts", _fp8_blocks_parts, _refuses_fp8_blocks_parts
)
MLP = Operation("quantized_mlp", _whole_mlp, _refuses_whole_mlp)
FP8_MLP = Operation("two products in fp8", _fp8_mlp, _refuses_fp8_mlp)
OF_FP8 = Operation("fp8 product", _fp8_product, _refuses_fp8)
TILES = Operation("quantized_tile", _tiles, _refuses_tiles)
TILES_IN_PARTS = Operation("quantized_tile in parts", _tiles_parts, _refuses_tiles_parts)
MATMUL = Operation("quantized_matmul", _matmul, _refuses)
MATMUL_IN_PARTS = Operation("quantized_matmul in parts", _matmul_parts, _refuses_parts)
WHOLE = OF_FP8_BLOCKS, TILES, MATMUL, OF_FP8
IN_PARTS = OF_FP8_BLOCKS_IN_PARTS, OF_FP8_BLOCKS, TILES_IN_PARTS, MATMUL_IN_PARTS, OF_FP8
