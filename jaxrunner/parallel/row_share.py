"""The rows of a step, shared out to the devices of a mesh for sampling.

Each device computes the logits of its own tokens, of all rows. An exchange turns these into the
logits of all tokens, of its own rows: a sum where they are few, else an all-to-all. What a device
makes of its rows is told to all.
"""

from dataclasses import dataclass
import itertools
from typing import Any

import jax
import jax.numpy as jnp

from jaxrunner.parallel.mesh import TENSOR

Array = jax.Array
# Logits of a step that devices exchange by a sum, 8 rows of 262,144 tokens in bfloat16: XLA has a
# kernel for a sum, in the graph of a step, but none for an all-to-all, which sends fewer bytes.
MAX_SUM_BYTES = 1 << 22
MAX_NUMBER = 1 << 24  # ids and counts are told as float32, which has no more whole numbers


@dataclass(frozen=True)
class RowShare:
    """Equal runs of consecutive rows, one for each device; behind the last row there is padding.

    Rows are the first axis of arrays. With one device, all methods return what they are given.
    """

    num_rows: int  # B
    num_devices: int = 1

    @property
    def num_own(self) -> int:
        """Rows of each device, b."""
        return -(-self.num_rows // self.num_devices)

    def deal(self, logits: Array) -> Array:
        """Exchanges logits of a device's tokens, [B, ..., V / devices], for its rows', [b, ..., V].

        Their dtype stays: float32 would be twice the bytes. Padding is -inf: of rows whose logits
        are all equal, the sampling kernel would look at all, for a millisecond.
        """
        if self.num_devices == 1:
            return logits
        assert logits.shape[-1] * self.num_devices <= MAX_NUMBER
        if logits.size * logits.dtype.itemsize * self.num_devices <= MAX_SUM_BYTES:
            return self.own(self._of_all_tokens(logits), fill=-jnp.inf)
        more = self.num_own * self.num_devices - self.num_rows
        widths = [(0, more), *[(0, 0)] * (logits.ndim - 1)]
        padded = jnp.pad(logits, widths, constant_values=-jnp.inf)
        return jax.lax.all_to_all(padded, TENSOR, 0, logits.ndim - 1, tiled=True)

    def _of_all_tokens(self, logits: Array) -> Array:
        """Returns the logits of all rows and tokens, [B, ..., V].

        Adds arrays that are 0 elsewhere, which is exact.
        """
        *rows, tokens = logits.shape
        own = jnp.arange(self.num_devices)[:, None] == jax.lax.axis_index(TENSOR)
        wide = jnp.where(own, logits[..., None, :], jnp.zeros((), logits.dtype))
        return jax.lax.psum(wide.reshape(*rows, self.num_devices * tokens), TENSOR)

    def own(self, tree: Any, *, fill: float = 0) -> Any:
        """Returns a device's rows, [b, ...], of arrays that all devices have, [B, ...].

        fill: the value of padding.
        """
        if self.num_devices == 1:
            return tree
        at = jax.lax.axis_index(TENSOR) * self.num_own + jnp.arange(self.num_own)
        return jax.tree.map(lambda x: x.at[at].get(mode="fill", fill_value=fill), tree)

    def whole(self, tree: Any) -> Any:
        """Returns arrays of all rows, [B * m, ...], of those of each device's rows, [b * m, ...].

        Adds arrays that are 0 elsewhere, which is exact: XLA has a fast kernel for a small sum of
        floats only. So it is one sum of all arrays, side by side, in float32.
        """
        if self.num_devices == 1:
            return tree
        leaves, treedef = jax.tree.flatten(tree)
        columns = [x.astype(jnp.float32).reshape(self.num_own, -1) for x in leaves]
        own = jnp.arange(self.num_devices) == jax.lax.axis_index(TENSOR)
        told = jnp.where(own[:, None, None], jnp.concatenate(columns, 1)[None], 0)
        told = jax.lax.psum(told, TENSOR).reshape(-1, told.shape[-1])[: self.num_rows]
        ends = [*itertools.accumulate(column.shape[1] for column in columns)]
        parts = zip(leaves, jnp.split(told, ends[:-1], 1), strict=True)
        of_all = [part.reshape(-1, *x.shape[1:]).astype(x.dtype) for x, part in parts]
        return jax.tree.unflatten(treedef, of_all)

    def gather(self, x: Array) -> Array:
        """Returns an array of all rows, [B, ...], of each device's rows, [b, ...], in its dtype."""
        if self.num_devices == 1:
            return x
        return jax.lax.all_gather(x, TENSOR, tiled=True)[: self.num_rows]
