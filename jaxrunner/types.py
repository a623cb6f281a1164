"""The data of one engine, and the letters its shapes are written in.

Batch    T tokens, padded    B requests, padded    J logits of a request (1 + drafts)
Engine   R request slots     L most tokens of a request    X stop ids    W writes of an update
Cache    G groups of layers  N KV blocks    S tokens in a block    M most blocks of a request
Logprobs N tokens, drawn or of prompts    C columns (of an update, copies)    Z 1 if wanted, else 0
Model    Y layers  H query heads  K KV heads  P heads packed for one KV head (H / K + 2)
         D head dim  E embed  F MLP  V vocab
         experts, expert_units, shared_units of mixtures
         mix_groups, mixer_heads, mix_inputs of layers with states, inner that their last product
         reads

An index equal to the size of its axis is padding: reads give 0, writes are dropped.
"""

from typing import Any

import jax
import jax.numpy as jnp

from jaxrunner.pytree import by_name, each, leaf, pytree, static

Array = jax.Array


@pytree
class Requests:
    """What each slot knows of its request. Outlives the step."""

    token_ids: Array = leaf("R L")  # prompt, output, then unverified drafts
    total_len: Array = leaf("R")  # prompt and output tokens
    num_computed: Array = leaf("R")  # tokens whose KV is in the cache
    prompt_len: Array = leaf("R")
    min_len: Array = leaf("R")  # `total_len` below which no stop id is sampled
    max_len: Array = leaf("R")  # `total_len` at which the request ends
    # Position of the first prompt token whose logprob is wanted.
    prompt_logprobs_start: Array = leaf("R")
    # Tokens that end it, and ~token for those that are banned below `min_len` alone; V is none.
    stop_ids: Array = leaf("R X")
    done: Array = leaf("R", jnp.bool)  # ended on the device; the host may not know it yet
    blocks: tuple[Array, ...] = leaf("R M", each="G")  # the KV block of each run of S tokens


@pytree
class LayerCache:
    """Paged keys and values of one layer.

    Those of 8 bits are multiples of a scale, one for each token and head.
    """

    k: Array = leaf("N K S D", "kv")
    v: Array = leaf("N K S D", "kv")
    k_scale: Array | None = leaf("N K S", jnp.float32, when="scaled")
    v_scale: Array | None = leaf("N K S", jnp.float32, when="scaled")


@pytree
class State:
    """All that lives on the device between steps. Donated to every step."""

    requests: Requests
    kv: tuple[LayerCache, ...] = each("Y")
    # Parameters of each slot, as a `SlotTable` declares them.
    tables: dict[str, Any] = by_name(default_factory=dict)


@pytree
class Writes:
    """Scattered writes into a table: table[row, col] = value."""

    row: Array = leaf("W")
    col: Array = leaf("W")
    value: Array = leaf("W")


@pytree
class Plan:
    """What the scheduler decided for one step."""

    slot: Array = leaf("B")
    num_tokens: Array = leaf("B")  # tokens to compute now, drafts included
    blocks: tuple[Writes, ...] = each("G")  # KV blocks that running requests gain


@pytree
class Copies:
    """KV blocks of one cache group to copy; `to` is N for padding."""

    source: Array = leaf("C")
    to: Array = leaf("C")


@pytree
class Admission:
    """Requests that enter the table before a step. `tokens` may follow in several admissions."""

    slot: Array = leaf("A")
    total_len: Array = leaf("A")
    num_computed: Array = leaf("A")  # > 0 where a cached prefix was found
    prompt_len: Array = leaf("A")
    min_len: Array = leaf("A")
    max_len: Array = leaf("A")
    prompt_logprobs_start: Array = leaf("A")
    stop_ids: Array = leaf("A X")
    tokens: Writes
    blocks: tuple[Writes, ...] = each("G")


@pytree
class Inputs:
    """What a model reads of each token."""

    token_ids: Array = leaf("T")
    positions: Array = leaf("T")
    rope_len: Array = leaf("T")  # sequence length that length-dependent rotary scaling sees
    tables: dict[str, Any] = by_name(default_factory=dict)  # rows of the model's, [T, ...]


@pytree
class Batch:
    """One step laid out by token, derived on the device."""

    inputs: Inputs
    row: Array = leaf("T")  # the token's row in the batch, B for padding
    slot: Array = leaf("T")  # its request's slot, R for padding
    cache_index: tuple[Array, ...] = leaf("T", each="G")  # block * S + offset, N * S for padding
    query_start: Array = leaf("B+1")  # where each row's tokens start
    seq_lens: Array = leaf("B")  # tokens of each request once this step is done
    blocks: tuple[Array, ...] = leaf("B M", each="G")
    logits_indices: Array = leaf("B J")  # tokens whose logits are sampled from
    query_len: int = static()  # tokens of every row, 0 if rows differ


@pytree
class SamplingMetadata:
    """What each row of a step is due: all that sampling knows of a plan."""

    slot: Array = leaf("B")
    seq_lens: Array = leaf("B")  # 0 where the row computed nothing
    samples: Array = leaf("B", jnp.bool)  # whether the request is due a token
    next_pos: Array = leaf("B")  # position of the first sampled token
    num_drafts: Array = leaf("B")  # tokens of the step that are drafts


@pytree
class Targets:
    """Prompt tokens whose logprobs are wanted, first ones first."""

    source: Array = leaf("T")  # the token of the step before the target, T where there is none
    token_ids: Array = leaf("T")
    positions: Array = leaf("T")
    slot: Array = leaf("T")


@pytree
class Logprobs:
    """What is told of tokens, sampled or given, in natural logarithms."""

    value: Array = leaf("N", jnp.float32)  # in the engine's `logprobs_mode`, as is `top_value`
    rank: Array = leaf("N")  # tokens that are no less likely, itself included
    raw: Array = leaf("N", jnp.float32)  # under the softmax of the model's own logits
    processed: Array = leaf("N", jnp.float32)  # under what it was sampled from
    kept_mass: Array = leaf("N", jnp.float32)  # share that min-p, top-k and top-p left
    top_ids: Array = leaf("N C")  # the likeliest ones, or those that a request names
    top_value: Array = leaf("N C", jnp.float32)


@pytree
class StepOutput:
    """What the host reads back."""

    token_ids: Array = leaf("B J")  # the first `num_sampled` are real
    num_sampled: Array = leaf("B")
    finished: Array = leaf("B", jnp.bool)
    not_finite: Array = leaf("B", jnp.bool)  # NaN or infinite logits: the tokens mean nothing
    no_choice: Array = leaf("B", jnp.bool)  # rules left no token, so only the grammar counted
    logprobs: tuple[Logprobs, ...] = each("Z")  # one, or none
    # Of the row, how many steps were to verify drafts, how many of these had any (a drafter may
    # find none), the drafts of all, and how many steps accepted each draft.
    drafts: Array | None = leaf("B 3+K", when="drafts")
    heads: dict[str, Array] = by_name(default_factory=dict)  # of the model's heads, [B, ...]
