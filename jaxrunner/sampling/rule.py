"""How sampling rules are written and run.

A rule is a class of per-slot parameters, a function that reads one request's parameters on the
host, and a function that reshapes the logits of one token on the device.
"""

from collections.abc import Callable
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrunner.params import SamplingParams
from jaxrunner.types import Array, Requests


class Context(NamedTuple):
    """What a rule may know of the token that is about to be sampled."""

    position: Array  # of that token, scalar
    request: Requests  # the request's row of the table


class Rule(NamedTuple):
    """One sampling rule."""

    params: type  # a pytree with one row a slot
    row: Callable[[SamplingParams, int], Any]  # (params, seed) -> the row of one request
    apply: Callable[[Array, Any, Context], Array]  # (logits [V], row, context) -> logits [V]


def sample(rules: tuple[Rule, ...], logits: Array, requests, tables, slot, position) -> Array:
    """Samples from logits, [B, J, V]; entry j is the token at `position + j`. Returns [B, J].

    `requests` holds the rows of the batch. The first rule is `seed`: noise comes from a request's
    seed, the token's position and its id alone, so a request gets the same tokens in any batch.
    """
    take = functools.partial(jax.tree.map, lambda x: x.at[slot].get(mode="fill", fill_value=0))

    def one(logits: Array, request: Requests, rows: Any, position: Array) -> Array:
        context = Context(position, request)
        for rule, row in zip(rules, rows, strict=True):
            logits = rule.apply(logits, row, context)
        seed, *_ = rows
        key = jax.random.fold_in(jax.random.wrap_key_data(seed.words), position)
        noise = jax.random.gumbel(key, logits.shape, logits.dtype)
        return jnp.argmax(logits + jnp.where(seed.greedy, 0.0, noise)).astype(jnp.int32)

    over_j = jax.vmap(one, in_axes=(0, None, None, 0))
    positions = position[:, None] + jnp.arange(logits.shape[1])[None]
    return jax.vmap(over_j)(logits, requests, take(tables), positions)
