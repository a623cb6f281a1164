"""One engine step, as pure functions of the state.

`step` is the whole engine on the device; read it first.
"""

from dataclasses import replace
import functools
from typing import Any

import jax
import jax.numpy as jnp

from jaxrunner.layout import Bucket, Program
from jaxrunner.sampling.rule import sample
from jaxrunner.types import (
    Admission,
    Array,
    Batch,
    Inputs,
    Plan,
    Requests,
    State,
    StepOutput,
    Writes,
)


def step(params, state: State, plan: Plan, *, program: Program, bucket: Bucket):
    """Computes `plan` and samples for each request that is due a token; donates `state`."""
    state, batch, hidden = forward(params, state, plan, program=program, bucket=bucket)
    logits = score(params, hidden, batch, program)
    sampled = draw(logits, state, plan, batch, program, bucket)
    return finish(state, plan, batch, sampled)


def forward(params, state: State, plan: Plan, *, program: Program, bucket: Bucket):
    """Runs the model on the planned tokens. Returns the state, the batch and hidden, [T, E]."""
    requests = replace(state.requests, blocks=_put_blocks(state.requests.blocks, plan.blocks))
    cache_shape = program.engine.num_blocks, program.engine.block_size
    batch = prepare_inputs(requests, plan, bucket, cache_shape, program.num_drafts)
    attend = functools.partial(program.attention, batch)
    hidden, kv = program.model.forward(program.config, params, state.kv, batch.inputs, attend)
    return replace(state, requests=requests, kv=kv), batch, hidden


def score(params, hidden: Array, batch: Batch, program: Program) -> Array:
    """Returns the logits of the scored tokens, [B, J, V], float32."""
    return program.model.logits(program.config, params, take(hidden, batch.scored))


def draw(logits: Array, state: State, plan: Plan, batch: Batch, program: Program, bucket: Bucket):
    """Samples a token for each scored position: [B, J]."""
    if bucket.greedy:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    requests = jax.tree.map(functools.partial(take, index=plan.slot), state.requests)
    return sample(program.rules, logits, requests, state.sampling, plan.slot, batch.next_pos)


def finish(state: State, plan: Plan, batch: Batch, sampled: Array) -> tuple[State, StepOutput]:
    """Writes what was sampled, [B, J], into the requests."""
    requests, output = advance(state.requests, plan, batch, sampled)
    return replace(state, requests=requests), output


def take(table: Array, index: Any) -> Array:
    """Reads `table[index]`, 0 where an index is out of range."""
    return table.at[index].get(mode="fill", fill_value=0)


def admit(state: State, admission: Admission, rows: tuple[Any, ...]) -> State:
    """Writes new requests, and `rows` of their sampling parameters, into their slots."""

    def put(table: Array, values: Array) -> Array:
        return table.at[admission.slot].set(values, mode="drop")

    old = state.requests
    names = ("total_len", "num_computed", "prompt_len", "min_len", "max_len", "stop_ids")
    changed = {name: put(getattr(old, name), getattr(admission, name)) for name in names}
    requests = replace(
        old,
        token_ids=_write(old.token_ids, admission.tokens),
        done=put(old.done, jnp.zeros_like(admission.slot, jnp.bool)),
        blocks=_put_blocks(old.blocks, admission.blocks),
        **changed,
    )
    return replace(state, requests=requests, sampling=jax.tree.map(put, state.sampling, rows))


def _write(table: Array, writes: Writes) -> Array:
    return table.at[writes.row, writes.col].set(writes.value, mode="drop")


def _put_blocks(tables: tuple[Array, ...], writes: tuple[Writes, ...]) -> tuple[Array, ...]:
    return tuple(_write(table, w) for table, w in zip(tables, writes, strict=True))


def prepare_inputs(
    requests: Requests, plan: Plan, bucket: Bucket, cache_shape: tuple[int, int], num_drafts: int
) -> Batch:
    """Lays the scheduled tokens of all requests side by side, padded to the bucket.

    A request that has ended computes nothing, whatever the plan says. `cache_shape` is (N, S).
    """
    T, B = bucket.num_tokens, bucket.num_rows
    num_tokens = jnp.where(take(requests.done, plan.slot), 0, plan.num_tokens)
    # Rows of a uniform bucket stand `query_len` apart, so that each is one tile of attention.
    width = jnp.full_like(num_tokens, bucket.query_len) if bucket.query_len else num_tokens
    query_start = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(width)])
    start = query_start[:-1]
    t = jnp.arange(T)
    row = jnp.searchsorted(query_start[1:], t, side="right").astype(jnp.int32)
    offset = t - take(start, row)
    real = offset < take(num_tokens, row)
    row = jnp.where(real, row, B)

    computed, total = take(requests.num_computed, plan.slot), take(requests.total_len, plan.slot)
    prompt_len = take(take(requests.prompt_len, plan.slot), row)
    seq_lens = computed + num_tokens
    drafts = jnp.clip(seq_lens - total, 0, num_drafts)
    first = start + num_tokens - 1 - drafts
    positions = jnp.where(real, take(computed, row) + offset, 0)
    R = requests.total_len.shape[0]
    slot = plan.slot.at[row].get(mode="fill", fill_value=R)
    blocks = tuple(take(table, plan.slot) for table in requests.blocks)
    inputs = Inputs(
        token_ids=take(requests.token_ids, (slot, positions)),
        positions=positions,
        rope_len=jnp.where(positions < prompt_len, prompt_len, positions + 1),
    )
    return Batch(
        inputs=inputs,
        row=row,
        cache_index=tuple(cache_index(table, row, positions, cache_shape) for table in blocks),
        query_start=query_start,
        seq_lens=jnp.where(num_tokens > 0, seq_lens, 0),
        blocks=blocks,
        scored=jnp.clip(first[:, None] + jnp.arange(1 + num_drafts)[None], 0, T - 1),
        num_drafts=drafts,
        samples=(num_tokens > 0) & (seq_lens >= total),
        next_pos=total,
        query_len=bucket.query_len,
    )


def cache_index(
    blocks: Array, row: Array, positions: Array, cache_shape: tuple[int, int],
    *, parts: int = 1, part: int = 0, interleave: int = 1,
) -> Array:  # fmt: skip
    """Returns where each token's KV goes, block * S + offset; N * S for padding.

    blocks: [B, M]; row and positions: [T], row B for padding; cache_shape: (N, S). With context
    parallelism a block holds S tokens of each of `parts` devices, dealt out `interleave` at a
    time; tokens of other devices than `part` are padding.
    """
    (B, _), (N, S) = blocks.shape, cache_shape
    block, offset = take(blocks, (row, positions // (S * parts))), positions % (S * parts)
    mine = (row < B) & (offset // interleave % parts == part)
    local = offset // (interleave * parts) * interleave + offset % interleave
    return jnp.where(mine, block * S + local, N * S)


def advance(requests: Requests, plan: Plan, batch: Batch, sampled: Array):
    """Accepts the drafts that were sampled too, and writes the result into the requests.

    A draft stands if the target sampled the same token at its position, so the output is token
    for token what it would be without drafts. Returns the requests and a `StepOutput`.
    """
    J = sampled.shape[1]
    j = jnp.arange(J)[None]
    of_row = functools.partial(take, index=plan.slot)
    at = batch.next_pos[:, None] + j
    drafted = take(requests.token_ids, (plan.slot[:, None], at))
    accepted = jnp.cumprod((drafted == sampled) & (j < batch.num_drafts[:, None]), axis=1).sum(1)
    stops = jnp.any(sampled[:, :, None] == of_row(requests.stop_ids)[:, None], axis=2)
    stops &= at + 1 >= of_row(requests.min_len)[:, None]
    until_stop = jnp.where(stops.any(1), jnp.argmax(stops, axis=1) + 1, J)
    room = of_row(requests.max_len) - batch.next_pos
    num = jnp.minimum(jnp.minimum(accepted + 1, until_stop), room)
    num = jnp.where(batch.samples, num, 0).astype(jnp.int32)

    total = batch.next_pos + num
    hit = jnp.any(stops & (j == num[:, None] - 1), axis=1)
    finished = batch.samples & (hit | (num >= room))
    columns = jnp.where(j < num[:, None], at, requests.token_ids.shape[1])
    computed = jnp.where(batch.samples, total - 1, batch.seq_lens)
    # A row that computed nothing keeps what it has.
    slot = jnp.where(batch.seq_lens > 0, plan.slot, requests.total_len.shape[0])
    requests = replace(
        requests,
        token_ids=requests.token_ids.at[slot[:, None], columns].set(sampled, mode="drop"),
        total_len=requests.total_len.at[slot].set(total, mode="drop"),
        num_computed=requests.num_computed.at[slot].set(computed, mode="drop"),
        done=requests.done.at[slot].set(finished, mode="drop"),
    )
    return requests, StepOutput(token_ids=sampled, num_sampled=num, finished=finished)
