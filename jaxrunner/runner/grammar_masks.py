"""The masks of tokens that the grammars of a step allow, a bit for each."""

from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec
import numpy as np

from jaxrunner.api.validation import shown
from jaxrunner.parallel.mesh import DATA, whole_on
from jaxrunner.parallel.placement import put
from jaxrunner.program.bucket import SampleSize
from jaxrunner.program.program import Program
from jaxrunner.scheduling.request import GrammarOutput


class GrammarMasks:
    """Makes masks, [B, J, ceil(V / 32)], int32; of data ranks one behind another."""

    def __init__(self, program: Program):
        # Where a mask lies that many steps share: with devices of several processes on the host.
        self._where, self._on_host = whole_on(program.mesh), program.is_shared
        self._of_rank = None
        if program.num_ranks > 1 and program.mesh is not None:
            self._of_rank = NamedSharding(program.mesh, PartitionSpec(DATA))
        self._num_ranks = program.num_ranks
        self._num_words = -(-program.config.vocab_size // 32)
        self._open: dict[tuple[int, int, int], jax.Array | np.ndarray] = {}

    def of(self, req_ids: tuple[str, ...], size: SampleSize, grammar: GrammarOutput | None) -> Any:
        """Returns the mask of a step of these requests, in row order.

        Raises:
          TypeError, ValueError: the grammar is none, or names a request that is not in the step.
        """
        shape = self._num_ranks * size.num_rows, 1 + size.num_drafts, self._num_words
        if grammar is None:
            return self._of_none(shape)
        self._check(grammar, req_ids, shape[1:])
        mask = np.full(shape, -1, np.int32)
        for req_id, allowed in zip(*grammar, strict=True):
            one = mask[req_ids.index(req_id)]
            one[: len(allowed) if allowed.ndim == 2 else None] = allowed
        return mask if self._of_rank is None else put(mask, self._of_rank)

    def _check(
        self, grammar: GrammarOutput, req_ids: tuple[str, ...], of_one: tuple[int, int]
    ) -> None:
        if not isinstance(grammar, GrammarOutput):
            raise TypeError(f"grammar_output must be a GrammarOutput, got {shown(grammar)}")
        names, bitmask = grammar
        if not isinstance(names, tuple | list):
            raise TypeError(f"grammar_output.req_ids must be a tuple, got {shown(names)}")
        for i, name in enumerate(names):
            if type(name) is not str or name not in req_ids or name in names[:i]:
                raise ValueError(
                    f"grammar_output.req_ids must name requests of the step, each once, "
                    f"got {shown(name)}"
                )
        if not isinstance(bitmask, np.ndarray) or bitmask.dtype != np.int32:
            raise TypeError(f"grammar_output.bitmask must be an int32 array, got {shown(bitmask)}")
        n, (J, W) = len(names), of_one
        shapes = {(n, W), *((n, j, W) for j in range(1, 1 + J))}
        if bitmask.shape not in shapes:
            raise ValueError(
                f"grammar_output.bitmask must have one of the shapes {sorted(shapes)}, "
                f"got {bitmask.shape}"
            )

    def _of_none(self, shape: tuple[int, int, int]) -> jax.Array | np.ndarray:
        """Returns a mask that allows all tokens, made once."""
        if shape not in self._open:
            mask = np.full(shape, -1, np.int32)
            if self._of_rank is not None:
                self._open[shape] = put(mask, self._of_rank)
            else:
                self._open[shape] = mask if self._on_host else jax.device_put(mask, self._where)
        return self._open[shape]
