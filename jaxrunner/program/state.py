"""The device state of an engine: of requests, rules and caches."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from jaxrunner import pytree
from jaxrunner.parallel.mesh import placed, ranked, shardings
from jaxrunner.parallel.stages import is_last, joined
from jaxrunner.program.program import Program
from jaxrunner.types import Requests, State


def make_state(program: Program) -> Any:
    """Returns the state of an engine without requests; in a pipeline, of all stages."""
    if not program.stages:
        return _state_of(program)
    return joined([_state_of(stage) for stage in program.stages])


def _state_of(program: Program) -> State:
    if program.mesh is None:
        return _zeros(program)
    # Created sharded: else JAX makes all shards on its first device, which may be full.
    where = jax.tree.map(lambda x: x.sharding, of_all_ranks(program))
    return jax.jit(_zeros, static_argnums=0, out_shardings=where)(program)


def _zeros(program: Program) -> State:
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), of_all_ranks(program))


def of_all_ranks(program: Program) -> State:
    """Returns the shapes and dtypes of the state of all data ranks, and where each array lies."""
    state, mesh = abstract_state(program), program.mesh
    return state if mesh is None or program.num_ranks == 1 else ranked(state, mesh)


@functools.lru_cache(maxsize=8)  # every program of an engine asks for it
def abstract_state(program: Program) -> State:
    """Returns the shapes and dtypes of an engine's state, and on a mesh where each array lies.

    With data ranks it is the state of one; `ranked` returns that of all.
    """
    dims, groups, mesh = program.dims, program.cache_groups, program.mesh
    of_layer = [groups[g] for g in program.layer_groups]
    caches = [(g.kind.leaves, dims | program.group_dims(g)) for g in of_layer]
    kv = tuple(pytree.abstract(*of) for of in caches)
    if mesh is not None:
        at = tuple(shardings(*of, mesh) for of in caches)
        kv = jax.tree.map(lambda x, at: x.update(sharding=at), kv, at)
    # Stages before the last do not sample: they have what layers read.
    told = program.tables if is_last(program.config) else program.model.tables
    tables = {t.name: pytree.abstract(t.params, dims | dict(t.dims)) for t in told}
    state = State(requests=pytree.abstract(Requests, dims), tables=tables, kv=kv)
    return state if mesh is None else placed(state, mesh)
