"""The state update of rows that decode: a kernel, for the rules that it knows."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from jaxrunner.kernels_pallas.states import state_step
from jaxrunner.kernels_pallas.states.state_step import Rows, Tokens, TuningConfig
from jaxrunner.model import Recurrence
from jaxrunner.operation import Operation
from jaxrunner.ops.states import delta_rule, recurrence, state_space
from jaxrunner.ops.states.state_rows import StateRows
from jaxrunner.types import Array


def step_rows(
    rule: Recurrence, rows: StateRows, inputs: Any, waiting: Any, states: Array, query_len: int,
    *, interpret: Any = None,
) -> tuple[Array, Array]:  # fmt: skip
    """Does what plain JAX does with short rows, each state read and written once."""
    axis, tokens = AXES[rule.step], _tokens(rule, inputs)
    return state_step.state_step(
        states, _rows(rows), tokens, axis=axis, query_len=query_len,
        waiting=_waiting(rule, waiting), config=_config(axis, rows, states), interpret=interpret,
    )  # fmt: skip


def serves(matrices: tuple[int, ...], dtype: Any) -> bool:
    """Whether the kernel carries on matrices of heads, rows and columns, by any rule it knows."""

    def problem(axis: int) -> tuple[Array, Rows, Tokens]:
        H, X, Y = matrices[0], matrices[2 - axis], matrices[1 + axis]
        value, key, keep = (jnp.zeros(s, jnp.float32) for s in ((1, H, X), (1, 1, Y), (1, H)))
        none = jnp.zeros(1, jnp.int32)
        rows = Rows(none, none[:, None], none, none, none)
        return jnp.zeros((1, *matrices), dtype), rows, Tokens(value, key, key, keep)

    problems = ((axis, jax.eval_shape(functools.partial(problem, axis))) for axis in AXES.values())
    return not any(state_step.refuses(*one, axis=axis) for axis, one in problems)


def _config(axis: int, rows: StateRows, states: Array) -> TuningConfig:
    """Returns the sizes that were fastest on an H200 (docs/performance.md)."""
    if axis:
        return TuningConfig()
    num_rows, num_drafts = rows.start.shape[0], rows.shape[1]
    shared = num_drafts == 0 and num_rows >= FEW_ROWS and states.dtype == jnp.float32
    return TuningConfig(numbers=8192, shared=shared)


def _refuses(
    rule: Recurrence, rows: StateRows, inputs: Any, waiting: Any, states: Array, query_len: int
) -> str | None:
    if rule.step not in AXES:
        return "wants the rule of a state space or a gated delta net"
    tokens = jax.eval_shape(functools.partial(_tokens, rule), inputs)
    axis, (*arrays, shape) = AXES[rule.step], rows
    held = jax.eval_shape(lambda *arrays: _rows(StateRows._make((*arrays, shape))), *arrays)
    others = dict[str, Any](
        waiting=jax.eval_shape(functools.partial(_waiting, rule), waiting),
        config=_config(axis, rows, states),
    )
    return state_step.refuses(states, held, tokens, axis=axis, query_len=query_len, **others)


FEW_ROWS = 8  # below, warps that share sums wait for one another longer than they read
AXES = {state_space.step: 1, delta_rule.step: 0}  # of a matrix, along which keys lie


def _tokens(rule: Recurrence, inputs: Any) -> Tokens:
    """Returns what tokens bring in the kernel's words."""
    keep = jnp.exp(inputs.decay)
    if rule.step is state_space.step:
        return Tokens(inputs.x, inputs.b, inputs.c, keep)
    return Tokens(inputs.v, inputs.k, inputs.q, keep, inputs.beta)


def _waiting(rule: Recurrence, waiting: Any) -> Tokens | None:
    """Returns the tokens that are replayed, K of each row side by side."""
    if waiting is None:
        return None
    flat = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), waiting)
    return _tokens(rule, flat)._replace(query=None)


def _rows(rows: StateRows) -> Rows:
    """Returns where the states of rows are; long ones have no tokens."""
    rows = rows.where(rows.is_short)
    return Rows(rows.source(), rows.places, rows.start, rows.num, rows.waiting)


KERNEL = Operation("state_step", step_rows, _refuses)
SHORT_ROWS = (KERNEL, *recurrence.PLAIN.short)
