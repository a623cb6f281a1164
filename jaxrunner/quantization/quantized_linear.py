"""Quantised weights of a product, and the product in plain JAX."""

from dataclasses import replace
import math
from typing import Any, ClassVar, TypeAlias

import jax
import jax.numpy as jnp

from jaxrunner.linear import precision_of
from jaxrunner.operation import Operation
from jaxrunner.pytree import leaf, pytree, static
from jaxrunner.quantization import sorted_inputs
from jaxrunner.quantization.activations import rounded
from jaxrunner.quantization.scheme import CODES, Scheme
from jaxrunner.types import Array

Shape: TypeAlias = jax.ShapeDtypeStruct

E8M0_BIAS = 127


@pytree
class QuantizedLinear:
    """Stands in for `Linear`: (weight - zero) * scale is what it multiplies with.

    The axes of scales are those of weights, in runs that share one; `scheme` says of what. A stack,
    of a mixture's experts, is the first axis of outputs; each of it has inputs of its own.
    """

    weight: Array = leaf("outputs stored", "stored_dtype")
    scale: Array = leaf("scale_outputs scale_inputs", "scale_dtype")
    zero: Array | None = leaf("scale_outputs scale_inputs", jnp.int8, when="zero")
    # The input at each place, where inputs are held sorted by their groups: `sorted_inputs`.
    permutation: Array | None = leaf("stack inputs", jnp.int32, when="permutation")
    input_scale: Array | None = leaf("stack", jnp.float32, when="input_scale")
    bias: Array | None = leaf("outputs", "param", when="bias")
    scheme: Scheme = static(default=Scheme("int8"))
    num_in: int = static(default=1)  # axes of `inputs`
    across: str | None = static(default=None)  # axis of a mesh that inputs are cut over
    kernels: ClassVar[tuple[Operation, ...]] = ()

    def product(self, x: Array) -> Array:
        """Multiplies x, [..., *inputs]. Returns [..., *outputs].

        The sum is of float32. Weights with a scale for several runs of inputs are multiplied with
        it first, in the dtype of x; those with one for all inputs are as exact as they are stored.
        """
        # Tied to x, so that no compiler widens weights before their turn, or once for all turns of
        # a loop: the model would lie there whole.
        x, w = jax.lax.optimization_barrier((x, self))
        dtype, (x, x_scale) = x.dtype, w.inputs(x)
        if w.scheme.is_grouped:
            values = w._values(dtype)
            y = _dot(x, values.reshape(-1, values.shape[-1]))
        else:
            y = w.scaled(_dot(x, w.weight.reshape(-1, x.shape[-1]).astype(dtype)))
        return w.outputs(y, x_scale, dtype)

    def matrices(self) -> tuple[Array, ...]:
        """Returns weights, scales and, if any, zero points as matrices."""
        outputs = self.weight.ndim - self.num_in
        weight = self.weight.reshape(math.prod(self.weight.shape[:outputs]), -1)
        scale = self.scale.reshape(math.prod(self.scale.shape[:outputs]), -1)
        zeros = () if self.zero is None else (self.zero.reshape(scale.shape),)
        if self.permutation is None:
            return weight, scale, *zeros
        size, own = self.scheme.block[1], sorted_inputs.own_groups
        return weight, *(own(a, self.num_inputs, size, self.across) for a in (scale, *zeros))

    def product_shapes(self, x: Any) -> tuple[Shape, Shape, Shape]:
        """Returns the shapes of x, [T, *inputs], as [T, inputs], and of weights and scales.

        These are the first two of `matrices`.
        """
        tokens = jax.ShapeDtypeStruct((x.shape[0], self.num_inputs), x.dtype)
        weight, scale, *_ = jax.eval_shape(QuantizedLinear.matrices, self)
        return tokens, weight, scale

    @property
    def num_inputs(self) -> int:
        """The inputs of its product."""
        stored = math.prod(self.weight.shape[self.weight.ndim - self.num_in :])
        return stored * CODES[self.scheme.code].packed

    def inputs(self, x: Array) -> tuple[Array, Array | None]:
        """Returns x, [..., *inputs], as [..., inputs], rounded where the scheme says so.

        They come as the weights have them. Also what its products are to be multiplied with,
        [..., 1] in float32, or None.
        """
        x = x.reshape(*x.shape[: x.ndim - self.num_in], -1)
        if self.scheme.activation is None:
            return self._by_place(x), None
        numbers, scale = rounded(x, self.scheme.activation, self.input_scale, self.across)
        if scale.shape[-1] > 1 or self.scheme.is_grouped:
            return self._by_place(_times(numbers, scale, x.dtype)), None
        return self._by_place(numbers), scale

    def _by_place(self, x: Array) -> Array:
        if self.permutation is None:
            return x
        return sorted_inputs.by_place(x, self._flat(self.permutation), self.across)

    def _flat(self, permutation: Array) -> Array:
        """Returns it with its axes of inputs as one."""
        return permutation.reshape(*permutation.shape[: permutation.ndim - self.num_in], -1)

    def scaled(self, y: Array) -> Array:
        """Multiplies sums of numbers, [..., outputs], with the scales of outputs."""
        return y * jnp.broadcast_to(self.scale.reshape(-1), y.shape)

    def outputs(self, y: Array, x_scale: Array | None, dtype: Any) -> Array:
        """Returns sums, [..., outputs], as [..., *outputs] with their bias, in `dtype`."""
        y = y if x_scale is None else y * jnp.broadcast_to(x_scale, y.shape)
        outputs = self.weight.shape[: self.weight.ndim - self.num_in]
        y = y.astype(dtype).reshape(*y.shape[:-1], *outputs)
        return y if self.bias is None else y + jnp.broadcast_to(self.bias, y.shape)

    def values(self, dtype: Any = jnp.float32) -> Array:
        """Returns the weights that the numbers stand for, [*outputs, inputs], inputs flat."""
        values = self._values(dtype)
        if self.permutation is None:
            return values
        return sorted_inputs.by_input(values, self._flat(self.permutation), self.across)

    def _values(self, dtype: Any) -> Array:
        """Returns `values` with inputs as they are held."""
        numbers = self._numbers()
        scale, zero = self._spread(self.scale), self.zero
        if self.scheme.scale == "uint8":
            scale = jnp.ldexp(jnp.float32(1), scale.astype(jnp.int32) - E8M0_BIAS)
        if zero is not None:
            numbers = numbers - self._spread(zero).astype(jnp.float32)
        return (numbers * scale).astype(dtype)

    def _numbers(self) -> Array:
        """Returns the numbers themselves in float32, [*outputs, inputs]."""
        flat = self.weight.reshape(*self.weight.shape[: self.weight.ndim - self.num_in], -1)
        if CODES[self.scheme.code].packed == 1:
            return flat.astype(jnp.float32)
        halves = jnp.stack([flat & 15, flat >> 4], -1).reshape(*flat.shape[:-1], -1)
        if self.scheme.code == "int4":
            return halves.astype(jnp.float32) - 8.0
        return jnp.asarray(E2M1, jnp.float32)[halves]

    def _spread(self, scale: Array) -> Array:
        """Returns scales, [*outputs, inputs], of runs."""
        outputs = self.weight.shape[: self.weight.ndim - self.num_in]
        scale = scale.reshape(*scale.shape[: len(outputs)], -1)
        scale = jnp.repeat(scale, outputs[-1] // scale.shape[-2], axis=-2)
        if self.permutation is not None:
            size = self.scheme.block[1]
            return sorted_inputs.spread(scale, self.num_inputs, size, self.across)
        return jnp.repeat(scale, self.num_inputs // scale.shape[-1], axis=-1)

    def on_shard(self, axis: str) -> "QuantizedLinear":
        """Returns the weights of a device that has some of the inputs of a product."""
        return replace(self, across=axis)


E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


def _dot(x: Array, weight: Array) -> Array:
    """Multiplies x, [..., inputs], with weight, [outputs, inputs], into float32."""
    contracted = (((x.ndim - 1,), (1,)), ((), ()))
    return jax.lax.dot_general(
        x, weight, contracted, precision=precision_of(x), preferred_element_type=jnp.float32
    )


def _times(x: Array, scale: Array, dtype: Any) -> Array:
    """Returns x, [..., inputs], times its scales, [..., groups]."""
    wide = jnp.repeat(scale, x.shape[-1] // scale.shape[-1], axis=-1)
    return (x.astype(jnp.float32) * wide).astype(dtype)
