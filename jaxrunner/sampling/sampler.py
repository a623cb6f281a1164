"""Runs the rules on logits, samples tokens, and computes their logprobs."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import jax.numpy as jnp

from jaxrunner.parallel.row_share import RowShare
from jaxrunner.program.bucket import PromptLogprobsSize, SampleSize
from jaxrunner.program.program import Program
from jaxrunner.rule import Batched, NoParams, largest, rows_of, run
from jaxrunner.sampling.grammar import grammar
from jaxrunner.sampling.logprobs import Processed, describe, logprob_ids
from jaxrunner.sampling.min_p import min_p
from jaxrunner.sampling.seed import TARGET, Seed, noises, seed
from jaxrunner.sampling.temperature import temperature
from jaxrunner.sampling.top_k_top_p import top_k_top_p
from jaxrunner.types import Array, Logprobs, Requests, Targets

Tables = dict[str, Any]  # `State.tables`


class SamplerOutput(NamedTuple):
    """Sampled tokens, with flags and logprobs. [N] from `sample`, [B, J] in a step."""

    token_ids: Array
    not_finite: Array  # the model's logits were NaN or infinite
    no_choice: Array  # the rules left no token
    logprobs: tuple[Logprobs, ...]  # one, or none
    # Drafts that each row accepts, [B]; None for those that equal the sampled tokens.
    num_accepted: Array | None = None


def sample(
    logits: Array,
    batch: Batched,
    tables: Tables,
    *,
    program: Program,
    size: SampleSize,
    choose: Callable[[Array], Array] | None = None,
) -> SamplerOutput:
    """Samples a token for each row of logits, [N, V].

    choose: (processed logits, [N, V]) -> tokens, [N]; None takes the best score with Gumbel noise.

    Noise depends only on the request's seed, the position and the token id, so a request gets the
    same tokens in any batch.
    """
    if program.sample is not None and not size.all_rules and choose is None:
        return _sample_by_kernel(program.sample, logits, batch, tables)
    logits = logits.astype(jnp.float32)
    processed = process(logits, batch, tables, program=program, all_rules=size.all_rules)
    if choose is None:
        scores = processed.logits + _noise(tables[seed.name], batch, logits.shape[1])
        token_ids = jnp.argmax(scores, axis=-1).astype(jnp.int32)
    else:
        token_ids = choose(processed.logits)
    logprobs: tuple[Logprobs, ...] = ()
    if size.num_logprobs:
        named = rows_of(tables[logprob_ids.name], batch.slot)
        described = describe(
            logits, processed, token_ids, named, mode=program.engine.logprobs_mode,
            num_logprobs=size.num_logprobs,
        )  # fmt: skip
        logprobs = (described,)
    # A logits function may return NaN, and dividing by a low temperature may give infinity.
    best = largest(processed.logits)
    not_finite = ~jnp.isfinite(largest(logits)) | jnp.isnan(best) | (best == jnp.inf)
    return SamplerOutput(token_ids, not_finite, processed.no_choice & ~not_finite, logprobs)


def _noise(table: Seed, batch: Batched, vocab_size: int) -> Array:
    """Returns Gumbel noise, [N, V]: zeros for greedy requests and padding."""
    seeds = rows_of(table, batch.slot)
    greedy = seeds.greedy | (batch.slot >= table.greedy.shape[0])
    return noises(seeds.words, batch.position, greedy, stream=TARGET, num=vocab_size)


def _sample_by_kernel(
    kernel: Callable[..., Any], logits: Array, batch: Batched, tables: Tables
) -> SamplerOutput:
    """Samples by the rules of every draw, in a kernel."""
    usual = (seed, temperature, min_p, top_k_top_p)
    seeds, heat, floor, cut = (rows_of(tables[rule.name], batch.slot) for rule in usual)
    drawn = kernel(
        logits, seeds.words, batch.position, seeds.greedy, heat.value, floor.log, cut.k, cut.p
    )
    # No rule here takes all tokens away: logits that are all -inf are the model's own.
    not_finite = drawn.not_finite | drawn.no_choice
    return SamplerOutput(drawn.token_ids, not_finite, jnp.zeros_like(not_finite), ())


def process(
    logits: Array, batch: Batched, tables: Tables, *, program: Program, all_rules: bool
) -> Processed:
    """Runs the rules on logits, [N, V]: all with `all_rules`, else those that every draw has."""
    out, before = logits, None
    for rule in program.rules:
        if rule.truncates and before is None:
            before = out
        if all_rules or rule.is_requested is None:
            out = run(rule, out, tables[rule.name], batch)
    before = out if before is None else before
    best = largest(out)  # truncation keeps the likeliest
    no_choice = best == -jnp.inf
    floor = jnp.where(no_choice, 0.0, best)[:, None]
    mass = [jnp.exp(x - floor).sum(-1) for x in (out, before)]
    cut = ((out == -jnp.inf) & (before > -jnp.inf)).any(-1)
    # The two sums may round differently, so the mass is 1 exactly where no token was dropped.
    kept_mass = jnp.where(no_choice | ~cut, 1.0, mass[0] / mass[1])
    if all_rules:
        # Where the rules left no token, one that the grammar allows is better than id 0.
        out = jnp.where(no_choice[:, None], run(grammar, logits, NoParams(), batch), out)
    return Processed(out, kept_mass, no_choice)


def describe_prompt(
    logits: Array,
    targets: Targets,
    requests: Requests,
    tables: Tables,
    program: Program,
    size: PromptLogprobsSize,
) -> Logprobs:
    """Returns logprobs of U prompt tokens, by the logits at the token before each.

    logits: [U, V], or on a mesh [U, V / devices].
    """
    mode, share = program.engine.logprobs_mode, RowShare(targets.slot.size, program.num_shares)
    logits = share.deal(logits).astype(jnp.float32)
    slot = share.own(targets.slot, fill=requests.done.shape[0])
    token_ids, positions = share.own((targets.token_ids, targets.positions))
    processed = Processed(logits, jnp.ones(slot.size), jnp.zeros(slot.size, jnp.bool))
    if mode.startswith("processed"):
        batch = Batched(slot, positions, requests, None)
        processed = process(logits, batch, tables, program=program, all_rules=True)
    named = rows_of(tables[logprob_ids.name], slot)
    likeliest = replace(named, count=jnp.zeros_like(named.count))  # named ids are for outputs
    num = size.num_logprobs
    return share.whole(
        describe(logits, processed, token_ids, likeliest, mode=mode, num_logprobs=num)
    )
