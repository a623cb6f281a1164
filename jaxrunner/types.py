"""The pytrees on the device, and the letters of their shapes. Arrays without a dtype are int32.

Batch    T tokens, padded    B requests, padded    J logits of a request (1 + drafts)
Engine   R request slots     L most tokens of a request    X stop ids
Cache    G groups of layers  N KV blocks    S tokens in a block    M most blocks of a request
Logprobs N tokens, sampled or of prompts    C columns    Z 1 if wanted, else 0
Updates  A admitted requests    C copied blocks    W writes
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
    """The request in each slot. Lives on the device from step to step."""

    token_ids: Array = leaf("R L")  # prompt, output, then unverified drafts
    total_len: Array = leaf("R")  # prompt and output tokens
    num_computed: Array = leaf("R")  # tokens whose KV is in the cache
    prompt_len: Array = leaf("R")
    min_len: Array = leaf("R")  # `total_len` below which no stop id is sampled
    max_len: Array = leaf("R")  # `total_len` at which the request ends
    # Position of the first prompt token whose logprob is wanted.
    prompt_logprobs_start: Array = leaf("R")
    # Tokens that end the request; ~token for one that is only banned below `min_len`; V is padding.
    stop_ids: Array = leaf("R X")
    done: Array = leaf("R", jnp.bool)  # ended on the device; the host may not know it yet
    blocks: tuple[Array, ...] = leaf("R M", each="G")  # the KV block of each run of S tokens


@pytree
class LayerCache:
    """Paged keys and values of one layer. Those of 8 bits have a scale for each token and head."""

    k: Array = leaf("N K S D", "kv")
    v: Array = leaf("N K S D", "kv")
    k_scale: Array | None = leaf("N K S", jnp.float32, when="scaled")
    v_scale: Array | None = leaf("N K S", jnp.float32, when="scaled")


@pytree
class State:
    """The state that lives on the device from step to step. Donated to every step."""

    requests: Requests
    kv: tuple[LayerCache, ...] = each("Y")
    # By the name of their `SlotTable`: rows of each slot, [R, ...].
    tables: dict[str, Any] = by_name(default_factory=dict)


@pytree
class Writes:
    """Scattered writes into a table: table[row, col] = value."""

    row: Array = leaf("W")
    col: Array = leaf("W")
    value: Array = leaf("W")


@pytree
class Plan:
    """The scheduler's decisions for one step."""

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
    """Requests that enter slots before a step. Long `tokens` take several admissions."""

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
    """The inputs of a model for each token of a step."""

    token_ids: Array = leaf("T")
    positions: Array = leaf("T")
    rope_len: Array = leaf("T")  # sequence length that length-dependent rotary scaling uses
    tables: dict[str, Any] = by_name(default_factory=dict)  # rows of the model's tables, [T, ...]


@pytree
class Batch:
    """A step laid out by token; `prepare_inputs` computes it from the plan."""

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
    """The inputs of sampling for each row of a step."""

    slot: Array = leaf("B")
    seq_lens: Array = leaf("B")  # 0 where the row computed nothing
    samples: Array = leaf("B", jnp.bool)  # whether a token is sampled; not within a prompt
    next_pos: Array = leaf("B")  # position of the first sampled token
    num_drafts: Array = leaf("B")  # tokens of the step that are drafts


@pytree
class Targets:
    """Prompt tokens whose logprobs are wanted, moved to the front."""

    source: Array = leaf("T")  # index in the step of the token before the target; T is padding
    token_ids: Array = leaf("T")
    positions: Array = leaf("T")
    slot: Array = leaf("T")


@pytree
class Logprobs:
    """Natural logarithms of the probability of N tokens, sampled ones or a prompt's."""

    value: Array = leaf("N", jnp.float32)  # in the engine's `logprobs_mode`, as is `top_value`
    rank: Array = leaf("N")  # how many tokens are at least as likely, itself included
    raw: Array = leaf("N", jnp.float32)  # under the softmax of the model's own logits
    processed: Array = leaf("N", jnp.float32)  # under the distribution that it was sampled from
    kept_mass: Array = leaf("N", jnp.float32)  # probability that min-p, top-k and top-p kept
    top_ids: Array = leaf("N C")  # the likeliest tokens, or `logprob_token_ids` of the request
    top_value: Array = leaf("N C", jnp.float32)


@pytree
class StepOutput:
    """The output of a step for the host, downloaded as one vector."""

    token_ids: Array = leaf("B J")  # the first `num_sampled` are real
    num_sampled: Array = leaf("B")
    finished: Array = leaf("B", jnp.bool)
    not_finite: Array = leaf("B", jnp.bool)  # NaN or infinite logits: the tokens mean nothing
    no_choice: Array = leaf("B", jnp.bool)  # rules left no token: sampled by the grammar alone
    logprobs: tuple[Logprobs, ...] = each("Z")  # one, or none
    # Of each row: steps that could verify drafts; steps that had any, as a lookup may find none;
    # all their drafts; and for each of K positions the steps that accepted the draft there.
    drafts: Array | None = leaf("B 3+K", when="drafts")
    heads: dict[str, Array] = by_name(default_factory=dict)  # of the model's heads, [B, ...]
