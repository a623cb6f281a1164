"""Device functions between steps: they admit requests into slots, and copy KV blocks."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from jaxrunner.indexing import put_blocks, take, write
from jaxrunner.program.program import Program
from jaxrunner.types import Admission, Array, Copies, State


def admit(state: State, admission: Admission, rows: dict[str, Any]) -> State:
    """Writes new requests, and their `rows` of slot tables by name, into their slots."""

    def put(table: Array, values: Array) -> Array:
        # Lists are only as wide as this admission needs; counts beside them say what is valid.
        columns = tuple(slice(n) for n in values.shape[1:])
        at = (admission.slot, *columns)
        return table.at[at].set(values, mode="drop") if values.size else table

    old = state.requests
    names = (
        "total_len", "num_computed", "prompt_len", "min_len", "max_len", "prompt_logprobs_start",
    )  # fmt: skip
    changed = {name: put(getattr(old, name), getattr(admission, name)) for name in names}
    # Stop ids have no count, so those of an earlier request are overwritten with padding.
    more = old.stop_ids.shape[1] - admission.stop_ids.shape[1]
    stop_ids = jnp.pad(admission.stop_ids, ((0, 0), (0, more)), constant_values=2**30)
    requests = replace(
        old,
        token_ids=write(old.token_ids, admission.tokens),
        stop_ids=put(old.stop_ids, stop_ids),
        done=put(old.done, jnp.zeros_like(admission.slot, jnp.bool)),
        blocks=put_blocks(old.blocks, admission.blocks),
        **changed,
    )
    written = {name: jax.tree.map(put, state.tables[name], row) for name, row in rows.items()}
    return replace(state, requests=requests, tables=state.tables | written)


def copy_blocks(state: State, copies: tuple[Copies, ...], program: Program) -> State:
    """Copies KV blocks in all layers, before a step that writes on in the copies."""

    def copy(copies: Copies, layer: Any) -> Any:
        def one(blocks: Array) -> Array:
            return blocks.at[copies.to].set(take(blocks, copies.source), mode="drop")

        return jax.tree.map(one, layer)

    if jax.default_backend() == "cpu":
        copy = jax.jit(copy)  # equal calls, which `device.parts` compiles once
    kv = tuple(
        copy(copies[g], layer) for layer, g in zip(state.kv, program.layer_groups, strict=True)
    )
    return replace(state, kv=kv)
