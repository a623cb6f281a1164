"""The weights of a product, `ops.linear(x, w)`, as one pytree.

Other ways to store them, such as 8 bits with scales, are other classes that implement `Weights`. A
model names the axes; the class declares which arrays have them.
"""

import math
from typing import ClassVar, Protocol

import jax
import jax.numpy as jnp

from jaxrunner.operation import Operation
from jaxrunner.pytree import leaf, pytree, static
from jaxrunner.types import Array


class Weights(Protocol):
    """The interface of pytrees that hold the weights of a product.

    A class whose product differs on a shard of the inputs has a method `on_shard(mesh_axis)`, which
    returns its stand-in there. Where inputs of a product are whole on all devices, `num_inputs` is
    how many of them a device multiplies.
    """

    kernels: ClassVar[tuple[Operation, ...]]  # (x, w) -> `product`: candidates before plain JAX

    def product(self, x: Array) -> Array:
        """Multiplies x, [..., *inputs], in plain JAX. Returns [..., *outputs]."""
        ...


@pytree
class Linear:
    """Weights in the model's dtype."""

    weight: Array = leaf("outputs inputs", "param")
    bias: Array | None = leaf("outputs", "param", when="bias")
    num_in: int = static(default=1)  # axes of `inputs`
    kernels: ClassVar[tuple[Operation, ...]] = ()

    @property
    def num_inputs(self) -> int:
        """The inputs of its product."""
        return math.prod(self.weight.shape[self.weight.ndim - self.num_in :])

    def product(self, x: Array) -> Array:
        """Multiplies x, [..., *inputs]. Returns [..., *outputs]."""
        return multiply(x, self.weight, self.bias, axes=self.num_in)


def precision_of(x: Array) -> jax.lax.Precision | None:
    """Returns the precision of products of x.

    In float32 none is traded for speed: greedy tokens must not depend on the device.
    """
    return jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None


def per_head(axes: str, x: Array, weight: Array, part: slice) -> Array:
    """Multiplies x, [T, H, ...], with a part of each head's weight, [outputs, H, inputs].

    axes: the einsum's; part: the slice of the outputs.
    """
    return jnp.einsum(axes, x, weight[part], precision=precision_of(x))


def multiply(x: Array, weight: Array, bias: Array | None = None, *, axes: int = 1) -> Array:
    """Multiplies the last `axes` axes of x, [..., *inputs], with those of weight.

    weight: [*outputs, *inputs]; bias: [*outputs].
    """
    rows, out = x.shape[: x.ndim - axes], weight.shape[: weight.ndim - axes]
    size = math.prod(weight.shape[weight.ndim - axes :])
    contracted = ((1,), (1,)), ((), ())
    # As matrices, since XLA copies weights with more axes, transposed, in every step.
    y = jax.lax.dot_general(
        x.reshape(-1, size), weight.reshape(-1, size), contracted, precision=precision_of(x)
    ).reshape(*rows, *out)
    return y if bias is None else y + jnp.broadcast_to(bias, y.shape)
