"""Logit bias: adds a number to the logits of tokens that a request names."""

import jax.numpy as jnp
import numpy as np

from jaxrunner.api.sampling_params import SamplingParams
from jaxrunner.pytree import host_value, leaf, pytree
from jaxrunner.rule import Context, Rule
from jaxrunner.types import Array


@pytree
class LogitBias:
    """Distinct ids, and what is added to each."""

    count: Array = leaf("R")
    ids: Array = leaf("R biased")
    values: Array = leaf("R biased", jnp.float32)


def row(params: SamplingParams, seed: int) -> LogitBias:
    """Reads a request's `logit_bias`."""
    ids, values = zip(*params.logit_bias, strict=True) if params.logit_bias else ((), ())
    return host_value(
        LogitBias,
        count=np.int32(len(ids)),
        ids=np.array(ids, np.int32),
        values=np.array(values, np.float32),
    )


def apply(logits: Array, row: LogitBias, context: Context) -> Array:
    """Adds to logits, [V]; a token that was dropped stays so."""
    ids = jnp.where(jnp.arange(row.ids.size) < row.count, row.ids, logits.size)
    return logits.at[ids].add(row.values, mode="drop")


logit_bias = Rule(
    "logit_bias", LogitBias, row, apply,
    is_active=lambda row, context: row.count > 0,
    is_requested=lambda params: bool(params.logit_bias),
)  # fmt: skip
