"""The drafting loop of all drafters: one token after another by a drafter's layers, in the step.

As in EAGLE (arXiv:2401.15077, arXiv:2503.01840), without trees.
"""

from dataclasses import replace
import functools
from typing import Any, cast

import jax
import jax.numpy as jnp

from jaxrunner.caches.cache_group import distinct
from jaxrunner.indexing import cache_index, take
from jaxrunner.slot_table import SlotTable
from jaxrunner.speculators.draft_logits import keep
from jaxrunner.speculators.drafter import DraftedConfig, Drafter, Target
from jaxrunner.speculators.speculator import DraftInputs, Proposal, Speculator
from jaxrunner.types import Array, Batch, Inputs


def chain(
    family: Drafter, extras: tuple[str, ...], num_drafts: int, tables: tuple[SlotTable, ...] = ()
) -> Speculator:
    """Returns the speculator of a model that `with_drafter` made."""
    lookahead = num_drafts - family.is_shifted
    return Speculator(family.name, num_drafts, propose, tables, extras, lookahead)


def propose(inputs: DraftInputs) -> Proposal:
    """Returns drafts, [B, K], sampled from the drafter's logits as the config says.

    First computes the drafter's keys of the step's tokens from the model's hidden states, which
    overwrites keys that were computed while these tokens were drafts.
    """
    config, requests, slot = cast(DraftedConfig, inputs.config), inputs.requests, inputs.rows.slot
    num_layers, is_shifted = len(config.target.cache_kinds), config.family.is_shifted
    caches, total = inputs.kv[:num_layers], take(requests.total_len, slot)
    hidden, feature, kv = _run_step(inputs, total, inputs.kv[num_layers:])

    def next_draft(carry: tuple, _: None) -> tuple[tuple, tuple[Array, Array | None]]:
        token, position, feature, kv = carry
        batch = _one_each(inputs, token, position - int(is_shifted))
        hidden, feature, kv = _run(inputs, batch, feature, kv)
        drawn = _draw(inputs, hidden, position + 1)
        return (drawn[0], position + 1, feature, kv), drawn

    if not inputs.num_drafts:
        return Proposal(jnp.zeros((slot.shape[0], 0), jnp.int32), kv=(*caches, *kv))
    if is_shifted:  # the first comes of what has been run
        first = [_draw(inputs, hidden, total)]
        carry = first[0][0], total, feature, kv
    else:
        first = []
        carry = take(requests.token_ids, (slot, total - 1)), total - 1, feature, kv
    num = inputs.num_drafts - len(first)
    # A loop compiles faster. On a GPU the host would run it.
    (*_, kv), rest = jax.lax.scan(next_draft, carry, length=num, unroll=num if inputs.unroll else 1)
    drafts, logits = jax.tree.map(_join, rest, *first)
    tables = None if logits is None else keep(inputs.tables, inputs.rows, logits)
    return Proposal(drafts, tables, (*caches, *kv))


def _join(rest: Array, *first: Array) -> Array:
    """Returns what is of each draft, [B, K, ...], of `first`, [B, ...], and of those that follow,
    [K or K - 1, B, ...]."""
    return jnp.concatenate([*(x[:, None] for x in first), rest.swapaxes(0, 1)], 1)


def _run_step(
    inputs: DraftInputs, total: Array, kv: tuple[Any, ...]
) -> tuple[Array, Array, tuple[Any, ...]]:
    """Runs the drafter's layers on the tokens of the step.

    Returns hidden and feature of each row's last token that stands and has been run, and caches.
    """
    config, batch, slot = cast(DraftedConfig, inputs.config), inputs.batch, inputs.rows.slot
    if config.family.is_shifted:
        at = batch.slot, batch.inputs.positions + 1
        following = replace(batch.inputs, token_ids=take(inputs.requests.token_ids, at))
        batch = replace(batch, inputs=following)
    own, params = config.drafter, inputs.params.drafter
    feature = config.family.feature(own, params, inputs.hidden, inputs.extras)
    hidden, feature, kv = _run(inputs, batch, feature, kv)
    first = take(batch.query_start, jnp.arange(slot.shape[0]))
    last = jnp.maximum(first + total - 2 - take(batch.inputs.positions, first), 0)
    return take(hidden, last), take(feature, last), kv


def _run(
    inputs: DraftInputs, batch: Batch, feature: Array, kv: tuple[Any, ...]
) -> tuple[Array, Array, tuple[Any, ...]]:
    """Runs the drafter's layers on a batch. Returns hidden, the next feature, and caches."""
    config = cast(DraftedConfig, inputs.config)
    family, own, params = config.family, config.drafter, inputs.params.drafter
    x = family.embed(own, params, batch.inputs, _target(inputs))
    batch = _of_groups(batch, config)
    return family.layers(own, params, x, feature, kv, batch.inputs, inputs.ops(batch))


def _draw(inputs: DraftInputs, hidden: Array, position: Array) -> tuple[Array, Array | None]:
    """Returns the drafts, [B], that hidden, [B, E], gives, and where drafts are verified by what
    they were drawn from, that: [B, V]."""
    config = cast(DraftedConfig, inputs.config)
    params, target = inputs.params.drafter, _target(inputs)
    logits = config.family.logits(config.drafter, params, hidden, target)
    if config.draft_sample_method == "probabilistic":
        return inputs.draw_own(logits, position)
    if config.draft_sample_method == "coupled":
        return inputs.draw(logits, position), None
    return jnp.argmax(logits, axis=-1).astype(jnp.int32), None


def _target(inputs: DraftInputs) -> Target:
    config, params = cast(DraftedConfig, inputs.config), inputs.params.target
    ends = config.model.embed, config.model.logits
    return Target(*(functools.partial(end, config.target, params) for end in ends))


def _one_each(inputs: DraftInputs, token: Array, at: Array) -> Batch:
    """Returns the batch of one token a row, at positions `at`, [B]; none of rows that are due no
    token, and none behind the last that a request may have."""
    requests, rows, batch = inputs.requests, inputs.rows, inputs.batch
    slot, B = rows.slot, rows.slot.shape[0]
    real = rows.samples & ~take(requests.done, slot) & (at < take(requests.max_len, slot))
    at, row = jnp.where(real, at, 0), jnp.where(real, jnp.arange(B), B)
    prompt_len = take(requests.prompt_len, slot)
    rope_len = jnp.where(at < prompt_len, prompt_len, at + 1)
    pools = [(group.num_blocks, group.block_size) for group in inputs.cache_groups]
    pairs = zip(batch.blocks, pools, strict=True)
    return Batch(
        inputs=Inputs(token, at, rope_len),
        row=row,
        slot=jnp.where(real, slot, requests.done.shape[0]),
        cache_index=tuple(cache_index(blocks, row, at, pool) for blocks, pool in pairs),
        query_start=jnp.arange(B + 1),
        seq_lens=jnp.where(real, at + 1, 0),
        blocks=batch.blocks,
        logits_indices=jnp.arange(B)[:, None],
        query_len=1,
    )


def _of_groups(batch: Batch, config: DraftedConfig) -> Batch:
    """Returns the batch with the cache groups of the drafter's layers alone, in their order."""
    groups = distinct(config.cache_kinds)
    own = [groups.index(kind) for kind in distinct(config.own_kinds)]
    return replace(
        batch,
        blocks=tuple(batch.blocks[g] for g in own),
        cache_index=tuple(batch.cache_index[g] for g in own),
    )
