"""What a speculator is to the rest: drafts for the next step, proposed inside this one."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import jax.numpy as jnp

from jaxrunner.indexing import take
from jaxrunner.slot_table import SlotTable
from jaxrunner.types import Array, Requests, SamplingMetadata


class Speculator(NamedTuple):
    """Proposes tokens that the next step verifies. A model names its own in `Model.speculator`.

    A draft stands if the model itself samples it, so tokens are those without drafts.
    """

    name: str
    num_drafts: int  # K, of each request in each step
    # (requests, tables, rows, num_sampled [B]) -> (tables, drafts [B, K]), after a step wrote what
    # it sampled into the requests. `tables` are all of `State.tables`; it changes its own alone.
    propose: Callable[
        [Requests, dict[str, Any], SamplingMetadata, Array], tuple[dict[str, Any], Array]
    ]
    tables: tuple[SlotTable, ...] = ()  # what it keeps of each request


def write_drafts(requests: Requests, rows: SamplingMetadata, drafts: Array) -> Requests:
    """Writes drafts, [B, K], behind the tokens of the rows that sampled."""
    L = requests.token_ids.shape[1]
    at = take(requests.total_len, rows.slot)[:, None] + jnp.arange(drafts.shape[1])[None]
    columns = jnp.where(rows.samples[:, None], at, L)
    token_ids = requests.token_ids.at[rows.slot[:, None], columns].set(drafts, mode="drop")
    return replace(requests, token_ids=token_ids)
