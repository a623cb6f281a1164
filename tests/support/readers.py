"""Norms and what reads them: which implementations are chosen, and a layer's norm and MLP."""

import functools
from typing import Any

import jax

from jaxrunner.ops.backends import fused
from tests.support.lowering import cuda

NO_STEP: Any = None  # nothing attends


def chosen(run: Any, *args: Any) -> dict[str, str]:
    """Returns which implementation is chosen for each operation of a function of `ops`."""
    found: list[Any] = []
    ops = fused(NO_STEP, note=found.append)
    with cuda():
        jax.eval_shape(functools.partial(run, ops), *args)
    return {one.operation: one.name for one in found}


def norm_and_mlp(ops: Any, x: Any, norm: Any, gate_up: Any, down: Any) -> Any:
    """Runs a norm and an MLP as a layer does."""
    x, h = ops.add_norm(x, x, norm, 1e-5, readers=(gate_up,))
    return ops.mlp(h, gate_up, down), x
