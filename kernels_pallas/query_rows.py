"""Several query tokens of a batch row as rows of one tile: head g of token i in row i * G + g.

The tokens of a row of the batch are its last ones, and each sees one key more than that before it.
A row may have fewer than its `query_len` places; tokens behind them see what its last one sees.
"""

from typing import Any

from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, vector
import numpy as np

from jaxrunner.kernels_pallas import mosaic
from jaxrunner.kernels_pallas.mosaic import Index, Layout, Ref
from jaxrunner.types import Array

LAYOUT = plgpu.Layout.WGMMA  # of the left operand of a product


def num_queries(ref: Ref | None, row: Array) -> Index:
    """Reads how many tokens a row has in ref, [B]; 1 where there is none. `row` may be B."""
    return 1 if ref is None else ref[jnp.minimum(row, ref.shape[0] - 1)]


def of_row(ref: Ref, row: Array, h: Array, query_len: int) -> Ref:
    """Returns a row's part of ref, [T, K, G, D], for KV head h: [G, D], or [query_len, G, D]."""
    if query_len == 1:
        return ref.at[row, h]
    return ref.at[pl.ds(row * query_len, query_len), h]


def sight(
    rows: int, group: int, layout: Layout, length: Array, num: Index
) -> tuple[Array | None, Array]:
    """Returns which token each row of a tile is of, and how many of `length` keys that sees.

    num: the tokens that are there, as of `num_queries`. Of one query, None and `length` itself.
    """
    if isinstance(num, int):
        return None, length
    row = plgpu.broadcasted_iota(jnp.int32, (rows,), 0, layout=layout)
    token = lax.div(row, jnp.full_like(row, group))
    return token, length - jnp.maximum(num - 1 - token, 0)


def load(ref: Ref, start: Array, shape: tuple[int, int], query_len: int, apart: int) -> Array:
    """Loads queries, [rows, D], of `query_len` tokens into registers, laid out as `LAYOUT`.

    Arguments are those of `place`; shape: [rows, D].
    """
    out = plgpu.ShapeDtypeStruct(shape, ref.dtype, layout=LAYOUT)

    @mosaic.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.Layout.WG_SPLAT(())), return_type=out)
    def read(_: Any, ref: ir.Value, start: mgpu.FragmentedArray) -> mgpu.FragmentedArray:
        layout, of = LAYOUT.to_mgpu(), ir.MemRefType(ref.type)
        begin = arith.index_cast(ir.IndexType.get(), start.registers.item())
        pair = ir.VectorType.get((2,), of.element_type)
        registers = np.empty(layout.registers_shape(shape), dtype=object)
        places = layout.thread_idxs(shape)
        for at, (row, column) in zip(np.ndindex(registers.shape), places, strict=True):
            token, head = place(row, begin, of.shape[1], query_len, apart)
            registers[at] = vector.load(pair, ref, [token, head, column], alignment=4)
        return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)

    return read(ref, start)


def place(row: ir.Value, start: ir.Value, group: int, query_len: int, apart: int) -> list[ir.Value]:
    """Returns where a row of a tile is in queries, [..., G, D]. In MLIR.

    The first of `query_len` tokens is at `start`, each `apart` behind that before it. Rows of the
    tile behind the last are like the last.
    """
    index = ir.IndexType.get()
    token, head = split(arith.minui(row, mgpu.c(query_len * group - 1, index)), group)
    return [arith.addi(start, arith.muli(token, mgpu.c(apart, index))), head]


def split(row: ir.Value, group: int) -> list[ir.Value]:
    """Returns the token and the head that a row of a tile is of. In MLIR."""
    size = mgpu.c(group, ir.IndexType.get())
    return [arith.divui(row, size), arith.remui(row, size)]
