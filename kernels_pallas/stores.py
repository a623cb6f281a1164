"""Stores that need not be as fast as can be."""

from collections.abc import Iterator
import functools
import math
from typing import Any

from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, memref, vector

from jaxrunner.kernels_pallas import mosaic
from jaxrunner.kernels_pallas.attention import query_rows
from jaxrunner.kernels_pallas.mosaic import Layout, Ref
from jaxrunner.types import Array


def put(ref: Ref, x: Array) -> None:
    """Writes x to a reference; from JAX 0.12 on only this does where banks of memory conflict."""
    store = getattr(plgpu, "store", None)
    if store is not None:
        store(ref, x, optimized=False)
    else:
        ref[...] = x


def put_rows(
    x: Array, ref: Ref, layout: Layout = plgpu.Layout.WGMMA, *, first: Array | None = None
) -> None:
    """Writes the first rows of x, [m, n], from registers: as many as ref has from `first` on.

    ref: [rows, n], or [Q, G, n] of Q query tokens. first: 0 if None.
    """
    more = () if first is None else (first,)

    @mosaic.inline_mgpu(
        arg_types=(layout, plgpu.RefType(), *[plgpu.Layout.WG_SPLAT(())] * len(more))
    )
    def write(_: Any, x: mgpu.FragmentedArray, ref: ir.Value, *first: mgpu.FragmentedArray) -> None:
        (*shape, _), index = ir.MemRefType(ref.type).shape, ir.IndexType.get()
        limit = mgpu.c(math.prod(shape), index)
        starts = [arith.index_cast(index, i.registers.item()) for i in first]
        places = x.layout.thread_idxs(x.shape)
        for (row, column), value in zip(places, x.registers.flat, strict=True):
            row = functools.reduce(arith.addi, starts, row)
            place = [row] if len(shape) == 1 else query_rows.split(row, shape[1])
            with mgpu.when(arith.cmpi(arith.CmpIPredicate.ult, row, limit)):
                vector.store(value, ref, [*place, column])

    write(x, ref, *more)


def put_some_rows(x: Array, ref: Ref, keys: Ref, key: Array) -> None:
    """Writes those of the first rows of x, [64, n], from registers to ref, [rows, n], that have
    `key` in keys, [rows], int32."""

    @mosaic.inline_mgpu(
        arg_types=(plgpu.Layout.WGMMA, *[plgpu.RefType()] * 2, plgpu.Layout.WG_SPLAT(()))
    )
    def write(
        _: Any, x: mgpu.FragmentedArray, ref: ir.Value, keys: ir.Value, key: mgpu.FragmentedArray
    ) -> None:
        index, rows = ir.IndexType.get(), ir.MemRefType(ref.type).shape[0]
        limit, last = mgpu.c(rows, index), mgpu.c(rows - 1, index)
        places = x.layout.thread_idxs(x.shape)
        for (row, column), value in zip(places, x.registers.flat, strict=True):
            inside = arith.cmpi(arith.CmpIPredicate.ult, row, limit)
            found = memref.load(keys, [arith.minui(row, last)])
            same = arith.cmpi(arith.CmpIPredicate.eq, found, key.registers.item())
            with mgpu.when(arith.andi(inside, same)):
                vector.store(value, ref, [row, column])

    write(x, ref, keys, key)


def put_heads(x: Array, ref: Ref, tile: query_rows.Tile | None = None) -> None:
    """Writes the first rows of x, [64, n], or those of a tile's heads, to ref, as `put_rows` does.

    ref: [rows, n], or of a tile [Q, G, n]. All numbers of a thread lie at constant distances from
    its first one.
    """

    @mosaic.inline_mgpu(arg_types=(plgpu.Layout.WGMMA, plgpu.RefType()))
    def write(_: Any, x: mgpu.FragmentedArray, ref: ir.Value) -> None:
        (*shape, _), index = ir.MemRefType(ref.type).shape, ir.IndexType.get()
        heads = tile or query_rows.Tile(1, shape[0], query_rows.ROWS)
        first, column = next(iter(x.layout.thread_idxs(x.shape)))
        # A thread has numbers in two rows, eight apart.
        for half in range(1 if heads.lower_halves else 2):
            row = arith.addi(first, mgpu.c(8 * half, index))
            place, inside = heads.place(row, flat=len(shape) == 1)
            with mgpu.when(inside):
                for i, value in enumerate(x.registers.flat[half::2]):
                    vector.store(value, ref, [*place, arith.addi(column, mgpu.c(8 * i, index))])

    write(x, ref)


def put_tokens(acc: Array, out: Ref, place: Ref, first: Array, low: Array, high: Array) -> None:
    """Writes acc, [64, D], to those of out, [T, D], from `first` on that are from `low` to `high`.

    All of them go by way of `place`, [64, D] in shared memory; some from registers.
    """
    rows = acc.shape[0]
    whole = (first >= low) & (first + rows <= high)

    @pl.when(whole)
    def _() -> None:
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        place[...] = acc
        plgpu.commit_smem()
        mosaic.copy_smem_to_gmem(place, out.at[pl.ds(first, rows)])

    @mosaic.inline_mgpu(
        arg_types=(plgpu.Layout.WGMMA, plgpu.RefType(), *[plgpu.Layout.WG_SPLAT(())] * 3)
    )
    def put_some(
        _: Any, acc: mgpu.FragmentedArray, out: ir.Value, *scalars: mgpu.FragmentedArray
    ) -> None:
        # Two elements of a row at a time.
        index = ir.IndexType.get()
        first, low, high = (arith.index_cast(index, x.registers.item()) for x in scalars)
        places = acc.layout.thread_idxs(acc.shape)
        for (row, column), value in zip(places, acc.registers.flat, strict=True):
            token = arith.addi(first, row)
            above = arith.cmpi(arith.CmpIPredicate.sge, token, low)
            below = arith.cmpi(arith.CmpIPredicate.slt, token, high)
            with mgpu.when(arith.andi(above, below)):
                vector.store(value, out, [token, column])

    pl.when(jnp.logical_not(whole))(lambda: put_some(acc, out, first, low, high))


def put_columns(x: Array, ref: Ref, num: Array) -> None:
    """Writes the first `num` columns of x, [64, n], from registers as rows of ref, [n, 64]."""

    @mosaic.inline_mgpu(arg_types=(plgpu.Layout.WGMMA, plgpu.RefType(), plgpu.Layout.WG_SPLAT(())))
    def write(_: Any, x: mgpu.FragmentedArray, ref: ir.Value, num: mgpu.FragmentedArray) -> None:
        limit = arith.index_cast(ir.IndexType.get(), num.registers.item())
        for row, column, value in _elements(x):
            with mgpu.when(arith.cmpi(arith.CmpIPredicate.ult, column, limit)):
                memref.store(value, ref, [column, row])

    write(x, ref, num)


def put_transposed(
    x: Array, ref: Ref, layout: Layout = plgpu.Layout.WGMMA, *, for_words: bool = False
) -> None:
    """Writes the first rows and columns of x from registers as columns and rows of ref.

    for_words: as of `put_all_transposed`.
    """

    @mosaic.inline_mgpu(arg_types=(layout, plgpu.RefType()))
    def write(_: Any, x: mgpu.FragmentedArray, ref: ir.Value) -> None:
        sizes = [mgpu.c(n, ir.IndexType.get()) for n in ir.MemRefType(ref.type).shape]
        for row, column, value in _elements(x):
            inside = [
                arith.cmpi(arith.CmpIPredicate.ult, *pair)
                for pair in zip((column, row), sizes, strict=True)
            ]
            with mgpu.when(arith.andi(*inside)):
                memref.store(value, ref, [column, _for_words(row) if for_words else row])

    write(x, ref)


def put_all_transposed(
    x: Array, ref: Ref, layout: Layout = plgpu.Layout.WGMMA, *, for_words: bool = False
) -> None:
    """Writes x, [64, n], or [32, n] of which each warp has eight rows, from registers as columns of
    ref, [n, 64 or 32].

    for_words: whether columns come in the order of `widen_tile.in_order`.
    """
    eights = x.shape[0] // 32  # of rows, of each of which a thread has one

    @mosaic.inline_mgpu(arg_types=(layout, plgpu.RefType()))
    def write(_: Any, x: mgpu.FragmentedArray, ref: ir.Value) -> None:
        index = ir.IndexType.get()
        row, column = next(iter(x.layout.thread_idxs(x.shape)))
        for i, pair in enumerate(x.registers.flat):
            # A thread has numbers of its rows by turns, and of every fourth pair.
            mine = arith.addi(row, mgpu.c(8 * (i % eights), index))
            for j in range(2):
                value = vector.extract(pair, dynamic_position=[], static_position=[j])
                at = arith.addi(column, mgpu.c(8 * (i // eights) + j, index))
                memref.store(value, ref, [at, _for_words(mine) if for_words else mine])

    write(x, ref)


def put_for_words(layout: Layout, ref: Ref, x: Array) -> None:
    """Writes x to ref, both [m, n] in 16 bits, in the order of `widen_tile.in_order`.

    layout: of x, of which a thread has eight neighbours at a time.
    """

    @mosaic.inline_mgpu(arg_types=(layout, plgpu.RefType()))
    def write(_: Any, x: mgpu.FragmentedArray, ref: ir.Value) -> None:
        index, kind = ir.IndexType.get(), ir.MemRefType(ref.type).element_type
        two = ir.VectorType.get((2,), kind)
        for (row, column), eight in zip(
            x.layout.thread_idxs(x.shape), x.registers.flat, strict=True
        ):
            first = _for_words(column)
            for i in range(4):
                pair = [
                    vector.extract(eight, dynamic_position=[], static_position=[i + 4 * second])
                    for second in range(2)
                ]
                at = arith.addi(first, mgpu.c(8 * i, index))
                vector.store(vector.from_elements(two, pair), ref, [row, at])

    write(x, ref)


def _for_words(i: ir.Value) -> ir.Value:
    """Returns the place of number i in the order of `widen_tile.in_order`. In MLIR."""
    run, rest = _parts(i, 32)
    thread, rest = _parts(rest, 8)
    second, pair = _parts(rest, 4)
    places = (run, 32), (pair, 8), (thread, 2), (second, 1)
    terms = [arith.muli(n, mgpu.c(size, ir.IndexType.get())) for n, size in places]
    return functools.reduce(arith.addi, terms)


def _parts(i: ir.Value, size: int) -> tuple[ir.Value, ir.Value]:
    """Returns which part of `size` i is in, and where in it."""
    by = mgpu.c(size, ir.IndexType.get())
    return arith.divui(i, by), arith.remui(i, by)


def put_routed(x: Array, route: Array, ref: Ref, num: Array, first: Array) -> None:
    """Writes the first `num` columns of x, [64, n], from registers to the routes that they are.

    ref: [k, T, E], written from number `first` of E on; route: [64, n], int32, which of T * k a
    column is.
    """

    @mosaic.inline_mgpu(
        arg_types=(
            *[plgpu.Layout.WGMMA] * 2, plgpu.RefType(), *[plgpu.Layout.WG_SPLAT(())] * 2,
        )
    )  # fmt: skip
    def write(
        _: Any, x: mgpu.FragmentedArray, route: mgpu.FragmentedArray, ref: ir.Value,
        num: mgpu.FragmentedArray, first: mgpu.FragmentedArray,
    ) -> None:  # fmt: skip
        index = ir.IndexType.get()
        limit, start = (arith.index_cast(index, i.registers.item()) for i in (num, first))
        k = mgpu.c(ir.MemRefType(ref.type).shape[0], index)
        for (row, column, value), (_, _, number) in zip(
            _elements(x), _elements(route), strict=True
        ):
            with mgpu.when(arith.cmpi(arith.CmpIPredicate.ult, column, limit)):
                number = arith.index_cast(index, number)
                token, rank = arith.divui(number, k), arith.remui(number, k)
                memref.store(value, ref, [rank, token, arith.addi(start, row)])

    write(x, route, ref, num, first)


def _elements(x: mgpu.FragmentedArray) -> Iterator[tuple[ir.Value, ir.Value, ir.Value]]:
    """Yields the row, the column and the value of all that a thread has of x. In MLIR."""
    one = mgpu.c(1, ir.IndexType.get())
    for (row, column), pair in zip(x.layout.thread_idxs(x.shape), x.registers.flat, strict=True):
        for i in range(2):
            value = vector.extract(pair, dynamic_position=[], static_position=[i])
            yield row, arith.addi(column, one) if i else column, value
