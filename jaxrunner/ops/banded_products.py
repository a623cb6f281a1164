"""Products of weights in fp8 with 64 tokens as pairs of fp8 in bands, and their norm, on a GPU.

Gates and what they gate are one product whose units come as pairs, so neither is written.
"""

from collections.abc import Sequence
import functools
from typing import Any

import jax
import jax.numpy as jnp

from jaxrunner.kernels_pallas.mosaic import OWN_REGISTERS, Shaped
from jaxrunner.kernels_pallas.quantized import add_norm_fp8, fp8_blocks, fp8_tiles
from jaxrunner.kernels_pallas.quantized.fp8_gates import fp8_gates
from jaxrunner.kernels_pallas.quantized.fp8_gates import refuses as refuses_kernel
from jaxrunner.kernels_pallas.quantized.fp8_tiles import TERMS, TuningConfig
from jaxrunner.linear import Weights
from jaxrunner.operation import Note, Operation
from jaxrunner.ops.rounded_tokens import BandedTokens, add_norm_in_fp8
from jaxrunner.quantization.fp8 import E4M3
from jaxrunner.quantization.quantized_linear import QuantizedLinear
from jaxrunner.types import Array

TOKENS = 64  # fewer do not fill a tile, more fill two: others are ahead


def add_norm_of(readers: Sequence[Weights]) -> Operation:
    """Returns the `add_norm` whose norm comes in bands, where gates alone read it."""
    kernel = functools.partial(add_norm_fp8.add_norm_fp8, pairs=True)
    refuses = functools.partial(add_norm_fp8.refuses, pairs=True)
    return add_norm_in_fp8(
        "add_norm_bands", kernel, refuses, BandedTokens, readers, _refuses_reader
    )


def _refuses_reader(x: Array, w: QuantizedLinear) -> str | None:
    if w.weight.ndim != 3 or w.weight.shape[0] != 2 or w.bias is not None:
        return "wants gates and what they gate, without bias"
    if not OWN_REGISTERS:
        return "wants JAX 0.11, whose compiler gives warpgroups registers of their own"
    return _unlike(x, w) or refuses_kernel(*_sides(x, w))


def _product(x: BandedTokens, w: QuantizedLinear) -> Array:
    return w.outputs(_summed(x, w, 1, x.dtype), None, x.dtype)


def _refuses(x: Array | BandedTokens, w: QuantizedLinear) -> str | None:
    return None if isinstance(x, BandedTokens) else "wants tokens that come as pairs in bands"


def _mlp(
    x: BandedTokens, gate_up: QuantizedLinear, down: QuantizedLinear, activation: str, note: Note
) -> Array:
    weights = gate_up.matrices()
    units = BandedTokens(
        *fp8_gates(x.numbers, x.scale, *weights, dtype=x.dtype, pairs=True), x.dtype
    )
    parts = _num_parts(units, down)
    return _product(units, down) if parts == 1 else _summed(units, down, parts, jnp.float32)


def _refuses_mlp(
    x: Array | BandedTokens, gate_up: Weights, down: Weights, activation: str, note: Note
) -> str | None:
    if not isinstance(x, BandedTokens):
        return "wants tokens that come as pairs in bands"
    if activation != "silu":
        return f"wants gates of silu, got {activation}"
    if not isinstance(down, QuantizedLinear):
        return "wants weights of few bits"
    units = jax.ShapeDtypeStruct((x.shape[0], down.num_inputs), x.dtype)
    return _unlike(units, down)


def _num_parts(x: BandedTokens, w: QuantizedLinear) -> int:
    rows, outputs = x.numbers.shape[0], w.weight.size // w.num_inputs
    return 1 if w.bias is not None else fp8_blocks.num_parts(rows, w.num_inputs, outputs)


def _summed(x: BandedTokens, w: QuantizedLinear, parts: int, dtype: Any) -> Array:
    how: Any = dict(dtype=dtype, pairs=True, config=TuningConfig(parts=parts))
    return fp8_blocks.fp8_blocks(x.numbers, x.scale, *w.matrices(), **how)


def _unlike(x: Shaped, w: QuantizedLinear) -> str | None:
    """Says why these weights are not multiplied with tokens, [T, E], in bands, or None."""
    if w.scheme.code != E4M3 or w.scheme.activation is not None or w.zero is not None:
        return "wants weights in fp8, without zero points, and inputs that stay floats"
    if w.permutation is not None or w.num_in != 1:
        return "wants one axis of inputs, held as they come"
    if x.shape[0] != TOKENS:
        return f"is ahead for {TOKENS} tokens, got {x.shape[0]}"
    return fp8_tiles.refuses(*_sides(x, w))


def _sides(x: Shaped, w: QuantizedLinear) -> tuple[Shaped, Shaped, Shaped, Shaped]:
    """Returns the shapes of pairs of tokens, [T, E], of their scales, and of weights and theirs."""
    (T, E), (weight, scale, *_) = x.shape, jax.eval_shape(QuantizedLinear.matrices, w)
    x_scale = jax.ShapeDtypeStruct((E // TERMS, 2 * T), jnp.float32)
    return jax.ShapeDtypeStruct((2 * T, E), E4M3), x_scale, weight, scale


PRODUCT = Operation("fp8_blocks of pairs", _product, _refuses)
MLP = Operation("two products of pairs", _mlp, _refuses_mlp)
