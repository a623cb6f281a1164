"""The work item of a block of decode attention's grid: eight numbers, read in two loads.

Counters of the parts of each row and KV head lie behind them, so that no kernel fills these.
"""

from typing import Any

from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, vector

from jaxrunner.kernels_pallas import mosaic
from jaxrunner.kernels_pallas.attention.decode_plan import Items
from jaxrunner.kernels_pallas.mosaic import Ref
from jaxrunner.types import Array

VECTOR = 4  # numbers of a load of 16 bytes
COUNT = len(Items._fields)


def table(items: Items, num_heads: int) -> Array:
    """Returns items as [I, 8 + K], padded to loads; the first B have counters of a row: zeros."""
    counters = -(-num_heads // VECTOR) * VECTOR
    return jnp.pad(jnp.stack(items, 1), ((0, 0), (0, counters)))


def counter(ref: Ref, row: Array, head: Array) -> Ref:
    """Returns the counter of a row's parts of a KV head, which must be left at zero."""
    return ref.at[row, COUNT + head]


def read(ref: Ref, item: Array) -> Items:
    """Reads the numbers of one item of ref, [I, 8 + K], which are the fields of `Items`."""
    scalar = plgpu.Layout.WG_SPLAT(())
    out = [plgpu.ShapeDtypeStruct((), jnp.int32, layout=scalar)] * COUNT

    @mosaic.inline_mgpu(arg_types=(plgpu.RefType(), scalar), return_type=out)
    def load(_: Any, ref: ir.Value, item: mgpu.FragmentedArray) -> list[mgpu.FragmentedArray]:
        index, i32 = ir.IndexType.get(), ir.IntegerType.get_signless(32)
        four, at = ir.VectorType.get((VECTOR,), i32), arith.index_cast(index, item.registers.item())
        numbers = []
        for start in range(0, COUNT, VECTOR):
            loaded = vector.load(four, ref, [at, mgpu.c(start, index)], alignment=4 * VECTOR)
            for i in range(VECTOR):
                number = vector.extract(loaded, dynamic_position=[], static_position=[i])
                numbers.append(number)
        return [
            mgpu.FragmentedArray.splat(number, (), scalar.to_mgpu(), is_signed=True)
            for number in numbers
        ]

    return Items(*load(ref, item))
