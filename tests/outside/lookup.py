"""Prompt lookup: drafts what followed the last token where the request had it before.

arXiv:2304.04487 drafts from a reference text in this way.
"""

import jax.numpy as jnp
import numpy as np

from jaxrunner.indexing import take
from jaxrunner.pytree import host_value, leaf, pytree
from jaxrunner.scheduling.request import NewRequest
from jaxrunner.slot_table import SlotTable
from jaxrunner.speculators.speculator import DraftInputs, Proposal, Speculator
from jaxrunner.types import Array

K = 3


@pytree
class Proposed:
    """Drafts of a request so far."""

    count: Array = leaf("R")


def row(request: NewRequest) -> Proposed:
    """Returns what a new request begins with."""
    return host_value(Proposed, count=np.int32(0))


def propose(inputs: DraftInputs) -> Proposal:
    """Returns drafts, [B, K], and the tables, its own with what is counted."""
    requests, rows, tables = inputs.requests, inputs.rows, inputs.tables
    ids, total = take(requests.token_ids, rows.slot), take(requests.total_len, rows.slot)
    j = jnp.arange(ids.shape[1])[None]
    last = jnp.take_along_axis(ids, jnp.maximum(total - 1, 0)[:, None], 1)
    before = jnp.where((ids == last) & (j < total[:, None] - 1), j, -1).max(1)
    at = jnp.where(before < 0, 0, before + 1)[:, None] + jnp.arange(K)[None]
    drafts = jnp.take_along_axis(ids, jnp.clip(at, 0, ids.shape[1] - 1), 1)
    new = jnp.where(rows.samples, K, 0)
    count = tables["proposed"].count.at[rows.slot].add(new, mode="drop")
    return Proposal(drafts, tables | {"proposed": Proposed(count)})


lookup = Speculator("lookup", K, propose, (SlotTable("proposed", Proposed, row),))
