"""Functions of an online softmax that kernels share (arXiv:2205.14135). Scores are in base 2."""

import functools
import math
from typing import Any

from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, scf, vector
import numpy as np

from jaxrunner.kernels_pallas import mosaic
from jaxrunner.kernels_pallas.mosaic import Index, Layout
from jaxrunner.types import Array

LOG2_E = math.log2(math.e)
NOTHING = -1e30  # less than any score, yet finite: a row that sees no key must not become NaN
LAYOUT = plgpu.Layout.WGMMA
PER_ROW = LAYOUT.reduce(1)


def full(
    shape: tuple[int, ...], value: float, layout: Layout = LAYOUT, dtype: DTypeLike = jnp.float32
) -> Array:
    """Returns an array of equal numbers, for loops and branches to carry."""
    return plgpu.layout_cast(jnp.full(shape, value, dtype), layout)


def seen(
    first: Index, shape: tuple[int, ...], axis: int, length: Array, window: Index | None
) -> Array:
    """Says which keys the last of `length` tokens sees; keys lie along `axis`, from `first` on.

    length: a number, or one of each element.
    """
    at = first + plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=LAYOUT)
    return at < length if window is None else (at < length) & (at >= length - window)


def weigh(
    scores: Array, acc: Array, best: Array, total: Array, dtype: DTypeLike
) -> tuple[Array, ...]:  # fmt: skip
    """Weighs keys by their scores, [64, n], to be added to what older keys gave.

    acc: [64, D], weighted values; best and total: [64], the largest score and the sum of weights.
    Returns the weights in a dtype, acc, best and total; values are still to be added to acc.
    """
    new_best = jnp.maximum(best, scores.max(axis=1))
    p = jnp.exp2(scores - wide(new_best, scores))
    kept = jnp.exp2(best - new_best)
    return p.astype(dtype), acc * wide(kept, acc), new_best, total * kept + p.sum(axis=1)


def wide(x: Array, like: Array) -> Array:
    """Returns numbers of rows, [64], as a matrix like another, [64, n]."""
    return lax.broadcast_in_dim(x, like.shape, [0])


def with_sink(sink: Array, once: Array, best: Array, total: Array) -> tuple[Array, Array, Array]:
    """Lets a logit join the softmax that has no value, `once` a row: in one of its parts.

    Returns the largest score, the total, and what is kept of older weights.
    """
    sink = jnp.where(once, sink, NOTHING)
    new_best = jnp.maximum(best, sink)
    kept = jnp.exp2(best - new_best)
    return new_best, total * kept + jnp.exp2(sink - new_best), kept


def rescale(acc: Array, kept: Array) -> Array:
    """Returns acc, [64, n], times what is kept of each row, [64]; warps that keep all skip it."""
    out = plgpu.ShapeDtypeStruct(acc.shape, acc.dtype, layout=LAYOUT)

    @mosaic.inline_mgpu(arg_types=(LAYOUT, PER_ROW), return_type=out)
    def scale(_: Any, acc: mgpu.FragmentedArray, kept: mgpu.FragmentedArray) -> Any:
        old = list(acc.registers.flat)
        wide = kept.broadcast_in_dim(acc.shape, (0,), acc.layout).registers.flat
        branch = scf.IfOp(_some_less(kept), [x.type for x in old], has_else=True)
        with ir.InsertionPoint(branch.then_block):
            scf.yield_([arith.mulf(x, y) for x, y in zip(old, wide, strict=True)])
        with ir.InsertionPoint(branch.elseRegion.blocks[0]):
            scf.yield_(old)
        registers = np.array(list(branch.results), object).reshape(acc.registers.shape)
        return mgpu.FragmentedArray(_registers=registers, _layout=acc.layout, _is_signed=None)

    return scale(acc, kept)


def _some_less(kept: mgpu.FragmentedArray) -> ir.Value:
    """Says whether a warp has a number that is not 1. In MLIR."""
    i32, one = ir.IntegerType.get_signless(32), mgpu.c(1.0, ir.F32Type.get())
    less = []
    for register in kept.registers.flat:
        number = vector.extract(register, dynamic_position=[], static_position=[0])
        less.append(arith.cmpf(arith.CmpFPredicate.UNE, number, one))
    text = (
        "{ .reg .pred p; setp.ne.b32 p, $1, 0; vote.sync.any.pred p, p, 0xffffffff; "
        "selp.b32 $0, 1, 0, p; }"
    )
    mine = arith.extui(i32, functools.reduce(arith.ori, less))
    found = mosaic.inline_asm(i32, [mine], text, "=r,r", has_side_effects=True)
    return arith.cmpi(arith.CmpIPredicate.ne, found, mgpu.c(0, i32))
