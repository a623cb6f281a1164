"""Kernels of products with adapters."""

import math
from typing import Any

import jax

from jaxrunner.kernels_pallas.lora import lora_expand, lora_shrink, prefill_units
from jaxrunner.kernels_pallas.mosaic import Shaped
from jaxrunner.kernels_pallas.products import add_norm
from jaxrunner.lora.adapted_linear import MOST_RANKS, AdaptedLinear, Stack, own_ranks
from jaxrunner.model import AdapterOps
from jaxrunner.operation import Operation
from jaxrunner.ops import products
from jaxrunner.ops.adapters.adapted_parts import AdaptedParts
from jaxrunner.ops.plain import multiply_parts
from jaxrunner.types import Array

FEW = 64  # tokens, at most, of which these kernels are ahead of XLA's products
MANY = 1024  # tokens, at least, of which `prefill_units` is ahead of XLA's product and SwiGLU
# Tokens, at most, of which `lora_expand` sums up parts of a base product sooner than the norm does.
FEWEST = 8


def _added(y: Array, x: Array, stack: Stack, place: Array) -> Array:
    return lora_expand.lora_expand(y, _shrunk(x, stack, place), _matrices(stack.b), place)


def _refuses_added(y: Shaped, x: Array, stack: Stack, place: Array) -> str | None:
    return _refuses(x, stack, place) or lora_expand.refuses(y, _shape(stack.b), place)


def _late(y: Array, x: Array, stack: Stack, place: Array) -> Any:
    low = _shrunk(x, stack, place)
    return AdaptedParts(y, low, _matrices(stack.b), place, lora_expand.lora_expand)


def _refuses_late(y: Array, x: Array, stack: Stack, place: Array) -> str | None:
    if y.ndim == 2:
        return "is ahead where the norm sums up parts of the base product"
    if (rank := stack.a.shape[2]) > add_norm.MAX_RANK:
        return f"wants at most {add_norm.MAX_RANK} ranks, got {rank}"
    return _refuses_added(y, x, stack, place)


def _whole(y: Array, x: Array, stack: Stack, place: Array) -> Array:
    low = _shrunk(x, stack, place)
    return lora_expand.lora_expand(y, low, _matrices(stack.b), place, whole=True)


def _refuses_whole(y: Shaped, x: Array, stack: Stack, place: Array) -> str | None:
    if y.ndim == 2:
        return "is ahead where a base product is in parts"
    if x.shape[0] > FEWEST:
        return f"is ahead for at most {FEWEST} tokens, got {x.shape[0]}"
    return _refuses_added(y, x, stack, place)


def _units(y: Array, x: Array, stack: Stack, place: Array, activation: str) -> Array:
    return lora_expand.lora_units(y, _shrunk(x, stack, place), _matrices(stack.b), place)


def _refuses_units(y: Array, x: Array, stack: Stack, place: Array, activation: str) -> str | None:
    if reason := _refuses_gate(activation) or _refuses(x, stack, place):
        return reason
    return lora_expand.refuses_units(y, _shape(stack.b), place)


def _refuses_gate(activation: str) -> str | None:
    return None if activation == "silu" else f"wants gates of silu, got {activation}"


def _units_of_many(y: Array, x: Array, stack: Stack, place: Array, activation: str) -> Array:
    low = own_ranks(x, stack, place)
    return prefill_units.prefill_units(y, low, _matrices(stack.b), place)


def _refuses_many(y: Array, x: Array, stack: Stack, place: Array, activation: str) -> str | None:
    if reason := _refuses_gate(activation):
        return reason
    if x.shape[0] < MANY:
        return f"is ahead for at least {MANY} tokens, got {x.shape[0]}"
    if (ranks := math.prod(stack.a.shape[1:3])) > MOST_RANKS:
        return f"is ahead for at most {MOST_RANKS} ranks of all places, got {ranks}"
    return prefill_units.refuses(y, _shape(stack.b), place)


def _summed(x: Array, w: AdaptedLinear, place: Array) -> Array:
    outputs, weight = w.base.weight.shape[:-1], w.base.weight
    y = multiply_parts(x, weight.reshape(-1, weight.shape[-1]), _num_parts(x, w))
    return _whole(y, x, w.stack, place).reshape(x.shape[0], *outputs)


def _refuses_summed(x: Array, w: AdaptedLinear, place: Array) -> str | None:
    if reason := products.refuses_parts(x, w.base):
        return reason
    if (parts := _num_parts(x, w)) == 1:
        return "is ahead where the tiles of the product are too few for the chip"
    T, N = x.shape[0], math.prod(w.base.weight.shape[:-1])
    y = jax.ShapeDtypeStruct((parts, T, N), "float32")
    return _refuses_added(y, x, w.stack, place)


def _num_parts(x: Array, w: AdaptedLinear) -> int:
    """Returns into how many parts the sums are cut: a power of two, as XLA takes it."""
    outputs = math.prod(w.base.weight.shape[:-1])
    return 1 << (products.num_parts(x.shape[0], outputs).bit_length() - 1)


def _shrunk(x: Array, stack: Stack, place: Array) -> Array:
    return lora_shrink.lora_shrink(x, _matrices(stack.a), place)


def _refuses(x: Array, stack: Stack, place: Array) -> str | None:
    if x.shape[0] > FEW:
        return f"is ahead for at most {FEW} tokens, got {x.shape[0]}"
    return lora_shrink.refuses(x, _shape(stack.a), place)


def _matrices(of: Array) -> Array:
    """Flattens the inputs or outputs of a stack's matrices: [blocks, places, rank, width]."""
    return of.reshape(*of.shape[:3], -1)


def _shape(of: Array) -> jax.ShapeDtypeStruct:
    return jax.eval_shape(_matrices, of)


_ADDED = Operation("lora_shrink, lora_expand", _added, _refuses_added)
KERNELS = AdapterOps(
    summed=(Operation("lora_shrink, lora_expand of parts", _summed, _refuses_summed),),
    linear=(_ADDED,),
    project=(
        Operation("lora_shrink, lora_expand of parts", _whole, _refuses_whole),
        Operation("lora_shrink, add_rms_norm", _late, _refuses_late),
        _ADDED,
    ),
    units=(
        Operation("lora_shrink, lora_units", _units, _refuses_units),
        Operation("prefill_units", _units_of_many, _refuses_many),
    ),
)
