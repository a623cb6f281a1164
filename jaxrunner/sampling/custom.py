"""Logits functions of users: compiled into the program, or called back on the host.

def calmer(logits, row):  # [V]; row: a LogitsRow
    return logits / row.args["heat"]

LLM(model, logits_fn=logits_fn(calmer, extra_args={"heat": 1.0}))
SamplingParams(extra_args={"heat": 2.0})
"""

from collections.abc import Callable, Mapping
import functools
import logging
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrunner.api.sampling_params import SamplingParams
from jaxrunner.pytree import host_value, leaf, pytree
from jaxrunner.rule import Context, Rule
from jaxrunner.types import Array

logger = logging.getLogger(__name__)
MAX_EXTRA_ARGS = 16


class LogitsRow(NamedTuple):
    """The data of a logits function about the request whose token is being sampled."""

    token_ids: Array  # [L], prompt and output; the first `position` are real
    position: Array  # of the token that is being sampled, scalar
    prompt_len: Array  # scalar
    args: dict[str, Array]  # its `SamplingParams.extra_args`, scalars, float32


@pytree
class ExtraArgs:
    """The numbers that a request gives to a logits function, in the order of their names."""

    values: Array = leaf("R extra", jnp.float32)


def logits_fn(
    fn: Callable[[Array, LogitsRow], Array], *, extra_args: Mapping[str, float] | None = None
) -> Rule:
    """Returns the rule that runs `fn(logits [V], row) -> logits [V]`, float32, on every request.

    It runs after the penalties and bad words, before the temperature. `fn` is traced once into
    each program, so it must be a function of its arguments alone. Logits of tokens that earlier
    rules dropped are -inf. extra_args: the names in `row.args`, with their default values.

    Raises:
      TypeError, ValueError: `fn` cannot be called, or there are too many names.
    """
    if not callable(fn):
        raise TypeError(f"logits_fn must be a function, got {type(fn).__name__}: pass one")
    defaults = dict(extra_args or {})
    if len(defaults) > MAX_EXTRA_ARGS:
        raise ValueError(
            f"extra_args of a logits_fn are {len(defaults)}, it may have {MAX_EXTRA_ARGS}"
        )

    def row(params: SamplingParams, seed: int) -> ExtraArgs:
        given = defaults | dict(params.extra_args or ())
        return host_value(ExtraArgs, values=np.array([given[n] for n in defaults], np.float32))

    return Rule(
        "logits_fn",
        ExtraArgs,
        row,
        functools.partial(_apply, fn, tuple(defaults)),
        is_requested=lambda params: True,
        extra_args=tuple(defaults),
    )


def host_logits_fn(
    fn: Callable[..., Any], *, extra_args: Mapping[str, float] | None = None
) -> Rule:
    """Returns the rule that calls back `fn(logits, token_ids, args) -> logits` on the host. Slow.

    Each token of each request waits for a copy of its logits to the host, for `fn`, one row at a
    time, and for the copy back; use `logits_fn` where the function can be traced. logits:
    numpy's, [V], float32; token_ids: list of ints; args: dict of floats. Where `fn` raises, that
    request alone ends with an error, and the log has the exception.
    """

    def call(
        logits: np.ndarray, token_ids: np.ndarray, prompt_len: Any, position: Any, values: Any
    ) -> np.ndarray:
        args = {name: float(value) for name, value in values.items()}
        logits = np.array(logits)
        if int(prompt_len) == 0:  # of padding
            return logits
        try:
            out = fn(logits, np.asarray(token_ids)[: int(position)].tolist(), args)
            return np.asarray(out, np.float32).reshape(logits.shape)
        except Exception:
            logger.exception("a host logits function failed")
            return np.full_like(logits, np.nan)

    def traced(logits: Array, row: LogitsRow) -> Array:
        shape = jax.ShapeDtypeStruct(logits.shape, logits.dtype)
        values = {name: row.args[name] for name in names}
        told = row.token_ids, row.prompt_len, row.position, values
        return jax.pure_callback(call, shape, logits, *told, vmap_method="sequential")

    names = tuple(extra_args or {})
    if not callable(fn):
        raise TypeError(f"host_logits_fn must be a function, got {type(fn).__name__}: pass one")
    return logits_fn(traced, extra_args=extra_args)


def with_logits_fn(rules: tuple[Rule, ...], fn: Any) -> tuple[Rule, ...]:
    """Returns the rules with a user's logits function or `Rule` added; all as they are if None.

    It runs right before the temperature; a rule that truncates runs right behind it, where
    `kept_mass` counts what it drops.
    """
    if fn is None:
        return rules
    rule = fn if isinstance(fn, Rule) else logits_fn(fn)
    at = next(i for i, r in enumerate(rules) if r.name == "temperature") + rule.truncates
    return (*rules[:at], rule, *rules[at:])


def _apply(
    fn: Callable, names: tuple[str, ...], logits: Array, row: ExtraArgs, context: Context
) -> Array:
    args = {name: row.values[i] for i, name in enumerate(names)}
    request = context.request
    out = fn(logits, LogitsRow(request.token_ids, context.position, request.prompt_len, args))
    if jnp.shape(out) != logits.shape or jnp.result_type(out) != logits.dtype:
        raise ValueError(
            f"logits_fn must return float32{list(logits.shape)}, got "
            f"{jnp.result_type(out)}{list(jnp.shape(out))}: return one logit for each token"
        )
    return jnp.asarray(out)
