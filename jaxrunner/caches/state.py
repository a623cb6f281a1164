"""The state of each request in layers that carry one on from token to token, in place of keys.

A short convolution keeps its last inputs; Mamba-2 and gated delta nets keep a matrix a head too.

A step that verifies drafts keeps the state behind its first token, which always stands, and the
inputs of those behind it. The next step replays the inputs of the drafts that stand.
"""

from dataclasses import dataclass
import itertools
from typing import Any, ClassVar, NamedTuple

import jax.numpy as jnp

from jaxrunner.caches.checkpointed import Checkpointed
from jaxrunner.pytree import leaf, pytree, static
from jaxrunner.types import Array


@pytree
class StateCache:
    """States of all requests, in one layer."""

    conv: Array = leaf("N taps mix_groups", "param")  # inputs of the last tokens, the oldest first
    recurrent: Array | None = leaf("N mixer_heads rows columns", "state", when="recurs")
    # Tokens that the state is behind, and inputs of those that may be drafts: of the convolution,
    # and what matrices follow from, float32, as `ops.replay` packs it.
    count: Array | None = leaf("N", when="drafts")
    drafted_conv: Array | None = leaf("N drafted mix_groups", "param", when="drafts")
    drafted: Array | None = leaf("N drafted mix_inputs", jnp.float32, when="drafts recurs")
    S: int = static(default=2**30)  # tokens of a block


@dataclass(frozen=True, kw_only=True)
class RecurrentState(Checkpointed):
    """A block is the state behind a token of a request, which starts anew with its first one.

    taps: tokens before one that its convolution reads. channels: numbers of a token that it reads.
    matrices: (heads, rows, columns) of what recurs, empty for none. inputs: numbers of a token that
        they follow from. dtype: that they are kept in; they are computed in float32.
    """

    taps: int
    channels: int
    matrices: tuple[int, ...] = ()
    inputs: int = 0
    dtype: str = "float32"

    leaves: ClassVar[type] = StateCache
    rewinds: ClassVar[bool] = True  # by inputs of the tokens that a step verifies

    @property
    def dims(self) -> dict[str, Any]:
        """Sizes of the axes of its leaves."""
        heads, rows, columns = self.matrices or (0, 0, 0)
        return dict(
            taps=self.taps, mix_groups=self.channels, recurs=bool(self.matrices),
            mixer_heads=heads, rows=rows, columns=columns, state=jnp.dtype(self.dtype),
            mix_inputs=self.inputs,
        )  # fmt: skip


class ConvParts(NamedTuple):
    """What a convolution reads of a token's numbers, [G, M], and how SiLU of its sums is cut.

    Parts are float32, and lie one behind the other in each group.
    """

    start: int  # of the M numbers of a group, the first that is read
    sizes: tuple[int, ...]  # numbers of each part
    l2_norms: tuple[float, ...] = ()  # that the first parts are scaled to; 0 for none

    @property
    def channels(self) -> int:
        """Numbers of a group that are read."""
        return sum(self.sizes)

    @property
    def spans(self) -> tuple[tuple[int, int, float], ...]:
        """The first channel, the size and the norm of each part."""
        firsts = itertools.accumulate(self.sizes, initial=0)
        norms = itertools.chain(self.l2_norms, itertools.repeat(0.0))
        return tuple(zip(firsts, self.sizes, norms, strict=False))
