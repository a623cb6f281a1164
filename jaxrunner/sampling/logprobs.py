"""Logprobs and ranks of tokens, and logprobs of the likeliest or of named tokens beside them."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrunner.api.sampling_params import SamplingParams
from jaxrunner.pytree import host_value, leaf, pytree
from jaxrunner.rule import Rule, largest
from jaxrunner.types import Array, Logprobs


class Processed(NamedTuple):
    """Logits after the rules."""

    logits: Array  # [N, V]
    kept_mass: Array  # [N], share of the probability that truncation kept
    no_choice: Array  # [N], whether no token was left; logits are then the grammar's alone


@pytree
class LogprobIds:
    """Ids whose logprobs a request wants in place of the likeliest; a count of 0 is off."""

    count: Array = leaf("R")
    ids: Array = leaf("R named")


def row(params: SamplingParams, seed: int) -> LogprobIds:
    """Reads a request's `logprob_token_ids`."""
    ids = np.array(params.logprob_token_ids or (), np.int32)
    return host_value(LogprobIds, count=np.int32(ids.size), ids=ids)


logprob_ids = Rule(
    "logprob_ids", LogprobIds, row, lambda logits, row, context: logits,
    is_requested=lambda params: params.logprob_token_ids is not None,
)  # fmt: skip


def describe(
    raw: Array, processed: Processed, token_ids: Array, named: LogprobIds,
    *, mode: str, num_logprobs: int,
) -> Logprobs:  # fmt: skip
    """Returns logprobs and ranks of `token_ids`, [N], and of the `num_logprobs` likeliest tokens.

    raw: the model's logits, [N, V].
    named: ids, in their order, that take the place of the likeliest tokens where a row has some.
    mode: which number `value` and `top_value` are, one of `LOGPROBS_MODES`; processed logits of
        greedy rows have a temperature of 1.
    """
    chosen = raw if mode.startswith("raw") else processed.logits
    own = token_ids[:, None]
    shown = _logprobs if mode.endswith("logprobs") else _at
    _, top_ids = jax.lax.top_k(jnp.where(chosen == 0, 0.0, chosen), num_logprobs)
    C = min(num_logprobs, named.ids.shape[1])
    names = jnp.where(named.count[:, None] > 0, named.ids[:, :C], top_ids[:, :C])
    top_ids = jnp.concatenate([names, top_ids[:, C:]], axis=1)
    return Logprobs(
        value=shown(chosen, own)[:, 0],
        rank=(chosen >= _at(chosen, own)).sum(-1, dtype=jnp.int32),
        raw=_logprobs(raw, own)[:, 0],
        processed=_logprobs(processed.logits, own)[:, 0],
        kept_mass=processed.kept_mass,
        top_ids=top_ids,
        top_value=shown(chosen, top_ids),
    )


def _logprobs(x: Array, ids: Array) -> Array:
    # The maximum is subtracted first: a logsumexp of large logits would round differences away.
    best = largest(x)[:, None]
    return _at(x, ids) - best - jnp.log(jnp.exp(x - best).sum(-1, keepdims=True))


def _at(x: Array, ids: Array) -> Array:
    return jnp.take_along_axis(x, ids, axis=1)
