"""Weights as programs take them: a tuple of arrays, as each launch walks the trees it is given.

The nodes of the weights of 32 layers would cost every launch some 30 us of the host.
"""

from collections.abc import Callable, Sequence
import functools
from typing import Any

import jax


def flat_params(params: Any, stages: Sequence[Any] = ()) -> tuple[Any, ...]:
    """Returns the arrays of weights, in the order of their tree.

    stages: those of a pipeline, whose weights are a sequence: the arrays of each are a tuple.
    """
    return tuple(map(flat_params, params or ())) if stages else tuple(jax.tree.leaves(params))


@functools.lru_cache(maxsize=1024)  # a function that is new each time would be lowered each time
def takes_flat(function: Callable[..., Any], treedef: Any) -> Callable[..., Any]:
    """Returns a device function whose first argument, `params`, is flat; `treedef` is its tree."""

    @functools.wraps(function)
    def run(params: tuple[Any, ...], *args: Any, **static: Any) -> Any:
        return function(jax.tree.unflatten(treedef, params), *args, **static)

    return run
