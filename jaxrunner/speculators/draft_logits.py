"""Logits that drafts were sampled from, kept on the device until the next step verifies them."""

from typing import Any

import jax.numpy as jnp

from jaxrunner.pytree import leaf, pytree
from jaxrunner.slot_table import SlotTable
from jaxrunner.types import Array, SamplingMetadata

NAME = "draft_logits"


@pytree
class DraftLogits:
    """The logits that each slot's last drafts were sampled from.

    They are read only where the slot has drafts, which are written in the same step, so they are
    never reset.
    """

    logits: Array = leaf("R drafts V", "param")


def draft_logits(num_drafts: int) -> SlotTable:
    """Returns the table for a speculator with K drafts, which `draw_own` samples.

    Without the table each draft is verified as if the drafter had given it probability 1.
    """
    return SlotTable(NAME, DraftLogits, None, dims=(("drafts", num_drafts),))


def keep(tables: dict[str, Any], rows: SamplingMetadata, logits: Array) -> dict[str, Any]:
    """Returns `tables` with the logits of a step's drafts, [B, K, V]; rows that sampled no token
    are dropped."""
    table = tables[NAME].logits
    slot = jnp.where(rows.samples, rows.slot, table.shape[0])
    return tables | {NAME: DraftLogits(table.at[slot, : logits.shape[1]].set(logits, mode="drop"))}


def kept(tables: dict[str, Any], slot: Array, num_drafts: int) -> Array | None:
    """Returns the logits of the first drafts of `slot`, [B], as [B, num_drafts, V]; None without
    the table."""
    if NAME not in tables:
        return None
    return tables[NAME].logits.at[slot, :num_drafts].get(mode="fill", fill_value=0)
