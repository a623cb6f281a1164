"""Rounds float weights to 8 bits with a scale for each output, from a checkpoint or a trainer."""

from dataclasses import dataclass, replace
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from jaxrunner.config import DTYPES
from jaxrunner.linear import Linear
from jaxrunner.mixtures.experts import Experts
from jaxrunner.model import Source
from jaxrunner.quantization.modules import HEAD, is_named
from jaxrunner.quantization.placing import Arrays, Placing, build
from jaxrunner.quantization.quantized_experts import QuantizedExperts
from jaxrunner.quantization.quantized_linear import QuantizedLinear
from jaxrunner.quantization.scheme import CODES, Scheme
from jaxrunner.types import Array

OF_NAME = {"fp8": "float8_e4m3fn", "int8": "int8"}  # in `LLM(quantization=...)`


@dataclass(frozen=True)
class PerChannel:
    """Weights of a float checkpoint, rounded while they load. Inputs of products stay as they are.

    The largest weight of an output is the largest number: 448 of fp8, 127 of int8.
    """

    name: str  # in OF_NAME

    def scheme(self, module: str, shape: tuple[int, int]) -> Scheme | None:
        """Returns how a module is held; None for a head, which stays as it is."""
        return None if is_named(module, (HEAD,)) else Scheme(OF_NAME[self.name])

    @property
    def stacks(self) -> Scheme | None:
        """How experts are held that a checkpoint has in one tensor."""
        return Scheme(OF_NAME[self.name])

    def sources(self, placing: Placing, bias: Source | None) -> QuantizedLinear:
        """Returns where a product's leaves come from: number and scale of the same tensors."""
        joins = {leaf: functools.partial(_rounded, placing, leaf) for leaf in ("weight", "scale")}
        source, kinds = placing.source, (DTYPES,) * len(placing.source.names)
        leaves = {
            leaf: source._replace(join=join, split=None, dtypes=kinds)
            for leaf, join in joins.items()
        }
        return build(placing.held, bias, **leaves)


def _rounded(placing: Placing, leaf: str, parts: Arrays) -> np.ndarray:
    joined, code = placing.source.join(parts), CODES[placing.held.scheme.code]
    wide = joined.reshape(math.prod(placing.outputs), -1).astype(np.float32)
    # A row of zeros has a scale of 1; NaN stays NaN, for `check_nan` to find.
    largest = np.abs(wide).max(1)
    scale = np.where(largest == 0, np.float32(1), largest / np.float32(code.most))
    if leaf == "scale":
        return scale.reshape(placing.outputs)
    numbers = wide / scale[:, None]
    if code.stored == "int8":
        return np.round(numbers).astype(np.int8).reshape(joined.shape)
    return _to_fp8(numbers).reshape(joined.shape)


def _to_fp8(numbers: np.ndarray) -> np.ndarray:
    """Rounds float32 to the nearest e4m3, thrice as fast as numpy does: by their upper halves.

    A lower half that is not zero sets the last bit of the upper one, which keeps what is just past
    the middle of two numbers there.
    """
    bits = numbers.view(np.uint32)
    upper = (bits >> 16).astype(np.uint16)
    upper |= (bits & 0xFFFF) != 0
    return _fp8_of_halves()[upper]


@functools.cache
def _fp8_of_halves() -> np.ndarray:
    """Returns what each upper half of a float32 is as e4m3, [65536]."""
    halves = np.arange(1 << 16, dtype=np.uint32) << 16
    with np.errstate(invalid="ignore"):  # infinity is NaN
        return halves.view(np.float32).astype(ml_dtypes.float8_e4m3fn)


def of_floats(params: Any, like: Any) -> Any:
    """Returns a tree of weights with `Linear` where `like` has 8 bits, rounded as these are.

    A trainer's tree, like that of the model without quantisation, becomes one that an engine takes;
    any other is returned as it is. On the devices of `like`, in one program.

    Raises:
      ValueError: weights in a format that is read from checkpoints alone.
    """
    params = _in_products(params, like)
    held, treedef = jax.tree.flatten(like, is_leaf=_is_quantized)
    if not any(map(_is_quantized, held)):
        return params
    try:
        given = treedef.flatten_up_to(params)
    except Exception:  # of JAX, and of objects in another tree: who compares the two says where
        return params
    at = [i for i, (old, new) in enumerate(zip(held, given, strict=True)) if _is_float(new, old)]
    if not at:
        return params
    schemes = tuple(held[i].scheme for i in at)
    if bad := next((s for s in schemes if s not in map(Scheme, OF_NAME.values())), None):
        raise ValueError(
            f"params hold float weights for a product in {bad}: only quantization='fp8' and 'int8' "
            "of a float checkpoint round them, give the numbers and scales of the format"
        )
    where = tuple((held[i].weight.sharding, held[i].scale.sharding) for i in at)
    floats = [given[i] for i in at]
    made = _rounding(schemes, tuple(x.num_in for x in floats), where)([x.weight for x in floats])
    for i, (weight, scale) in zip(at, made, strict=True):
        given[i] = replace(held[i], weight=weight, scale=scale, bias=given[i].bias)
    return jax.tree.unflatten(treedef, given)


def _in_products(params: Any, like: Any) -> Any:
    """Returns a tree of weights with experts as products where `like` has some of few bits."""

    def is_experts(node: Any) -> bool:
        return isinstance(node, QuantizedExperts)

    held, treedef = jax.tree.flatten(like, is_leaf=is_experts)
    if not any(map(is_experts, held)):
        return params
    try:
        given = treedef.flatten_up_to(params)
    except Exception:  # as in `of_floats`
        return params
    pairs = zip(held, given, strict=True)
    made = [
        QuantizedExperts.of(new) if is_experts(old) and isinstance(new, Experts) else new
        for old, new in pairs
    ]
    return jax.tree.unflatten(treedef, made)


def _is_quantized(node: Any) -> bool:
    return isinstance(node, QuantizedLinear)


def _is_float(new: Any, old: Any) -> bool:
    """Whether these are float weights that those of 8 bits are made of."""
    return (
        isinstance(old, QuantizedLinear)
        and isinstance(new, Linear)
        and isinstance(new.weight, jax.Array | np.ndarray)
        and not (isinstance(new.weight, jax.Array) and new.weight.is_deleted())
        and new.weight.shape == old.weight.shape
        and jnp.issubdtype(new.weight.dtype, jnp.floating)
        and new.num_in == old.num_in
    )


@functools.lru_cache(maxsize=8)  # a function that is new each time would be compiled each time
def _rounding(schemes: tuple[Scheme, ...], num_in: tuple[int, ...], where: Any) -> Any:
    """Returns what makes numbers and scales, where they are to lie, of all float weights."""

    def run(weights: list[Array]) -> tuple[tuple[Array, Array], ...]:
        return tuple(map(_device_rounded, weights, schemes, num_in))

    return jax.jit(run, out_shardings=where)


def _device_rounded(weight: Array, scheme: Scheme, num_in: int) -> tuple[Array, Array]:
    """Returns what `_rounded` does."""
    axes, code = tuple(range(weight.ndim - num_in, weight.ndim)), CODES[scheme.code]
    wide = weight.astype(jnp.float32)
    largest = jnp.abs(wide).max(axes, keepdims=True)
    scale = jnp.where(largest == 0, 1.0, largest / code.most)
    numbers = wide / scale
    if code.stored == "int8":
        numbers = jnp.round(numbers)
    return numbers.astype(code.stored), scale.reshape(weight.shape[: axes[0]])
