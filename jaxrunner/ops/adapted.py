"""The operations of a layer where some weights have adapters: base products as they are chosen.

A fused MLP has no place for what adapters add before its activation, so that there it is two
products; weights without adapters run through what they would run through anyway.
"""

from dataclasses import replace
import functools
from typing import Any

import jax.numpy as jnp

from jaxrunner.lora.adapted_linear import AdaptedLinear, delta
from jaxrunner.lora.table import ADAPTERS
from jaxrunner.model import MakeOps, Ops
from jaxrunner.operation import Note, unnoted
from jaxrunner.ops.plain import swiglu
from jaxrunner.types import Array, Batch


def adapted_ops(make: MakeOps, batch: Batch, *, note: Note = unnoted) -> Ops:
    """Makes operations that also take `AdaptedLinear`; `batch.inputs` has the table of adapters."""
    ops = make(batch, note=note)

    def add(y: Array, x: Array, w: AdaptedLinear) -> Array:
        """Returns y, the base's product of x, with what adapters add: rounded once more."""
        more = delta(x, w.stack, batch.inputs.tables[ADAPTERS.name].place, y.dtype)
        total = y.astype(jnp.float32) + more.reshape(y.shape).astype(jnp.float32)
        return total.astype(y.dtype)

    def linear(x: Array, w: Any) -> Array:
        if not isinstance(w, AdaptedLinear):
            return ops.linear(x, w)
        return add(ops.linear(x, w.base), x, w)

    def project(x: Array, w: Any) -> Array:
        if not isinstance(w, AdaptedLinear):
            return ops.project(x, w)
        y = ops.project(x, w.base)
        if y.ndim == 2:
            return add(y, x, w)
        return y.at[0].set(add(y[0], x, w))  # of the parts of a sum

    def mlp(x: Array, gate_up: Any, down: Any) -> Array:
        if not isinstance(gate_up, AdaptedLinear) and not isinstance(down, AdaptedLinear):
            return ops.mlp(x, gate_up, down)
        return project(swiglu(linear(x, gate_up)), down)

    return replace(ops, linear=linear, project=project, mlp=mlp)


@functools.lru_cache(maxsize=64)  # partials are not equal, and so would be no programs of them
def adapted(make: MakeOps) -> MakeOps:
    """Returns `adapted_ops` of what makes the operations of weights without adapters."""
    return functools.partial(adapted_ops, make)
