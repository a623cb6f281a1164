"""Entry points: device functions that are compiled ahead of time, once for each size."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrunner.device.packing import packed_size
from jaxrunner.program.bucket import Bucket
from jaxrunner.program.program import Program
from jaxrunner.program.state import abstract_state
from jaxrunner.types import State

Options = tuple[tuple[str, str], ...]  # of XLA
Sizes = Callable[[Program, Sequence[Bucket]], Iterable[Any]]


class EntryPoint(NamedTuple):
    """A device function and the sizes that it is compiled for.

    It is called as `function(*arguments, program=program, size=size)`, and returns the state first
    if it returns one. Sizes are hashable NamedTuples such as `Bucket`.
    """

    name: str
    function: Callable[..., Any]
    arguments: Callable[[Program, Any, Any], tuple[Any, ...]]  # (program, params, size): abstract
    output: Callable[[Program], Any]  # a tree with the structure of what it returns
    sizes: Sizes = lambda program, buckets: ()  # sizes for requests without rare parameters
    rare_sizes: Sizes = lambda program, buckets: ()  # further sizes, for rare parameters
    donated: tuple[str, ...] = ("state",)  # names of parameters of `function`
    options: Callable[[Program, Any], Options] = lambda program, size: ()  # by size
    is_small: bool = False  # whether it lowers and runs fast
    # (size) -> whether warm-up runs it once, on (params, state, a plan without requests).
    is_rehearsed: Callable[[Any], bool] = lambda size: False


def abstract_tables(program: Program) -> State:
    """Returns the abstract state without its KV caches."""
    return replace(abstract_state(program), kv=())


def abstract_vector(spec: Any) -> jax.ShapeDtypeStruct:
    """Returns the abstract vector, int32, into which a tree of arrays is packed."""
    return jax.ShapeDtypeStruct((packed_size(spec),), jnp.int32)
