"""A product's weights with the adapters that are on the device, and what these add to it."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from jaxrunner.pytree import leaf, pytree
from jaxrunner.types import Array


@pytree
class Stack:
    """Matrices of all adapters of one product: y += b a x, with the scale in b.

    Of each block of outputs they lie one behind the other, in places of one rank; what an adapter
    does not fill is zero, and adds exact zeros.
    """

    a: Array = leaf("lora_blocks lora_places lora_rank inputs", "param")
    b: Array = leaf("lora_blocks lora_places lora_rank block_outputs", "param")


@pytree
class AdaptedLinear:
    """Stands in for weights of a product in steps in which a request has an adapter.

    It has no `product`: what tokens have which adapter is known to `ops` alone.
    """

    base: Any  # a `Weights`
    stack: Stack

    @property
    def num_inputs(self) -> int:
        """The inputs of its product."""
        return self.base.num_inputs

    def on_shard(self, axis: str) -> "AdaptedLinear":
        """Returns the weights of a device that has some of the inputs of a product.

        What adapters add is a part of a sum there too; a bias is added by one device alone.
        """
        base = self.base.on_shard(axis) if hasattr(self.base, "on_shard") else self.base
        if (bias := getattr(base, "bias", None)) is not None:
            base = replace(base, bias=jnp.where(jax.lax.axis_index(axis) == 0, bias, 0))
        return replace(self, base=base)


def delta(x: Array, stack: Stack, place: Array, dtype: Any) -> Array:
    """Returns what adapters add to a product of x, [T, *inputs]: [T, outputs] in `dtype`, flat.

    place: [T], of each token's adapter, plus one; 0 for none. Two products with the ranks of all
    adapters one behind the other: between them, those of other adapters become zero. Sums are of
    float32, so that a token's bits do not depend on who else is in the batch.
    """
    (T, *_), (blocks, places, rank) = x.shape, stack.a.shape[:3]
    x = x.reshape(T, -1)
    a = stack.a.reshape(blocks * places * rank, -1)
    low = _dot(x, a, (((1,), (1,)), ((), ())), jnp.float32).reshape(T, blocks, places, rank)
    own = place[:, None] == 1 + jnp.arange(places)[None]
    low = jnp.where(own[:, None, :, None], low, 0).astype(x.dtype)
    low = low.reshape(T, blocks, places * rank)
    b = stack.b.reshape(blocks, places * rank, -1)
    if blocks == 1:
        return _dot(low[:, 0], b[0], (((1,), (0,)), ((), ())), dtype)
    return jnp.moveaxis(_dot(low, b, (((2,), (1,)), ((1,), (0,))), dtype), 0, 1).reshape(T, -1)


def _dot(x: Array, y: Array, dims: Any, dtype: Any) -> Array:
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return jax.lax.dot_general(x, y, dims, precision, preferred_element_type=dtype)
