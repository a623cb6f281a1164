"""Draws the tokens of a step; on a mesh each device draws those of its own rows."""

from dataclasses import replace

import jax
import jax.numpy as jnp

from jaxrunner.parallel.row_share import RowShare
from jaxrunner.program.bucket import SampleSize
from jaxrunner.program.program import Program
from jaxrunner.rule import Batched
from jaxrunner.sampling.sampler import SamplerOutput, sample
from jaxrunner.sampling.verification import verify
from jaxrunner.types import Array, SamplingMetadata, State


@jax.named_scope("draw")
def draw(
    logits: Array,
    state: State,
    rows: SamplingMetadata,
    mask: Array | None,
    *,
    program: Program,
    size: SampleSize,
) -> SamplerOutput:
    """Samples a token at each position of logits, [B, J, V], by its request's parameters.

    On a mesh logits are those of a device's tokens, [B, J, V / devices]; each samples its own rows.

    mask: bits of the tokens that grammars allow, [B, J, ceil(V / 32)]; None without grammars.
    """
    share = RowShare(rows.slot.shape[0], program.num_shares)
    slot = share.own(rows.slot, fill=state.requests.done.shape[0])
    rows, mask = replace(share.own(rows), slot=slot), share.own(mask, fill=-1)
    drawn = _draw(share.deal(logits), state, rows, mask, program=program, size=size)
    return share.whole(drawn)


def _draw(
    logits: Array, state: State, rows: SamplingMetadata, mask: Array | None,
    *, program: Program, size: SampleSize,
) -> SamplerOutput:  # fmt: skip
    """Samples from logits of all tokens, [B, J, V], where B is a device's own rows."""
    B, J, V = logits.shape
    flat = Batched(
        slot=jnp.repeat(rows.slot, J),
        position=(rows.next_pos[:, None] + jnp.arange(J)[None]).reshape(-1),
        # Without block tables, whose shapes differ from model to model: rules are traced once.
        requests=replace(state.requests, blocks=()),
        mask=None if mask is None else mask.reshape(B * J, -1),
    )
    logits, tables, speculator = logits.reshape(-1, V), state.tables, program.model.speculator
    if speculator is None or speculator.rejection == "exact" or J == 1:
        drawn = sample(logits, flat, tables, program=program, size=size)
    else:
        drawn = verify(logits, flat, rows, tables, program=program, size=size)
    tokens, not_finite, no_choice = (x.reshape(B, J) for x in drawn[:3])
    return SamplerOutput(tokens, not_finite, no_choice, drawn.logprobs, drawn.num_accepted)
