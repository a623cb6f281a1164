"""Verifies drafts by "standard", "block" or "synthetic" rejection sampling; see `acceptance`."""

import jax.numpy as jnp

from jaxrunner.indexing import take
from jaxrunner.program.bucket import SampleSize
from jaxrunner.program.program import Program
from jaxrunner.rule import Batched, rows_of
from jaxrunner.sampling.acceptance import Unverified, block, standard, synthetic
from jaxrunner.sampling.sampler import SamplerOutput, Tables, sample
from jaxrunner.sampling.seed import seed
from jaxrunner.speculators.draft_logits import kept
from jaxrunner.types import Array, SamplingMetadata

VERIFY = {"standard": standard, "block": block}


def verify(
    logits: Array, batch: Batched, rows: SamplingMetadata, tables: Tables,
    *, program: Program, size: SampleSize,
) -> SamplerOutput:  # fmt: skip
    """Samples from logits, [B * J, V], and accepts drafts by the method `Speculator.rejection`."""
    speculator = program.model.speculator
    assert speculator is not None
    B = rows.slot.shape[0]
    J = logits.shape[0] // B
    seeds, at = rows_of(tables[seed.name], rows.slot), rows.next_pos[:, None] + jnp.arange(J)[None]
    drafts = take(batch.requests.token_ids, (rows.slot[:, None], at))[:, :-1]
    draft_logits = kept(tables, rows.slot, J - 1)
    if speculator.rejection == "synthetic":
        drawn = sample(logits, batch, tables, program=program, size=size)
        num = synthetic(rows.num_drafts, seeds.words, rows.next_pos, rates=speculator.rates)
        num = jnp.minimum(num, _num_allowed(batch.mask, drafts))
        own = drawn.token_ids.reshape(B, J)
        stands = (jnp.arange(J - 1)[None] < num[:, None]) & (drafts >= 0)  # -1 is no draft
        tokens = jnp.where(stands, drafts, own[:, :-1])
        tokens = jnp.concatenate([tokens, own[:, -1:]], 1)
        return drawn._replace(token_ids=tokens.reshape(-1), num_accepted=num)
    counts = []

    def choose(processed: Array) -> Array:
        greedy = seeds.greedy | (rows.slot >= batch.requests.done.shape[0])
        given = Unverified(
            processed.reshape(B, J, -1), drafts, rows.num_drafts,
            None if draft_logits is None else draft_logits.astype(jnp.float32),
            greedy, seeds.words, rows.next_pos,
        )  # fmt: skip
        verified = VERIFY[speculator.rejection](given)
        counts.append(verified.num_accepted)
        return verified.token_ids.reshape(-1)

    drawn = sample(logits, batch, tables, program=program, size=size, choose=choose)
    return drawn._replace(num_accepted=counts[0])


def _num_allowed(mask: Array | None, drafts: Array) -> Array:
    """Returns how many drafts, [B, K], of each row precede the first that its grammar forbids."""
    B, K = drafts.shape
    if mask is None:
        return jnp.full(B, K, jnp.int32)
    words = mask.reshape(B, K + 1, -1)[:, :-1]
    word = jnp.take_along_axis(words, drafts[..., None] // 32, 2)[..., 0]
    is_allowed = (drafts >= 0) & ((word >> drafts % 32) & 1 == 1)
    is_allowed |= (words == -1).all(2)  # there is no grammar
    return jnp.cumprod(is_allowed, axis=1, dtype=jnp.int32).sum(1)
