"""The operations of a layer where some weights have adapters: base products as they are chosen.

A fused MLP has no place for what adapters add before its activation, so that there it is two
products; weights without adapters run through what they would run through anyway.
"""

from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import jax.numpy as jnp

from jaxrunner.kernels_pallas.products import add_norm as norm_kernel
from jaxrunner.kernels_pallas.products.add_norm import LowRank
from jaxrunner.lora.adapted_linear import AdaptedLinear, Stack, delta, delta_per_head
from jaxrunner.lora.table import ADAPTERS
from jaxrunner.model import MakeOps, Ops
from jaxrunner.operation import Note, Operation, run_first, unnoted
from jaxrunner.ops.adapters.adapted_parts import AdaptedParts
from jaxrunner.ops.plain import glu
from jaxrunner.types import Array, Batch


def adapted_ops(make: MakeOps, batch: Batch, *, note: Note = unnoted) -> Ops:
    """Makes operations that also take `AdaptedLinear`; `batch.inputs` has the table of adapters."""
    ops = make(batch, note=note)

    def places() -> Array:  # that a drafter's batch does not have, nor ask for
        return batch.inputs.tables[ADAPTERS.name].place

    def linear(x: Array, w: Any) -> Array:
        if not isinstance(w, AdaptedLinear):
            return ops.linear(x, w)
        known = (*ops.adapters.summed, Operation("a product, then adapters", _linear))
        return run_first("linear with adapters", known, x, w, places(), note=note)

    def _linear(x: Array, w: AdaptedLinear, place: Array) -> Array:
        y = ops.linear(x, w.base)
        known = (*ops.adapters.linear, ADDED)
        args = y.reshape(len(x), -1), x.reshape(len(x), -1), w.stack, place
        return run_first("adapters", known, *args, note=note).reshape(y.shape)

    def project(x: Array, w: Any) -> Any:
        if not isinstance(w, AdaptedLinear):
            return ops.project(x, w)
        args = ops.project(x, w.base), x.reshape(len(x), -1), w.stack, places()
        return run_first("project with adapters", (*ops.adapters.project, ADDED), *args, note=note)

    def mlp(x: Array, gate_up: Any, down: Any, activation: str = "silu", **how: bool) -> Any:
        if not isinstance(gate_up, AdaptedLinear) and not isinstance(down, AdaptedLinear):
            return ops.mlp(x, gate_up, down, activation, **how)
        if not isinstance(gate_up, AdaptedLinear):
            return project(glu(ops.linear(x, gate_up), activation), down)
        args = ops.linear(x, gate_up.base), x, gate_up.stack, places(), activation
        return project(run_first("units", (*ops.adapters.units, UNITS), *args, note=note), down)

    def add_norm(
        x: Array, residual: Any, weight: Array, eps: float, one_more: bool = False, *end: Array,
        **told: Any,
    ) -> tuple[Array, Array]:  # fmt: skip
        if not isinstance(residual, AdaptedParts):
            return ops.add_norm(x, residual, weight, eps, one_more, *end, **told)
        more = LowRank(residual.low, residual.b[0], residual.place)
        if norm_kernel.refuses(x, residual.parts, weight, more, *end) is not None:
            return ops.add_norm(x, residual.all(), weight, eps, one_more, *end, **told)
        return norm_kernel.add_rms_norm(x, residual.parts, weight, more, eps=eps, one_more=one_more)

    per_head = partial(_per_head, ops, places)
    return replace(
        ops, linear=linear, project=project, mlp=mlp, add_norm=add_norm, per_head=per_head,
        project_qkv=partial(_qkv, ops, linear), plain_linear=partial(_plain_linear, ops, places),
        attend_latent=partial(ops.attend_latent, per_head=per_head),
    )  # fmt: skip


def _qkv(ops: Ops, linear: Any, x: Array, w: Any) -> Any:
    return linear(x, w) if isinstance(w, AdaptedLinear) else ops.project_qkv(x, w)


def _plain_linear(ops: Ops, places: Any, x: Array, w: Any) -> Array:
    if not isinstance(w, AdaptedLinear):
        return ops.plain_linear(x, w)
    return _added(ops.plain_linear(x, w.base), x, w.stack, places())


def _per_head(ops: Ops, places: Any, axes: str, x: Array, w: Any, part: slice) -> Array:
    if not isinstance(w, AdaptedLinear):
        return ops.per_head(axes, x, w, part)
    y = ops.per_head(axes, x, w.base, part)
    inputs, weight = axes.split("->")[0].split(",")
    up = inputs[-1] == weight[-1]
    more = delta_per_head(x, w.stack, places(), part, up=up)
    return (y.astype(jnp.float32) + more).astype(y.dtype)


def _added(y: Array, x: Array, stack: Stack, place: Array) -> Array:
    """Returns y, [T, N] or parts of it, with what adapters add.

    Of many tokens XLA has one GEMM add to what the other gives, the base product's, where it is
    XLA's, to that of adapters: no sum is a pass of its own.
    """
    if y.ndim == 3:
        return y.at[0].set(_added(y[0], x, stack, place))
    return y + delta(x, stack, place, y.dtype)


def _units(y: Array, x: Array, stack: Stack, place: Array, activation: str) -> Array:
    return glu(_added(y.reshape(len(y), -1), x, stack, place).reshape(y.shape), activation)


ADDED = Operation("plain JAX", _added)
UNITS = Operation("plain JAX", _units)


@lru_cache(maxsize=64)  # partials are not equal, and so would be no programs of them
def adapted(make: MakeOps) -> MakeOps:
    """Returns `adapted_ops` of what makes the operations of weights without adapters."""
    return partial(adapted_ops, make)
