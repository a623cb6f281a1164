"""What carries the matrices of rows that decode on: a kernel, for the rules that it knows."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from jaxrunner.kernels_pallas import state_step
from jaxrunner.kernels_pallas.state_step import Rows, Tokens, TuningConfig
from jaxrunner.model import Recurrence
from jaxrunner.operation import Operation
from jaxrunner.ops import delta_rule, recurrence, state_space
from jaxrunner.ops.state_rows import StateRows
from jaxrunner.types import Array


def step_rows(
    rule: Recurrence, rows: StateRows, inputs: Any, states: Array, query_len: int,
    *, interpret: Any = None,
) -> tuple[Array, Array]:  # fmt: skip
    """Does what plain JAX does with rows of J tokens at most, each state read and written once."""
    axis, tokens = _AXES[rule.step], _tokens(rule, inputs)
    return state_step.state_step(
        states, _rows(rows), tokens, axis=axis, query_len=query_len,
        config=_config(axis, rows, states), interpret=interpret,
    )  # fmt: skip


def _config(axis: int, rows: StateRows, states: Array) -> TuningConfig:
    """Returns the sizes that were fastest on an H200 (docs/performance.md)."""
    if axis:
        return TuningConfig()
    num_rows, num_tokens = rows.start.shape[0], rows.shape[1]
    shared = num_tokens == 1 and num_rows >= FEW_ROWS and states.dtype == jnp.float32
    return TuningConfig(numbers=8192, shared=shared)


def _refuses(
    rule: Recurrence, rows: StateRows, inputs: Any, states: Array, query_len: int
) -> str | None:
    if rule.step not in _AXES:
        return "wants the rule of a state space or a gated delta net"
    tokens = jax.eval_shape(functools.partial(_tokens, rule), inputs)
    axis, *arrays = _AXES[rule.step], rows.start, rows.num, rows.first, rows.blocks

    def places(start: Array, num: Array, first: Array, blocks: Array) -> Rows:
        return _rows(StateRows(start, num, first, blocks, rows.shape))

    held = jax.eval_shape(places, *arrays)
    config = _config(axis, rows, states)
    return state_step.refuses(states, held, tokens, axis=axis, query_len=query_len, config=config)


FEW_ROWS = 8  # below, warps that share sums wait for one another longer than they read
_AXES = {state_space.step: 1, delta_rule.step: 0}  # of a matrix, along which keys lie


def _tokens(rule: Recurrence, inputs: Any) -> Tokens:
    """Returns what tokens bring in the kernel's words."""
    keep = jnp.exp(inputs.decay)
    if rule.step is state_space.step:
        return Tokens(inputs.x, inputs.b, inputs.c, keep)
    return Tokens(inputs.v, inputs.k, inputs.q, keep, inputs.beta)


def _rows(rows: StateRows) -> Rows:
    """Returns where the states of rows are, which have no token if they have more than J."""
    J = rows.shape[1]
    is_short = rows.num <= J
    places = [rows.place(jnp.full_like(rows.num, j + 1)) for j in range(J)]
    num = jnp.where(is_short, rows.num, 0)
    return Rows(rows.source(is_short), jnp.stack(places, 1), rows.start, num)


KERNEL = Operation("state_step", step_rows, _refuses)
SHORT_ROWS: tuple[Operation, ...] = (KERNEL, *recurrence.PLAIN)
