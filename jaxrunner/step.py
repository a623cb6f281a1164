"""One engine step on the device, as pure functions of the state.

`step` calls all others in their order; read it first.
"""

from dataclasses import replace
import functools
from typing import Any

import jax
import jax.numpy as jnp

from jaxrunner.indexing import cache_index, find_rows, put_blocks, put_rows, take
from jaxrunner.lora.saved_layers import run_head
from jaxrunner.lora.saved_modules import places_of_rows, weights_of
from jaxrunner.program.bucket import SHORT_LEN, Bucket, SampleSize
from jaxrunner.program.program import Program
from jaxrunner.rule import rows_of
from jaxrunner.sampling.drafting import draw_coupled, draw_own
from jaxrunner.sampling.drawing import draw
from jaxrunner.sampling.sampler import SamplerOutput
from jaxrunner.slot_table import observed, partition
from jaxrunner.speculators.speculator import DraftInputs, count_drafts, write_drafts
from jaxrunner.types import (
    Array,
    Batch,
    Inputs,
    Plan,
    Requests,
    SamplingMetadata,
    State,
    StepOutput,
)


def step(
    params: Any, state: State, plan: Plan, *, program: Program, bucket: Bucket, size: SampleSize
) -> tuple[State, StepOutput]:
    """Computes the tokens of `plan`, and samples where a request's next is due. Donates `state`."""
    state, batch, rows, hidden, extras = forward(
        params, state, plan, program=program, bucket=bucket
    )
    logits = compute_logits(params, state, hidden, batch, program)
    words = *logits.shape[:2], -(-program.dims["V"] // 32)
    mask = jnp.full(words, -1, jnp.int32) if size.all_rules else None  # without grammars
    drawn = draw(logits, state, rows, mask, program=program, size=size)
    state, heads = run_heads(params, state, hidden, batch, rows, program=program)
    state, output = finish(state, rows, drawn, heads, program=program)
    drafting = functools.partial(propose, program=program, num_drafts=bucket.num_drafts)
    state, _ = drafting(params, state, batch, rows, hidden, extras)
    return state, output


def forward(params: Any, state: State, plan: Plan, *, program: Program, bucket: Bucket):
    """Runs the model on the planned tokens, up to the final norm.

    Returns the state, the batch, its rows, hidden states, [T, E], and extras of the speculator.
    """
    requests = replace(state.requests, blocks=put_blocks(state.requests.blocks, plan.blocks))
    pools = [(group.num_blocks, group.block_size) for group in program.cache_groups]
    batch, rows = prepare_inputs(requests, plan, bucket, pools)
    model, config = program.model, program.config
    read, written = partition(model.tables)
    own = {t.name: rows_of(state.tables[t.name], batch.slot) for t in read}
    inputs = replace(batch.inputs, tables=own)
    ops = program.ops(replace(batch, inputs=inputs))
    extras = () if model.speculator is None else model.speculator.extras
    every = tuple(dict.fromkeys((*extras, *(name for t in written for name in t.extras))))
    asked = dict(extras=every) if every else {}  # a model without extras has no such parameter
    x, params = program.embed(params, inputs), weights_of(params)
    hidden, kv, found = model.layers(config, params, x, state.kv, inputs, ops, **asked)
    tables = state.tables | observed(written, state.tables, found, batch)
    found = {name: found[name] for name in extras}
    return replace(state, requests=requests, kv=kv, tables=tables), batch, rows, hidden, found


def compute_logits(
    params: Any, state: State, hidden: Array, batch: Batch, program: Program
) -> Array:
    """Returns logits, [B, J, V], at `batch.logits_indices` of hidden, [T, E], in its dtype."""
    at = batch.logits_indices
    place = places_of_rows(params, state, batch.slot, at)
    # With a token a row each row has its own, which need not be gathered.
    own = hidden[: at.shape[0], None] if batch.query_len == 1 else take(hidden, at)
    return program.logits(params, own, place)


def run_heads(
    params: Any, state: State, hidden: Array, batch: Batch, rows: SamplingMetadata,
    *, program: Program,
) -> tuple[State, dict[str, Array]]:  # fmt: skip
    """Returns the state, and each head's output of hidden, [T, E]: [B, ...] or [T, ...]."""
    outputs, tables = {}, dict(state.tables)
    for head in program.model.heads:
        slot = batch.slot if head.axes.startswith("T") else rows.slot
        place = places_of_rows(params, state, slot)
        run = functools.partial(head.run, program.config)
        if head.table is None:
            outputs[head.name] = run_head(run, params, (hidden, batch), place)
            continue
        table = tables[head.table.name]
        given = hidden, batch, rows_of(table, rows.slot)
        outputs[head.name], kept = run_head(run, params, given, place)
        tables[head.table.name] = put_rows(table, rows.slot, kept)
    return replace(state, tables=tables), outputs


@jax.named_scope("finish")
def finish(
    state: State, rows: SamplingMetadata, drawn: SamplerOutput, heads: dict[str, Array],
    *, program: Program,
) -> tuple[State, StepOutput]:  # fmt: skip
    """Writes the sampled tokens, [B, J], into the requests.

    A row gains the tokens before its first failed position, behind which drafts may be wrong. If
    the position still fails as the first of the next step, the request fails, as without drafts.
    """
    J, failed = drawn.token_ids.shape[1], drawn.not_finite | drawn.no_choice
    most = jnp.where(failed.any(1), jnp.maximum(jnp.argmax(failed, 1), 1), J)
    requests, num_sampled, accepted, finished = advance(
        state.requests, rows, drawn.token_ids, drawn.num_accepted, most
    )
    drafts = None
    if program.num_drafts:
        drafts = count_drafts(state.requests, rows, accepted, program.num_drafts)
    output = StepOutput(
        token_ids=drawn.token_ids,
        num_sampled=num_sampled,
        finished=finished,
        not_finite=drawn.not_finite[:, 0] & rows.samples,
        no_choice=drawn.no_choice[:, 0] & rows.samples,
        logprobs=drawn.logprobs,
        drafts=drafts,
        heads=heads,
    )
    return replace(state, requests=requests), output


def propose(
    params: Any,
    state: State,
    batch: Batch,
    rows: SamplingMetadata,
    hidden: Array,
    extras: dict[str, Array],
    *,
    program: Program,
    num_drafts: int,
) -> tuple[State, Array | None]:
    """Writes drafts for the next step behind the tokens. Returns the state and drafts, [B, K]."""
    if (speculator := program.model.speculator) is None:
        return state, None
    coupled = functools.partial(draw_coupled, state, rows.slot, program=program)
    own = functools.partial(draw_own, state, rows.slot, program=program)
    params = weights_of(params)
    drafts, tables, kv = speculator.propose(
        DraftInputs(
            program.config, params, state.requests, state.tables, state.kv, batch, rows, hidden,
            extras, program.ops, program.cache_groups, coupled, own, program.sample is not None,
            num_drafts,
        )
    )  # fmt: skip
    drafts = drafts[:, :num_drafts]
    state = replace(
        state,
        requests=write_drafts(state.requests, rows, drafts),
        tables=state.tables if tables is None else tables,
        kv=state.kv if kv is None else kv,
    )
    return state, drafts


def prepare_inputs(
    requests: Requests, plan: Plan, bucket: Bucket, pools: list[tuple[int, int]]
) -> tuple[Batch, SamplingMetadata]:
    """Lays the scheduled tokens of all requests side by side, padded to the bucket.

    pools: (N, S) of each cache group. A request that ended on the device computes nothing: the
    host plans ahead, and may not know that it ended.
    """
    T, B = bucket.num_tokens, bucket.num_rows
    num_tokens = jnp.where(take(requests.done, plan.slot), 0, plan.num_tokens)
    query_start, row = side_by_side(bucket, plan.num_tokens)
    start, t = query_start[:-1], jnp.arange(T)
    offset = t - take(start, row)
    real = offset < take(num_tokens, row)
    row = jnp.where(real, row, B)

    computed, total = take(requests.num_computed, plan.slot), take(requests.total_len, plan.slot)
    prompt_len = take(take(requests.prompt_len, plan.slot), row)
    seq_lens = computed + num_tokens
    drafts = jnp.clip(seq_lens - total, 0, bucket.num_drafts)
    first = start + num_tokens - 1 - drafts
    positions = jnp.where(real, take(computed, row) + offset, 0)
    slot = plan.slot.at[row].get(mode="fill", fill_value=requests.done.shape[0])
    blocks = tuple(take(table, plan.slot) for table in block_tables(requests, bucket, pools))
    inputs = Inputs(
        token_ids=take(requests.token_ids, (slot, positions)),
        positions=positions,
        rope_len=jnp.where(positions < prompt_len, prompt_len, positions + 1),
    )
    seq_lens = jnp.where(num_tokens > 0, seq_lens, 0)
    batch = Batch(
        inputs=inputs,
        row=row,
        slot=slot,
        cache_index=tuple(
            cache_index(table, row, positions, pool)
            for table, pool in zip(blocks, pools, strict=True)
        ),
        query_start=query_start,
        seq_lens=seq_lens,
        blocks=blocks,
        logits_indices=jnp.clip(first[:, None] + jnp.arange(1 + bucket.num_drafts)[None], 0, T - 1),
        query_len=bucket.query_len,
    )
    samples = (num_tokens > 0) & (seq_lens >= total)
    return batch, SamplingMetadata(plan.slot, seq_lens, samples, next_pos=total, num_drafts=drafts)


def side_by_side(bucket: Bucket, num_tokens: Array) -> tuple[Array, Array]:
    """Returns where the tokens of each row begin, [B + 1], and which row each is of, [T].

    Rows that have ended keep their places.
    """
    t = jnp.arange(bucket.num_tokens)
    if bucket.query_len:  # each row is a tile of attention
        return bucket.query_len * jnp.arange(bucket.num_rows + 1), t // bucket.query_len
    query_start = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(num_tokens)])
    return query_start, find_rows(query_start[1:], t)


def block_tables(
    requests: Requests, bucket: Bucket, pools: list[tuple[int, int]]
) -> tuple[Array, ...]:
    """Returns the block tables, [R, M], with the columns of short requests alone if all are."""
    if not bucket.short:
        return requests.blocks
    pairs = zip(requests.blocks, pools, strict=True)
    return tuple(table[:, : -(-SHORT_LEN // S)] for table, (_, S) in pairs)


@functools.partial(jax.jit, inline=True)  # traced once for equal shapes
def advance(
    requests: Requests, rows: SamplingMetadata, sampled: Array, accepted: Array | None = None,
    most: Array | None = None,
) -> tuple[Requests, Array, Array, Array]:  # fmt: skip
    """Accepts drafts, and writes the sampled tokens, [B, J], into the requests.

    accepted: how many drafts of each row are accepted, [B]. Where None, a draft is accepted if the
        model sampled the same token at its position: tokens then equal those without drafts.
    most: the most tokens that each row may gain, [B], at least 1; None for no limit.

    Returns the requests and, [B] each: tokens gained, drafts accepted, whether the request ended.
    """
    J = sampled.shape[1]
    j = jnp.arange(J)[None]
    of_row = functools.partial(take, index=rows.slot)
    at = rows.next_pos[:, None] + j
    if accepted is None:
        drafted = take(requests.token_ids, (rows.slot[:, None], at))
        is_equal = (drafted == sampled) & (j < rows.num_drafts[:, None])
        accepted = jnp.cumprod(is_equal, axis=1).sum(1)
    if most is not None:
        accepted = jnp.minimum(accepted, most - 1)
    stops = jnp.any(sampled[:, :, None] == of_row(requests.stop_ids)[:, None], axis=2)
    stops &= at + 1 >= of_row(requests.min_len)[:, None]
    until_stop = jnp.where(stops.any(1), jnp.argmax(stops, axis=1) + 1, J)
    room = of_row(requests.max_len) - rows.next_pos
    num = jnp.minimum(jnp.minimum(accepted + 1, until_stop), room)
    num = jnp.where(rows.samples, num, 0).astype(jnp.int32)

    total = rows.next_pos + num
    hit = jnp.any(stops & (j == num[:, None] - 1), axis=1)
    finished = rows.samples & (hit | (num >= room))
    columns = jnp.where(j < num[:, None], at, requests.token_ids.shape[1])
    computed = jnp.where(rows.samples, total - 1, rows.seq_lens)
    # A row that computed nothing is left as it is: its slot becomes padding.
    slot = jnp.where(rows.seq_lens > 0, rows.slot, requests.total_len.shape[0])
    requests = replace(
        requests,
        token_ids=requests.token_ids.at[slot[:, None], columns].set(sampled, mode="drop"),
        total_len=requests.total_len.at[slot].set(total, mode="drop"),
        num_computed=requests.num_computed.at[slot].set(computed, mode="drop"),
        done=requests.done.at[slot].set(finished, mode="drop"),
    )
    return requests, num, accepted, finished
