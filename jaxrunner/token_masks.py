"""Which tokens the grammars of a step allow, a bit for each."""

from typing import Any

import jax
import numpy as np

from jaxrunner.request import GrammarOutput


class TokenMasks:
    """Makes masks, [B, J, ceil(V / 32)], int32."""

    def __init__(self, num_positions: int, vocab_size: int):
        self._shape = num_positions, -(-vocab_size // 32)
        self._open: dict[int, jax.Array] = {}

    def of(self, req_ids: tuple[str, ...], num_rows: int, grammar: GrammarOutput | None) -> Any:
        """Returns the mask of a step of these requests, in row order.

        Raises:
          ValueError: the grammar names a request that is not in the step.
        """
        if grammar is None:
            return self._of_none(num_rows)
        mask = np.full((num_rows, *self._shape), -1, np.int32)
        for req_id, allowed in zip(*grammar, strict=True):
            if req_id not in req_ids:
                raise ValueError(f"grammar_output must name requests of the step, got {req_id!r}")
            mask[req_ids.index(req_id)] = allowed
        return mask

    def _of_none(self, num_rows: int) -> jax.Array:
        """Returns a mask that allows all tokens, made once."""
        if num_rows not in self._open:
            self._open[num_rows] = jax.device_put(np.full((num_rows, *self._shape), -1, np.int32))
        return self._open[num_rows]
