"""The state of each request in layers that carry one on from token to token, in place of keys.

A short convolution keeps its last inputs; Mamba-2 and gated delta nets keep a matrix a head too.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import jax.numpy as jnp

from jaxrunner.caches.checkpointed import Checkpointed
from jaxrunner.pytree import leaf, pytree, static
from jaxrunner.types import Array


@pytree
class StateCache:
    """States of all requests, in one layer."""

    # Behind each of the J tokens that a step verifies: inputs of the last ones, the oldest first.
    conv: Array = leaf("N J taps mix_groups", "param")
    recurrent: Array | None = leaf("N J mixer_heads rows columns", "state", when="recurs")
    S: int = static(default=2**30)  # tokens of a block


@dataclass(frozen=True, kw_only=True)
class RecurrentState(Checkpointed):
    """A block is the state behind a token of a request, which starts anew with its first one.

    taps: tokens before one that its convolution reads. channels: numbers of a token that it reads.
    matrices: (heads, rows, columns) of what recurs, empty for none. dtype: that they are kept in;
        they are computed in float32.
    """

    taps: int
    channels: int
    matrices: tuple[int, ...] = ()
    dtype: str = "float32"

    leaves: ClassVar[type] = StateCache
    rewinds: ClassVar[bool] = True  # by a state behind each token that a step verifies

    @property
    def dims(self) -> dict[str, Any]:
        """Sizes of the axes of its leaves."""
        heads, rows, columns = self.matrices or (0, 0, 0)
        return dict(
            taps=self.taps, mix_groups=self.channels, recurs=bool(self.matrices),
            mixer_heads=heads, rows=rows, columns=columns, state=jnp.dtype(self.dtype),
        )  # fmt: skip
