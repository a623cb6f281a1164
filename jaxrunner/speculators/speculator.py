"""The interface of speculators, which propose drafts for the next step at the end of this one."""

from collections.abc import Callable
from dataclasses import replace
import functools
from typing import Any, NamedTuple

import jax.numpy as jnp

from jaxrunner.caches.cache_group import CacheGroup
from jaxrunner.indexing import take
from jaxrunner.slot_table import SlotTable
from jaxrunner.types import Array, Batch, Requests, SamplingMetadata


class DraftInputs(NamedTuple):
    """A step's inputs for its speculator, once the sampled tokens are in the requests."""

    config: Any  # of the model
    params: Any  # of the model, a drafter's among them
    requests: Requests
    tables: dict[str, Any]  # all of `State.tables`
    kv: tuple[Any, ...]  # caches of all layers
    batch: Batch
    rows: SamplingMetadata
    hidden: Array  # [T, E], what the model's `layers` returned
    extras: dict[str, Array]  # of the model's layers, those that the speculator named
    ops: Callable[[Batch], Any]  # makes the operations of layers
    cache_groups: tuple[CacheGroup, ...]
    # (logits [B, V], position [B]) -> the tokens that these would be sampled as there, [B].
    draw: Callable[[Array, Array], Array]
    # The same with noise of their own: the tokens, and the logits that they were drawn from,
    # [B, V], for the next step to verify them by, `draft_logits.keep`.
    draw_own: Callable[[Array, Array], tuple[Array, Array]]
    unroll: bool  # whether loops of a few turns are to be unrolled
    num_drafts: int  # K that the next step may verify, 0 to that of the speculator; more are cut


class Proposal(NamedTuple):
    """Drafts, and changed parts of the state; None for unchanged ones."""

    drafts: Array  # [B, K]
    tables: dict[str, Any] | None = None
    kv: tuple[Any, ...] | None = None


class Speculator(NamedTuple):
    """Proposes tokens that the next step verifies. A model names its own in `Model.speculator`.

    By default a draft is accepted if the model samples the same token, so drafts change no token.
    """

    name: str
    num_drafts: int  # K, of each request in each step
    propose: Callable[[DraftInputs], Proposal]  # of `tables` and `kv` it changes its own alone
    tables: tuple[SlotTable, ...] = ()  # its state of each request
    extras: tuple[str, ...] = ()  # of the model's layers that it reads
    # Tokens, behind those that a step computes, whose keys it writes before they are verified.
    lookahead: int = 0
    # Whether steps may verify and propose none, where these do not pay; see `DraftPolicy`.
    adaptive: bool = False
    # The drafts that are accepted: "exact", those that the model samples too; "standard" and
    # "block", see `sampling.acceptance`; "synthetic", each at a rate of its own, given that those
    # before it are.
    rejection: str = "exact"
    rates: tuple[float, ...] = ()


@functools.lru_cache(maxsize=64)  # partials are not equal, and so would be no programs of them
def with_sizes(propose: Callable[..., Proposal], **sizes: float) -> Callable[..., Proposal]:
    """Returns (inputs) -> propose(sizes, inputs), the same function for the same sizes."""
    return functools.partial(propose, sizes)


def write_drafts(requests: Requests, rows: SamplingMetadata, drafts: Array) -> Requests:
    """Writes drafts, [B, K], behind the tokens of the rows that sampled."""
    L = requests.token_ids.shape[1]
    at = take(requests.total_len, rows.slot)[:, None] + jnp.arange(drafts.shape[1])[None]
    columns = jnp.where(rows.samples[:, None], at, L)
    token_ids = requests.token_ids.at[rows.slot[:, None], columns].set(drafts, mode="drop")
    return replace(requests, token_ids=token_ids)


def count_drafts(
    requests: Requests, rows: SamplingMetadata, accepted: Array, num_drafts: int
) -> Array:
    """Returns `StepOutput.drafts` of a step, [B, 3 + K].

    requests: before the step's tokens are written; accepted: drafts of each row that stood, [B].
    """
    j = jnp.arange(num_drafts)[None]
    drafts = take(requests.token_ids, (rows.slot[:, None], rows.next_pos[:, None] + j))
    due = rows.samples & (rows.num_drafts > 0)
    num = jnp.where(due, ((drafts >= 0) & (j < rows.num_drafts[:, None])).sum(1), 0)
    counts = [due[:, None], num[:, None] > 0, num[:, None], due[:, None] & (j < accepted[:, None])]
    return jnp.concatenate([count.astype(jnp.int32) for count in counts], axis=1)
