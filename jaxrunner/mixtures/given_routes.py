"""Checks the routes that a user gives with a prompt."""

from typing import Any

import numpy as np

from jaxrunner.api.validation import shown
from jaxrunner.mixtures.recorded_routes import NONE, routes_group


def check_given(given: Any, prompt_len: int, config: Any) -> np.ndarray:
    """Returns the routes of a prompt's tokens but the last, int16 [tokens, layers, k].

    given: integers of that shape, or of all tokens. Values of layers without experts are ignored.

    Raises:
      TypeError: it is no array of integers.
      ValueError: the engine keeps no routes, or the shape or an expert is out of range.
    """
    if routes_group(config) is None:
        raise ValueError(
            "routed_experts are replayed where routes are kept: build the LLM with "
            "enable_return_routed_experts=True"
        )
    if not isinstance(given, np.ndarray) or not np.issubdtype(given.dtype, np.integer):
        raise TypeError(f"routed_experts must be an array of integers, got {shown(given)}")
    X, k = config.router.num_experts, config.router.num_experts_per_tok
    rest = config.num_hidden_layers, k
    if given.shape[1:] != rest or given.shape[0] not in (prompt_len - 1, prompt_len):
        raise ValueError(
            f"routed_experts must be [tokens, layers, k]={[prompt_len, *rest]}, or without the "
            f"last token, got {list(given.shape)}"
        )
    sparse = np.array(config.sparse)
    own = given[:, sparse]
    if own.size and not 0 <= own.min() <= own.max() < X:
        raise ValueError(
            f"routed_experts must be from 0 to {X - 1}, got {own.min()} to {own.max()}"
        )
    if (np.diff(np.sort(own, -1), axis=-1) == 0).any():
        raise ValueError("routed_experts must be k different ones of each token in each layer")
    return np.where(sparse[None, :, None], given, NONE)[: prompt_len - 1].astype(np.int16)
