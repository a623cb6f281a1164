"""The registers of adapters' kernels: rows of tokens, and which adapter each is of.

All of it lies as a product's left operand and its result do, [64, n]. Rows behind the last token
are like the last, so that nothing is read that is not there.
"""

from collections.abc import Callable, Sequence
import functools
from typing import Any

from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, memref, vector
import numpy as np

from jaxrunner.kernels_pallas import mosaic
from jaxrunner.kernels_pallas.mosaic import Index, Ref, Shaped
from jaxrunner.types import Array

ROWS = 64  # tokens of a warpgroup: the height of a Hopper matrix product
MAX_ROWS = 256
LAYOUT = plgpu.Layout.WGMMA


def refuses_tokens(T: int, place: Shaped) -> str | None:
    """Says why T tokens and the places of their adapters, [T], are not served, or None."""
    if T != 1 and (T % 8 or T > ROWS) and (T % ROWS or T > MAX_ROWS):
        return f"wants 1, 8, 16, ... 64 or 128, 192, 256 tokens, got {T}"
    return refuses_places(T, place)


def refuses_places(T: int, place: Shaped) -> str | None:
    """Says why the places of T tokens' adapters, [T], are not served, or None."""
    if place.shape != (T,) or place.dtype != jnp.int32:
        return f"wants the places of {T} tokens in int32, got {place.shape} in {place.dtype}"
    return None


def refuses_gates(y: Shaped, b: Shaped) -> str | None:
    """Says why y, [T, 2, F], and b, [2, places, rank, F], are no gates and units, or None."""
    if y.shape[1:] != (b.shape[0], b.shape[-1]) or b.shape[0] != 2 or y.dtype != b.dtype:
        return f"wants a gate and an up projection, got {y.shape} in {y.dtype} and {b.shape}"
    return None


def take_rows(ref: Ref) -> Array:
    """Returns rows of ref, [rows, n], in registers, [64, n]."""
    rows, n = ref.shape
    itemsize = jnp.dtype(ref.dtype).itemsize

    def read(ref: ir.Value, row: ir.Value, column: ir.Value) -> ir.Value:
        pair = ir.VectorType.get((2,), ir.MemRefType(ref.type).element_type)
        return vector.load(pair, ref, [row, column], alignment=2 * itemsize)

    return _take(ref, rows, (ROWS, n), ref.dtype, None, read)


def take_places(place: Ref, n: int) -> Array:
    """Returns the place, plus one, of each row's adapter, [64, n], of place, [rows]; 0 for none."""

    def read(ref: ir.Value, row: ir.Value, column: ir.Value) -> ir.Value:
        value = memref.load(ref, [row])
        return vector.broadcast(ir.VectorType.get((2,), value.type), value)

    return _take(place, place.shape[0], (ROWS, n), jnp.int32, True, read)


def _take(
    ref: Ref, rows: int, shape: tuple[int, int], dtype: Any, is_signed: bool | None,
    read: Callable[[ir.Value, ir.Value, ir.Value], ir.Value],
) -> Array:  # fmt: skip
    """Returns an array of what `read`(ref, row, column) gives of two neighbours."""
    out = plgpu.ShapeDtypeStruct(shape, dtype, layout=LAYOUT)

    @mosaic.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=out)
    def take(_: Any, ref: ir.Value) -> mgpu.FragmentedArray:
        layout, last = LAYOUT.to_mgpu(), mgpu.c(rows - 1, ir.IndexType.get())
        registers = np.empty(layout.registers_shape(shape), dtype=object)
        places = layout.thread_idxs(shape)
        for at, (row, column) in zip(np.ndindex(registers.shape), places, strict=True):
            registers[at] = read(ref, arith.minui(row, last), column)
        return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=is_signed)

    return take(ref)


def side_by_side(arrays: Sequence[Array]) -> Array:
    """Joins arrays, [64, n] each, along their columns."""
    if len(arrays) == 1:
        return arrays[0]
    shape = ROWS, sum(x.shape[1] for x in arrays)
    out = plgpu.ShapeDtypeStruct(shape, arrays[0].dtype, layout=LAYOUT)

    @mosaic.inline_mgpu(arg_types=(LAYOUT,) * len(arrays), return_type=out)
    def join(_: Any, *arrays: mgpu.FragmentedArray) -> mgpu.FragmentedArray:
        registers = np.concatenate([x.registers for x in arrays], axis=1)  # of columns, by eights
        return mgpu.FragmentedArray(_registers=registers, _layout=LAYOUT.to_mgpu(), _is_signed=None)

    return join(*arrays)


def own(place: Array, of: Index, x: Array) -> Array:
    """Returns x, [64, n], with zeros in rows that are of another adapter, `of` plus one."""
    return jnp.where(place == of, x, jnp.zeros_like(x))


def total(parts: Sequence[Array]) -> Array:
    """Sums arrays up, in their order."""
    return functools.reduce(jnp.add, parts)
