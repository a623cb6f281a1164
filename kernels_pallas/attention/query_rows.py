"""Several query tokens of a batch row, and the query heads of a KV head, as rows of one tile.

The tokens of a row of the batch are its last ones, and each sees one key more than that before it.
A row may have fewer than its `query_len` places; tokens behind them see no key.
"""

from collections.abc import Callable
import math
from typing import Any, NamedTuple

from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, vector
import numpy as np

from jaxrunner.kernels_pallas import mosaic
from jaxrunner.kernels_pallas.mosaic import Layout, Ref
from jaxrunner.types import Array

ROWS = 64  # of a product's tile
VECTOR = 8  # numbers that a thread reads at a time


class Tile(NamedTuple):
    """The order of query heads in a product's 64 rows: head g of token i is row `i * pitch + g`."""

    query_len: int
    group: int
    pitch: int

    @property
    def apart(self) -> bool:
        """Whether no two tokens are in one tile of eight rows, so that copies may bring them."""
        return self.query_len == 1 or self.pitch != self.group

    @property
    def lower_halves(self) -> bool:
        """Whether all heads are in the first eight of the 16 rows that a warp has."""
        return self.group <= 8 and self.pitch % 16 == 0

    @property
    def warps(self) -> list[bool]:
        """Which of the four warps, of 16 rows each, have query heads."""
        rows = {i * self.pitch + g for i in range(self.query_len) for g in range(self.group)}
        return [any(row // 16 == warp for row in rows) for warp in range(4)]

    def place(self, row: ir.Value, *, flat: bool) -> tuple[list[ir.Value], ir.Value]:
        """Returns the token and head that a row is of, and whether there are such. In MLIR.

        flat: whether one number of both is wanted, `token * group + head`.
        """
        token, head = split(row, self.pitch)
        index, less = ir.IndexType.get(), arith.CmpIPredicate.ult
        sizes = mgpu.c(self.query_len, index), mgpu.c(self.group, index)
        inside = arith.andi(arith.cmpi(less, token, sizes[0]), arith.cmpi(less, head, sizes[1]))
        if not flat:
            return [token, head], inside
        return [arith.addi(arith.muli(token, sizes[1]), head)], inside


def tile_of(query_len: int, group: int) -> Tile:
    """Spreads tokens over a tile, so that all its warps store some, where copies can bring them."""
    pitch = ROWS // query_len // 8 * 8
    fits = pitch > group and (8 % group == 0 or group % 8 == 0)
    return Tile(query_len, group, pitch if query_len == 1 or fits else group)


def queries(q: Array, K: int, tile: Tile) -> tuple[Array, int]:
    """Returns q, [T, H, D], as kernels read it, and how many rows they read of a KV head.

    Where a copy brings a token's heads, [rows, D], each KV head's padded to that many; else
    [T * K, G, D], and the rows of all tokens.
    """
    (T, _, D), G = q.shape, tile.group
    if not tile.apart:
        return q.reshape(T * K, G, D), -(-G * tile.query_len // 8) * 8
    # A copy into tiles of 8 rows must not straddle them.
    padded = G if 8 % G == 0 else -(-G // 8) * 8
    heads = jnp.pad(q.reshape(T * K, G, D), ((0, 0), (0, padded - G), (0, 0))).reshape(-1, D)
    return jnp.pad(heads, ((0, -heads.shape[0] % 8), (0, 0))), padded


def of_heads(x: Array, tile: Tile, fill: float) -> Array:
    """Returns numbers of heads, [K, G], as those of a tile's rows, [K, 64]; others are `fill`."""
    rows = tile.query_len * tile.pitch
    x = jnp.pad(x, ((0, 0), (0, tile.pitch - tile.group)), constant_values=fill)
    return jnp.pad(jnp.tile(x, tile.query_len), ((0, 0), (0, ROWS - rows)), constant_values=fill)


def of_row(ref: Ref, row: Array, h: Array, query_len: int) -> Ref:
    """Returns a row's part of ref, [T, K, G, D], for KV head h: [G, D], or [query_len, G, D]."""
    if query_len == 1:
        return ref.at[row, h]
    return ref.at[pl.ds(row * query_len, query_len), h]


def sight(rows: int, pitch: int, layout: Layout, length: Array, num: Array) -> Array:
    """Returns how many of `length` keys each row of a tile sees, where `num` tokens are there.

    Rows of tokens that are not there see none.
    """
    row = plgpu.broadcasted_iota(jnp.int32, (rows,), 0, layout=layout)
    token = lax.div(row, jnp.full_like(row, pitch))
    return jnp.where(token < num, length - (num - 1) + token, jnp.zeros_like(row))


def clear(ref: Ref) -> None:
    """Zeroes ref, [64, D]: products of zeros take less power than of what other kernels left."""
    zeros = jnp.zeros(ref.shape, ref.dtype)
    ref[...] = plgpu.layout_cast(zeros, _layout(ref.shape[1])[0])
    plgpu.commit_smem()


def of_heads_alone(
    tile: Tile, run: Callable[[], tuple[Array, ...]], others: tuple[Array, ...]
) -> tuple[Array, ...]:
    """Returns what `run` does in warps whose rows are of query heads, `others` in other warps.

    Of a head group of up to 16 three warps of four have none. `run` must not wait for other warps.
    """
    if all(tile.warps):
        return run()
    mask = sum(1 << warp for warp, has in enumerate(tile.warps) if has)
    scalar = plgpu.Layout.WG_SPLAT(())
    out = plgpu.ShapeDtypeStruct((), jnp.int32, layout=scalar)

    @mosaic.inline_mgpu(arg_types=(), return_type=out)
    def mine(_: Any) -> mgpu.FragmentedArray:
        i32 = ir.IntegerType.get_signless(32)
        warp = arith.andi(utils.warp_idx(), mgpu.c(3, i32))
        bit = arith.andi(arith.shrui(mgpu.c(mask, i32), warp), mgpu.c(1, i32))
        return mgpu.FragmentedArray.splat(bit, (), scalar.to_mgpu(), is_signed=True)

    return lax.cond(mine() == 1, run, lambda: others)


def load(ref: Ref, start: Array, rows: int, query_len: int, apart: int) -> Array:
    """Loads queries of `query_len` tokens into registers: [rows, D], or some rows more.

    ref: [..., G, D]; start, query_len and apart: those of `place`. A thread reads 16 bytes at a
    time, where those of a product's operand would be read by 4.
    """
    layout, tile = _layout(D := ref.shape[-1])
    shape = -(-rows // tile) * tile, D
    out = plgpu.ShapeDtypeStruct(shape, ref.dtype, layout=layout)

    @mosaic.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.Layout.WG_SPLAT(())), return_type=out)
    def read(_: Any, ref: ir.Value, start: mgpu.FragmentedArray) -> mgpu.FragmentedArray:
        laid, of = layout.to_mgpu(), ir.MemRefType(ref.type)
        begin = arith.index_cast(ir.IndexType.get(), start.registers.item())
        eight = ir.VectorType.get((VECTOR,), of.element_type)
        registers = np.empty(laid.registers_shape(shape), dtype=object)
        places = laid.thread_idxs(shape)
        for at, (row, column) in zip(np.ndindex(registers.shape), places, strict=True):
            token, head = place(row, begin, of.shape[1], query_len, apart)
            registers[at] = vector.load(eight, ref, [token, head, column], alignment=2 * VECTOR)
        return mgpu.FragmentedArray(_registers=registers, _layout=laid, _is_signed=None)

    return read(ref, start)


def _layout(D: int) -> tuple[Layout, int]:
    """Lays out rows of D as eight numbers a thread; returns also how many rows are a tile."""
    lanes = math.gcd(D // VECTOR, 32)  # of a row; the others of a warp have rows of their own
    rows, width = 32 // lanes, VECTOR * lanes
    of_warp = ((rows, width),) if rows > 1 else ()
    tiling = plgpu.Tiling(((4 * rows, width), *of_warp, (VECTOR,)))
    warp, lane = (-5, (-3, -2)) if rows > 1 else (-3, (-2,))
    return plgpu.Layout.TILED(tiling, (warp,), lane, -1), 4 * rows


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
