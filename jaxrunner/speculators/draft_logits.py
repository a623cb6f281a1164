"""What drafts were drawn from, kept on the device until the next step verifies them."""

from typing import Any

import jax.numpy as jnp

from jaxrunner.pytree import leaf, pytree
from jaxrunner.slot_table import SlotTable
from jaxrunner.types import Array, SamplingMetadata

NAME = "draft_logits"


@pytree
class DraftLogits:
    """Of each slot, the logits that its last drafts were drawn from.

    They count where the slot has drafts, which the same step proposes: nothing resets them.
    """

    logits: Array = leaf("R drafts V", "param")


def draft_logits(num_drafts: int) -> SlotTable:
    """Returns the table that a speculator names, of K drafts, whose drafts `draw_own` draws.

    Without it each draft is verified as if it had been certain.
    """
    return SlotTable(NAME, DraftLogits, None, dims=(("drafts", num_drafts),))


def keep(tables: dict[str, Any], rows: SamplingMetadata, logits: Array) -> dict[str, Any]:
    """Returns `tables` with the logits of the drafts that a step proposes, [B, K, V], first to
    last; those of rows that were due no token are dropped."""
    table = tables[NAME].logits
    slot = jnp.where(rows.samples, rows.slot, table.shape[0])
    return tables | {NAME: DraftLogits(table.at[slot, : logits.shape[1]].set(logits, mode="drop"))}


def kept(tables: dict[str, Any], slot: Array, num_drafts: int) -> Array | None:
    """Returns the logits of the first drafts of `slot`, [B], as [B, num_drafts, V]; None where
    nothing keeps them."""
    if NAME not in tables:
        return None
    return tables[NAME].logits.at[slot, :num_drafts].get(mode="fill", fill_value=0)
