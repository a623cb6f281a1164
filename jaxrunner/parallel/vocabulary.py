"""Reductions over a row of logits that may be sharded over the vocabulary.

If a row has all tokens, each is an operation on the row. On a mesh devices exchange a few numbers
for each row, never the row itself.
"""

from typing import Any

import jax
import jax.numpy as jnp

from jaxrunner.parallel.mesh import TENSOR
from jaxrunner.pytree import pytree, static

Array = jax.Array
MAX_TOKENS = 1 << 24  # ids and counts are told as float32, which has no more whole numbers


@pytree
class Vocabulary:
    """Equal runs of consecutive ids, one for each device; a device's rows have its own run.

    Methods reduce rows, [..., S], over the last axis and all devices, which all get the result.
    """

    num_shards: int = static(default=1)

    @property
    def is_whole(self) -> bool:
        """Whether a row has all tokens."""
        return self.num_shards == 1

    def first(self, size: int) -> Array:
        """Returns the id of the first of a row's `size` tokens."""
        return jax.lax.axis_index(TENSOR) * size

    def local(self, ids: Array, size: int) -> Array:
        """Returns the index of tokens in a row of `size`; `size` for tokens of other devices."""
        if self.is_whole:
            return ids
        at = ids - self.first(size)
        return jnp.where((at >= 0) & (at < size), at, size)

    def own(self, x: Array, size: int) -> Array:
        """Returns the part of x, [V or more], for a row's `size` tokens."""
        if self.is_whole:
            return x[:size]
        return jax.lax.dynamic_slice_in_dim(x, self.first(size), size)

    def each(self, x: Array) -> Array:
        """Gathers x of each device, [num_shards, ...], in the order of ids.

        Adds arrays that are 0 elsewhere, which is exact: XLA has fast kernels for small sums only.
        """
        own = jnp.arange(self.num_shards) == jax.lax.axis_index(TENSOR)
        return jax.lax.psum(
            jnp.where(jnp.expand_dims(own, range(1, 1 + x.ndim)), x[None], 0), TENSOR
        )

    def max(self, x: Array) -> Array:
        """Returns the largest, [...]; NaN where there is one."""
        # XLA's maximum of a long row passes over NaN on a CPU.
        best = jnp.where(jnp.isnan(x).any(-1), jnp.nan, x.max(-1))
        return best if self.is_whole else self.each(best).max(0)

    def sum(self, x: Array, dtype: Any = None) -> Array:
        """Returns the sum, [...]: of each device's, in the order of ids."""
        total = x.sum(-1, dtype=dtype)
        if self.is_whole:
            return total
        return self.each(total.astype(jnp.float32)).sum(0).astype(total.dtype)

    def any(self, x: Array) -> Array:
        """Returns whether any is true, [...]."""
        return x.any(-1) if self.is_whole else self.sum(x, jnp.int32) > 0

    def cumsum(self, x: Array) -> Array:
        """Returns how many are true up to and including each token, [..., S], int32."""
        count = jnp.cumsum(x, -1, dtype=jnp.int32)
        if self.is_whole:
            return count
        others = self.each(count[..., -1].astype(jnp.float32)).astype(jnp.int32)
        before = jnp.cumsum(others, 0) - others
        return count + before[jax.lax.axis_index(TENSOR)][..., None]

    def argmax(self, x: Array) -> Array:
        """Returns the id of the first of the largest, [...], or of the first NaN."""
        at = jnp.argmax(x, axis=-1).astype(jnp.int32)
        if self.is_whole:
            return at
        size = x.shape[-1]
        assert size * self.num_shards <= MAX_TOKENS
        best = jnp.take_along_axis(x, at[..., None], -1)[..., 0]
        told = self.each(jnp.stack([best, (at + self.first(size)).astype(jnp.float32)]))
        winner = jnp.argmax(told[:, 0], axis=0)[None]
        return jnp.take_along_axis(told[:, 1], winner, 0)[0].astype(jnp.int32)

    def at(self, x: Array, ids: Array) -> Array:
        """Returns the values, [N, C], of rows, [N, S], at tokens, [N, C], of any device."""
        if self.is_whole:
            return jnp.take_along_axis(x, ids, axis=1)
        local = self.local(ids, x.shape[1])
        return jax.lax.psum(jnp.take_along_axis(x, local, 1, mode="fill", fill_value=0), TENSOR)

    def top_k(self, x: Array, num: int) -> Array:
        """Returns the ids of the `num` largest of rows, [N, S]: of equal ones the lowest first."""
        size = x.shape[1]
        values, ids = jax.lax.top_k(x, min(num, size))
        if self.is_whole:
            return ids
        told = values, ids + self.first(size)
        values, ids = (jax.lax.all_gather(part, TENSOR, axis=1, tiled=True) for part in told)
        return jnp.take_along_axis(ids, jax.lax.top_k(values, num)[1], 1)


WHOLE = Vocabulary()
