"""Queries, keys and values whose product comes in parts, which what rotates them adds up."""

from typing import Any, TypeAlias

import jax.numpy as jnp

from jaxrunner.pytree import leaf, pytree, static
from jaxrunner.types import Array


@pytree
class PackedParts:
    """Stands for packed projections, [T, K, P, D]: the sum of parts of their product.

    `Ops.rotate_attend` takes it.
    """

    parts: Array = leaf("parts T K P D", jnp.float32)
    dtype: Any = static()  # of the sum

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the sum."""
        return self.parts.shape[1:]


Qkv: TypeAlias = Array | PackedParts  # packed projections, [T, K, P, D]


def packed(qkv: Qkv) -> Array:
    """Returns packed projections, [T, K, P, D]; of parts their sum, which is rounded once."""
    return qkv.parts.sum(0).astype(qkv.dtype) if isinstance(qkv, PackedParts) else qkv
