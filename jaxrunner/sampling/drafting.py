"""Samples drafts from a drafter's logits, by the rules of their requests.

On a mesh all devices have these logits, and each samples its own rows.
"""

import jax.numpy as jnp

from jaxrunner.indexing import take
from jaxrunner.parallel.row_share import RowShare
from jaxrunner.program.bucket import SampleSize
from jaxrunner.program.program import Program
from jaxrunner.rule import Batched, rows_of
from jaxrunner.sampling.sampler import process, sample
from jaxrunner.sampling.seed import DRAFT, noises, seed
from jaxrunner.types import Array, State


def draw_coupled(
    state: State, slot: Array, logits: Array, position: Array, *, program: Program
) -> Array:
    """Samples drafts, [B], from logits, [B, V], with the noise of the model at `position`, [B].

    So equal logits give the token that the model will sample there.
    """
    share, logits, batch = _own_rows(state, slot, logits, position, program)
    size = SampleSize(batch.slot.shape[0])
    return share.whole(sample(logits, batch, state.tables, program=program, size=size).token_ids)


def draw_own(
    state: State, slot: Array, logits: Array, position: Array, *, program: Program
) -> tuple[Array, Array]:
    """Samples drafts, [B], from logits, [B, V], at `position`, [B], with independent noise.

    Returns the drafts, and the logits that they were sampled from, [B, V]: after the rules, less
    their maximum, which keeps likely tokens apart when they are rounded to the engine's dtype.
    Logits of a row that is not finite are all 0. Greedy requests get the likeliest token.
    """
    share, logits, batch = _own_rows(state, slot, logits, position, program)
    slot, position, logits = batch.slot, batch.position, logits.astype(jnp.float32)
    processed = process(logits, batch, state.tables, program=program, all_rules=False).logits
    best = processed.max(1, keepdims=True)
    failed = ~jnp.isfinite(best) | jnp.isnan(processed).any(1, keepdims=True)
    kept = jnp.where(failed, 0.0, processed - best).astype(program.engine.dtype)
    seeds, total = rows_of(state.tables[seed.name], slot), take(state.requests.total_len, slot)
    greedy = seeds.greedy | (slot >= state.requests.done.shape[0])
    stream, num = DRAFT + position - total, logits.shape[1]
    noise = noises(seeds.words, total, greedy, stream=stream, num=num)
    drafts = jnp.argmax(kept.astype(jnp.float32) + noise, axis=1).astype(jnp.int32)
    return share.whole(drafts), share.gather(kept)


def _own_rows(
    state: State, slot: Array, logits: Array, position: Array, program: Program
) -> tuple[RowShare, Array, Batched]:
    """Returns how rows are shared out, and the logits and the batch of a device's own."""
    share = RowShare(slot.shape[0], program.num_shares)
    logits, position = share.own((logits, position))
    slot = share.own(slot, fill=state.requests.done.shape[0])
    return share, logits, Batched(slot, position, state.requests, None)
