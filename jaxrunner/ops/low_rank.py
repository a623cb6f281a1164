"""Kernels of what adapters add to a product."""

import jax

from jaxrunner.kernels_pallas import lora_expand, lora_shrink
from jaxrunner.lora.adapted_linear import Stack
from jaxrunner.operation import Operation
from jaxrunner.types import Array

FEW = 64  # tokens, at most, of which these kernels are ahead of XLA's products


def _added(y: Array, x: Array, stack: Stack, place: Array) -> Array:
    return lora_expand.lora_expand(y, _shrunk(x, stack, place), _matrices(stack.b), place)


def _refuses_added(y: Array, x: Array, stack: Stack, place: Array) -> str | None:
    why = _refuses(x, stack, place)
    return why or lora_expand.refuses(y, jax.eval_shape(_matrices, stack.b), place)


def _units(y: Array, x: Array, stack: Stack, place: Array) -> Array:
    return lora_expand.lora_units(y, _shrunk(x, stack, place), _matrices(stack.b), place)


def _refuses_units(y: Array, x: Array, stack: Stack, place: Array) -> str | None:
    why = _refuses(x, stack, place)
    return why or lora_expand.refuses_units(y, jax.eval_shape(_matrices, stack.b), place)


def _shrunk(x: Array, stack: Stack, place: Array) -> Array:
    return lora_shrink.lora_shrink(x, _matrices(stack.a), place)


def _refuses(x: Array, stack: Stack, place: Array) -> str | None:
    if x.shape[0] > FEW:
        return f"is ahead for at most {FEW} tokens, got {x.shape[0]}"
    return lora_shrink.refuses(x, jax.eval_shape(_matrices, stack.a), place)


def _matrices(of: Array) -> Array:
    """Flattens the inputs or outputs of a stack's matrices: [blocks, places, rank, width]."""
    return of.reshape(*of.shape[:3], -1)


ADDED = (Operation("lora_shrink, lora_expand", _added, _refuses_added),)
UNITS = (Operation("lora_shrink, lora_units", _units, _refuses_units),)
