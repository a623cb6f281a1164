"""Process reward models: the scores of tokens that end steps of reasoning. Knows no JAX.

vLLM's `pooling_type="STEP"`. arXiv:2312.08935.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxrunner.api.validation import shown

FIELDS = "step_tag_id", "returned_token_ids"  # of `PoolingParams` and `PoolerConfig`


def check(asked: Any, *, steps: bool, num_out: int, vocab_size: int) -> None:
    """Checks what is asked of steps. asked: has `FIELDS`; num_out: numbers returned of a token.

    Raises:
      ValueError: the model scores no steps, or a field is out of range; names it.
    """
    given = {name: getattr(asked, name) for name in FIELDS if getattr(asked, name) is not None}
    for name, value in given.items():
        if not steps:
            raise ValueError(
                f"{name}={shown(value)} is of pooling_type='STEP', which this LLM was not made "
                "with: leave it out, or pass pooler_config={'pooling_type': 'STEP'}"
            )
    tag, columns = given.get("step_tag_id", 0), given.get("returned_token_ids", ())
    if tag >= vocab_size:
        raise ValueError(f"step_tag_id={tag} must be a token of the {vocab_size} there are")
    if any(column >= num_out for column in columns):
        raise ValueError(
            f"returned_token_ids={shown(columns)} must be among the {num_out} numbers that are "
            "told of a token: those of a model that writes tokens are named by pooler_config alone"
        )


def select(scores: np.ndarray, token_ids: Sequence[int], asked: Any, default: Any) -> np.ndarray:
    """Returns the scores of the tokens that are the tag, [steps, X], of those of all, [T, X].

    asked: a request's `FIELDS`; default: those of the model, where a request has none.
    """
    if columns := asked.returned_token_ids or default.returned_token_ids:
        scores = scores[:, list(columns)]
    tag = default.step_tag_id if asked.step_tag_id is None else asked.step_tag_id
    return scores if tag is None else scores[np.asarray(token_ids) == tag]
