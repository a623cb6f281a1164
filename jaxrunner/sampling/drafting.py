"""Draws drafts from a drafter's logits, by the rules of the requests that they are for."""

import jax.numpy as jnp

from jaxrunner.indexing import take
from jaxrunner.program import Program, SampleSize
from jaxrunner.rule import Batched, rows_of
from jaxrunner.sampling.sampler import process, sample
from jaxrunner.sampling.seed import DRAFT, noises, seed
from jaxrunner.types import Array, State


def draw_coupled(
    state: State, slot: Array, logits: Array, position: Array, *, program: Program
) -> Array:
    """Returns the tokens, [B], that the model would draw at `position`, [B], if it had these
    logits, [B, V]: with the noise that it is going to draw with there."""
    batch, size = Batched(slot, position, state.requests, None), SampleSize(slot.shape[0])
    return sample(logits, batch, state.tables, program=program, size=size).token_ids


def draw_own(
    state: State, slot: Array, logits: Array, position: Array, *, program: Program
) -> tuple[Array, Array]:
    """Returns the tokens, [B], that logits, [B, V], give at `position`, [B], with noise that
    nothing else is drawn with, and the logits that they were drawn from, [B, V].

    Those are what the rules made of the given ones, less the largest and rounded to the engine's
    dtype: so few bits still tell the likely tokens apart. Where the drafter's are not finite, any
    token is as likely as another. Greedy requests get the likeliest token.
    """
    batch = Batched(slot, position, state.requests, None)
    logits = logits.astype(jnp.float32)
    processed = process(logits, batch, state.tables, program=program, all_rules=False).logits
    best = processed.max(1, keepdims=True)
    failed = ~jnp.isfinite(best) | jnp.isnan(processed).any(1, keepdims=True)
    kept = jnp.where(failed, 0.0, processed - best).astype(program.engine.dtype)
    seeds, total = rows_of(state.tables[seed.name], slot), take(state.requests.total_len, slot)
    greedy = seeds.greedy | (slot >= state.requests.done.shape[0])
    stream, num = DRAFT + position - total, logits.shape[1]
    noise = noises(seeds.words, total, greedy, stream=stream, num=num)
    return jnp.argmax(kept.astype(jnp.float32) + noise, axis=1).astype(jnp.int32), kept
