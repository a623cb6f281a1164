"""How sampling rules are written and run.

A rule is a pytree class of per-slot parameters, a function that reads one request's parameters on
the host, and a function that changes the logits of one token on the device.
"""

from collections.abc import Callable
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrunner.api.sampling_params import SamplingParams
from jaxrunner.indexing import take
from jaxrunner.pytree import pytree
from jaxrunner.slot_table import SlotTable
from jaxrunner.types import Array, Requests


@pytree
class NoParams:
    """The parameters of a rule that has none of its own."""


class Context(NamedTuple):
    """The context of a rule: the token that is about to be sampled, and its request.

    The tokens before it, drafts included, are `request.token_ids[:position]`.
    """

    position: Array  # of that token, scalar
    request: Requests  # the request's row of the table
    mask: Array | None = None  # [ceil(V / 32)], a bit for each token that its grammar allows


class Rule(NamedTuple):
    """One sampling rule. It keeps the logits of a row that does not use it, bit for bit."""

    name: str  # of its slot table
    params: type  # a pytree with one row a slot, zeros where there is no request
    # (params, seed) -> the row of one request. `params.extra_args` are pairs: `dict` of them.
    row: Callable[[SamplingParams, int], Any]
    apply: Callable[[Array, Any, Context], Array]  # (logits [V], row, context) -> logits [V]
    # (row, context) -> whether the row uses the rule; where no row does, it is skipped.
    is_active: Callable[[Any, Context], Array] | None = None
    # Whether a request uses the rule; None for rules of every draw. The program of a step whose
    # requests use none of the other rules leaves those out.
    is_requested: Callable[[SamplingParams], bool] | None = None
    truncates: bool = False  # whether it only drops tokens, and runs after the temperature
    extra_args: tuple[str, ...] = ()  # the names that it reads in `SamplingParams.extra_args`

    @property
    def table(self) -> SlotTable:
        """The table of its parameters."""

        def row(request: Any) -> Any:
            return self.row(request.params, request.seed)

        return SlotTable(self.name, self.params, row, self.extra_args)


class Batched(NamedTuple):
    """The rows that rules run on: N tokens of any requests."""

    slot: Array  # [N]
    position: Array  # [N]
    requests: Requests  # the table
    mask: Array | None  # [N, ceil(V / 32)]

    def context(self) -> Context:
        """Returns the context of each row, on a leading axis."""
        return Context(self.position, rows_of(self.requests, self.slot), self.mask)


def rows_of(table: Any, slot: Array) -> Any:
    """Reads the rows of `slot`, zeros for padding."""
    # `take` is traced once for equal shapes. The table must not be an argument of what is: JAX
    # takes structures of two dataclasses for equal, and may return one where the other was given.
    return jax.tree.map(lambda x: take(x, slot), table)


# Traced once for equal shapes: rules were half of the time in which a program is traced.
@functools.partial(jax.jit, static_argnames="rule", inline=True)
def run(rule: Rule, logits: Array, table: Any, batch: Batched) -> Array:
    """Runs a rule on logits, [N, V]; skipped on the device where no row uses it."""
    is_active = rule.is_active

    def apply(logits: Array) -> Array:
        return jax.vmap(rule.apply)(logits, rows_of(table, batch.slot), batch.context())

    if is_active is None:
        return apply(logits)
    asked = jax.vmap(is_active)(rows_of(table, batch.slot), batch.context())
    return jax.lax.cond(jnp.any(asked), apply, lambda logits: logits, logits)


def largest(logits: Array) -> Array:
    """Returns the largest of each row, [..., V] -> [...]; NaN where there is one."""
    # XLA's maximum of a long row passes over NaN on a CPU.
    return jnp.where(jnp.isnan(logits).any(-1), jnp.nan, logits.max(-1))
