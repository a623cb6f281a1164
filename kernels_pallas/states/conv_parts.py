"""Channels of groups that lie apart, read and written by the threads of a warpgroup, on Hopper.

A thread has `vec` channels side by side, all of one group of `num`. In memory a group has `wide`
numbers: `take` reads its channels from `start` on among them, `put` writes those `wide` of its
channels that begin with `start`.
"""

from typing import Any

from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, memref, vector
import numpy as np

from jaxrunner.kernels_pallas import lanes, mosaic
from jaxrunner.kernels_pallas.mosaic import Layout, Ref
from jaxrunner.types import Array

THREADS, WARP = 128, 32
Spread = tuple[int, int, int]  # num, wide, start


def take(ref: Ref, first: Array, vec: int, spread: Spread) -> Array:
    """Reads the channels from `first` on of ref, [groups * n]: [THREADS * vec]."""
    num, wide, start = spread
    out = plgpu.ShapeDtypeStruct((THREADS * vec,), ref.dtype, layout=_layout(vec))

    @mosaic.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.Layout.WG_SPLAT(())), return_type=out)
    def load(_: Any, ref: ir.Value, first: mgpu.FragmentedArray) -> mgpu.FragmentedArray:
        group, channel = _group(first, vec, num)
        at = arith.addi(arith.muli(group, _i32(wide)), arith.addi(channel, _i32(start)))
        at = arith.index_cast(ir.IndexType.get(), at)
        places = [arith.addi(at, mgpu.c(i, ir.IndexType.get())) for i in range(vec)]
        numbers = [memref.load(ref, [place]) for place in places]
        return _array(vector.from_elements(ir.VectorType.get((vec,), numbers[0].type), numbers))

    return load(ref, first)


def put(x: Array, ref: Ref, first: Array, vec: int, spread: Spread) -> None:
    """Writes x, [THREADS * vec] channels from `first` on, where they lie in ref, [groups * n]."""
    num, wide, start = spread

    @mosaic.inline_mgpu(
        arg_types=(_layout(vec), plgpu.RefType(), plgpu.Layout.WG_SPLAT(())),
    )
    def store(_: Any, x: mgpu.FragmentedArray, ref: ir.Value, first: mgpu.FragmentedArray) -> None:
        group, channel = _group(first, vec, num)
        nth = arith.subi(channel, _i32(start))
        with mgpu.when(arith.cmpi(arith.CmpIPredicate.ult, nth, _i32(wide))):
            at = arith.addi(arith.muli(group, _i32(wide)), nth)
            at = arith.index_cast(ir.IndexType.get(), at)
            vector.store(x.registers.flat[0], ref, [at])

    store(x, ref, first)


def sum_of_warp(x: Array, vec: int) -> Array:
    """Returns for each number the sum of those of its warp, of x, [THREADS * vec] in float32."""
    out = plgpu.ShapeDtypeStruct(x.shape, x.dtype, layout=_layout(vec))

    @mosaic.inline_mgpu(arg_types=(_layout(vec),), return_type=out)
    def total(_: Any, x: mgpu.FragmentedArray) -> mgpu.FragmentedArray:
        (register,) = x.registers.flat
        numbers = [
            vector.extract(register, dynamic_position=[], static_position=[i]) for i in range(vec)
        ]
        value = numbers[0]
        for number in numbers[1:]:
            value = arith.addf(value, number)
        for distance in (16, 8, 4, 2, 1):
            value = arith.addf(value, utils.shfl_bfly(value, distance))
        return _array(vector.broadcast(register.type, value))

    return total(x)


def any_take(ref: Ref, first: Array, vec: int, spread: Spread) -> Array:
    """As `take`, for an interpreter of kernels."""
    num, wide, start = spread
    channel = first + jnp.arange(THREADS * vec)
    return jnp.take(ref[...], lax.div(channel, num) * wide + start + lax.rem(channel, num))


def any_put(x: Array, ref: Ref, first: Array, vec: int, spread: Spread) -> None:
    """As `put`, for an interpreter of kernels."""
    num, wide, start = spread
    channel = first + jnp.arange(THREADS * vec)
    nth = lax.rem(channel, num) - start
    at = jnp.where((nth >= 0) & (nth < wide), lax.div(channel, num) * wide + nth, ref.shape[0])
    ref[...] = ref[...].at[at].set(x, mode="drop")


def any_sum_of_warp(x: Array, vec: int) -> Array:
    """As `sum_of_warp`, for an interpreter of kernels."""
    return jnp.repeat(x.reshape(-1, WARP * vec).sum(1), WARP * vec)


def _layout(vec: int) -> Layout:
    return plgpu.Layout.WG_STRIDED((THREADS * vec,), vec_size=vec)


def _array(register: ir.Value) -> mgpu.FragmentedArray:
    (vec,) = ir.VectorType(register.type).shape
    kind = mgpu.WGStridedFragLayout((THREADS * vec,), vec)
    return mgpu.FragmentedArray(
        _registers=np.array([register], object), _layout=kind, _is_signed=None
    )


def _group(first: mgpu.FragmentedArray, vec: int, num: int) -> tuple[ir.Value, ir.Value]:
    """Returns the group of a thread's channels, and which of its are the first of them."""
    channel = arith.addi(first.registers.item(), arith.muli(lanes.thread(), _i32(vec)))
    return arith.divui(channel, _i32(num)), arith.remui(channel, _i32(num))


def _i32(n: int) -> ir.Value:
    return mgpu.c(n, ir.IntegerType.get_signless(32))
