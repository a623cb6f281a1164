"""What the threads of a warp find together of vectors of 128, each of four warps for itself."""

from collections.abc import Callable

from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, vector
import numpy as np

from jaxrunner.kernels_pallas import lanes, mosaic
from jaxrunner.kernels_pallas.lanes import LANES
from jaxrunner.types import Array

SIZE = 32  # threads


def largest(x: Array) -> Array:
    """Returns the largest of a warp's numbers, int32, in all of its threads."""
    return _map(x, lambda value: _redux(value, "max"))


def least(x: Array) -> Array:
    """Returns the least of a warp's numbers, int32, in all of its threads."""
    return _map(x, lambda value: _redux(value, "min"))


def total(x: Array) -> Array:
    """Returns the sum of a warp's numbers, float32, in all of its threads, always in one order."""

    def add(value: ir.Value) -> ir.Value:
        for distance in (16, 8, 4, 2, 1):
            value = arith.addf(value, utils.shfl_bfly(value, distance))
        return value

    return _map(x, add)


def _redux(value: ir.Value, which: str) -> ir.Value:
    i32, text = ir.IntegerType.get_signless(32), f"redux.sync.{which}.s32 $0, $1, 0xffffffff;"
    return mosaic.inline_asm(i32, [value], text, "=r,r", has_side_effects=True)


def _map(x: Array, of: Callable[[ir.Value], ir.Value]) -> Array:
    out = plgpu.ShapeDtypeStruct((LANES,), x.dtype, layout=lanes.LAYOUT)
    is_signed = True if jnp.issubdtype(x.dtype, jnp.integer) else None

    @mosaic.inline_mgpu(arg_types=(lanes.LAYOUT,), return_type=out)
    def run(_: object, x: mgpu.FragmentedArray) -> mgpu.FragmentedArray:
        value = of(vector.extract(x.registers[0], dynamic_position=[], static_position=[0]))
        registers = np.array([vector.broadcast(ir.VectorType.get((1,), value.type), value)], object)
        return mgpu.FragmentedArray(_registers=registers, _layout=x.layout, _is_signed=is_signed)

    return run(x)
