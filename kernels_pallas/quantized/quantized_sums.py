"""Sums of products with weights of 8 or 4 bits, of 64 rows of weights, on Hopper (Mosaic GPU).

What kernels with such weights share, of one matrix and of a mixture's: steps of a sum come into
shared memory, a warpgroup widens their weights in registers and multiplies them with all tokens
(`wgmma`). Scales are multiplied either with the sums of the terms that share one, or with the
widened weights, which rounds these to bfloat16 as plain JAX does, and not at all by powers of two.
A scale that all terms share is multiplied with their sum.
"""

from collections.abc import Callable
import functools
from typing import Any, NamedTuple

from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, memref, vector
import numpy as np

from jaxrunner.kernels_pallas import mosaic
from jaxrunner.kernels_pallas.mosaic import Barrier, Index, Layout, Ref
from jaxrunner.kernels_pallas.products.matmul import ROWS
from jaxrunner.kernels_pallas.quantized import widen, widen_tile
from jaxrunner.kernels_pallas.quantized.scale_window import Window, by_turns
from jaxrunner.types import Array

PIECE = 64  # terms of a product: 128 bytes of tokens, the widest swizzle


class Form(NamedTuple):
    """The compile-time parameters of a kernel's sums."""

    code: str
    tokens: int
    terms: int  # of a step
    steps: int  # of a sum
    run: int  # rows that share a scale
    group: int  # terms that share a scale; 0 for all
    groups: int  # of terms that a row has
    stages: int
    turns: int = 1  # warpgroups that have the same rows, and steps by turns
    paired: bool = False  # tokens are pairs of fp8, weights fp8 too
    at_once: int = 1  # sums of a step whose products are in flight together
    words: bool = False  # weights are read by words: tokens have their terms `in_order`
    gap: int = 0  # rows from gates to what they gate, whose eights are by turns; 0: there are none

    @property
    def sums(self) -> int:
        """Sums of a step, each of which has a scale of its own."""
        return max(1, self.terms // self.group) if self.group else 1

    @property
    def spans(self) -> int:
        """Steps that share a scale."""
        return max(1, self.group // self.terms) if self.group else self.steps

    @property
    def window(self) -> Window:
        """Scales that a warpgroup has in shared memory."""
        rounds = self.steps // self.turns
        return Window(self.run, self.sums, self.spans, self.turns, rounds, self.gap)

    @property
    def kept(self) -> int:
        """Numbers of 4 bytes that it has there of each matrix: none of a scale of whole sums."""
        return self.window.size if self.group else 1


class Held(NamedTuple):
    """Where operands lie."""

    scale: Ref
    zero: Ref | None
    kept: Ref  # [1 or 2, Form.kept]: scales and zero points of this warpgroup, in shared memory
    w: Ref  # [stages, rows, terms / packed], in shared memory
    x: Ref  # [stages, terms / PIECE, tokens, PIECE]; of pairs [stages, 2, tokens, terms]
    full: Barrier
    free: Barrier
    refill: Callable[[Array], None] | None = None  # told of each step that the warpgroup is at


class Sum(NamedTuple):
    """The sum that a warpgroup computes."""

    group: Array  # of 64 rows of a step in shared memory
    turn: Index
    begin: Array  # which step of the ring is its first
    start: Index  # of how many steps the scales come before it
    first: Array  # of its rows in the matrix of scales, times `run`


def rounded(f: Form, held: Held, of: Sum) -> Array:
    """Returns a warpgroup's sums, [ROWS, tokens]; weights are multiplied with scales."""
    layout, rounds = plgpu.Layout.WGMMA, f.steps // f.turns

    def multiply(acc: Ref) -> Array:
        def body(index: Array, _: None) -> None:
            f.window.refill(index, functools.partial(_fill, f, held, of))
            slot = lax.rem(_step(f, of, index), f.stages)
            piece = _read_step(f, held, of.group, slot)
            scales = _scales(f, held, index) if f.group else []
            for j in range(f.terms // PIECE):
                mosaic.wgmma(acc, _scaled(f, piece(j), scales, j), held.x.at[slot, j].T)
            _refill(f, held, of, index)
            # A product in flight while the next weights are widened would make them all wait.
            plgpu.wgmma_wait(0)
            mosaic.barrier_arrive(held.free.at[slot])
            return _

        lax.fori_loop(0, rounds, body, None)
        return acc[...]

    if f.group:
        _fill(f, held, of, 0)
    y = pl.run_scoped(multiply, mosaic.ACC((ROWS, f.tokens), jnp.float32))
    if not f.group:
        whole = by_row(held.scale, of.first, f.run, jnp.int32(0), layout, f.gap)
        return y * _wide(whole, f.tokens)
    return y if held.scale.dtype == jnp.uint8 else y * widen_tile.FACTOR[f.code]


def exact(f: Form, held: Held, of: Sum) -> Array:
    """Returns a warpgroup's sums, [ROWS, tokens]; sums are multiplied with scales."""
    layout, rounds = plgpu.Layout.WGMMA, f.steps // f.turns
    pieces, acc = f.terms // PIECE // f.sums, mosaic.ACC((ROWS, f.tokens), jnp.float32)

    def body(index: Array, total: Array) -> Array:
        f.window.refill(index, functools.partial(_fill, f, held, of))
        slot = lax.rem(_step(f, of, index), f.stages)
        piece = _read_step(f, held, of.group, slot)
        scales = _scales(f, held, index)

        def add(first: int, total: Array) -> Array:
            mine = range(first, first + f.at_once)

            def multiply(*accs: Ref) -> Array:
                for acc, i in zip(accs, mine, strict=True):
                    less = None
                    if held.zero is not None:
                        less = f.window.read(held.kept.at[1], index, i, layout)
                        less = _wide(less.astype(jnp.bfloat16), PIECE)
                    for j in range(i * pieces, (i + 1) * pieces):
                        value = _plain(f, piece(j))
                        value = value if less is None else value - less
                        mosaic.wgmma(acc, value, held.x.at[slot, j].T)
                if first == 0:
                    _refill(f, held, of, index)
                found = total
                for acc, i in zip(accs, mine, strict=True):
                    left = pieces * (mine[-1] - i)  # products that are behind this sum's
                    # None of its numbers may be read before.
                    y = lax.optimization_barrier(mosaic.wgmma_accumulator_load(acc, wait_n=left))
                    scale = scales[i] * widen_tile.WORD_FACTOR if f.words else scales[i]
                    found = found + y * _wide(scale, f.tokens)
                return found

            return pl.run_scoped(multiply, *[acc] * len(mine))

        for first in range(0, f.sums, f.at_once):
            total = add(first, total)
        mosaic.barrier_arrive(held.free.at[slot])
        return total

    zeros = plgpu.layout_cast(jnp.zeros((ROWS, f.tokens), jnp.float32), layout)
    _fill(f, held, of, 0)
    return lax.fori_loop(0, rounds, body, zeros)


def paired(f: Form, held: Held, of: Sum) -> Array:
    """Returns a warpgroup's sums, [ROWS, tokens], of weights and pairs of fp8.

    Tensor cores sum a step's terms up with some 14 bits; these sums are multiplied with scales, and
    added to others in float32.
    """
    layout, rounds, rows = plgpu.Layout.WGMMA, f.steps // f.turns, pl.ds(of.group * ROWS, ROWS)

    def body(index: Array, total: Array) -> Array:
        if f.group:
            f.window.refill(index, functools.partial(_fill, f, held, of))
        slot = lax.rem(_step(f, of, index), f.stages)
        mosaic.barrier_wait(held.full.at[slot])
        scales = _scales(f, held, index) if f.group else []

        def multiply(acc: Ref) -> Array:
            for half in range(2):
                mosaic.wgmma(acc, held.w.at[slot, rows], held.x.at[slot, half].T)
            _refill(f, held, of, index)
            return acc[...]

        y = pl.run_scoped(multiply, mosaic.ACC((ROWS, f.tokens), jnp.float32))
        mosaic.barrier_arrive(held.free.at[slot])
        return total + (y * _wide(scales[0], f.tokens) if f.group else y)

    zeros = plgpu.layout_cast(jnp.zeros((ROWS, f.tokens), jnp.float32), layout)
    if f.group:
        _fill(f, held, of, 0)
        return lax.fori_loop(0, rounds, body, zeros)
    whole = by_row(held.scale, of.first, f.run, jnp.int32(0), layout)
    return lax.fori_loop(0, rounds, body, zeros) * _wide(whole, f.tokens)


def _step(f: Form, of: Sum, index: Index) -> Array:
    """Returns which step of the ring is a warpgroup's own one of `index`."""
    return of.begin + of.turn + index * f.turns


def _refill(f: Form, held: Held, of: Sum, index: Array) -> None:
    """Has a later step copied over the one before, while the products of this one are made."""
    if held.refill is not None:
        held.refill(_step(f, of, index))


def _fill(f: Form, held: Held, of: Sum, index: Index) -> None:
    """Has scales and zero points of a step in shared memory, and of some after it."""
    refs = [held.scale] if held.zero is None else [held.scale, held.zero]
    kept = [(ref, held.kept.at[i]) for i, ref in enumerate(refs)]
    f.window.fill(index, of.start + of.turn, of.first, *kept)


def _scales(f: Form, held: Held, index: Array) -> list[Array]:
    """Returns the scales of 64 rows for each sum of a step; those of e8m0 in bfloat16."""
    layout = plgpu.Layout.WGMMA
    found = [f.window.read(held.kept.at[0], index, i, layout) for i in range(f.sums)]
    powers = held.scale.dtype == jnp.uint8
    return [scale.astype(jnp.bfloat16) for scale in found] if powers else found


def _read_step(f: Form, held: Held, group: Array, slot: Array) -> Callable[[int], Array]:
    """Waits for a step and reads the weights of a warpgroup; returns those of a piece."""
    mosaic.barrier_wait(held.full.at[slot])
    packed = widen.PACKED[f.code]
    if f.gap:
        starts, num = (0, held.w.shape[1] // 2), ROWS // 2
        halves = [held.w.at[slot, pl.ds(start + group * num, num)] for start in starts]
        raw = widen_tile.load_by_turns(halves, packed, words=f.words)
    else:
        rows = held.w.at[slot, pl.ds(group * ROWS, ROWS)]
        raw = widen_tile.load(rows, packed, words=f.words)
    size = PIECE // packed
    return lambda j: lax.slice(raw, (0, j * size), (ROWS, (j + 1) * size))


def _plain(f: Form, raw: Array) -> Array:
    return widen_tile.of_words(raw) if f.words else widen_tile.plain(raw, f.code)


def _scaled(f: Form, raw: Array, scales: list[Array], j: int) -> Array:
    """Returns the weights of piece j of a step, times their scales."""
    if not f.group:
        return widen_tile.plain(raw, f.code)
    first = j * PIECE // f.group
    mine = scales[first : max(first + 1, (j + 1) * PIECE // f.group)]
    if mine[0].dtype == jnp.bfloat16:
        return widen_tile.shifted(raw, mine, f.code)
    return widen_tile.scaled(raw, [widen_tile.split(scale, f.code) for scale in mine], f.code)


def _wide(rows: Array, columns: int) -> Array:
    wide = lax.broadcast_in_dim(rows, (ROWS, columns), [0])
    return plgpu.layout_cast(wide, plgpu.Layout.WGMMA)


def by_row(ref: Ref, first: Array, run: int, column: Array, layout: Layout, gap: int = 0) -> Array:
    """Reads what 64 rows from `first` on have in a column of ref, of which `run` share one.

    layout: of the matrices, [64, n], whose rows they are; gap: as `by_turns` takes it.
    """
    layout = layout.reduce(1)
    dtype = ref.dtype
    out = plgpu.ShapeDtypeStruct((ROWS,), dtype, layout=layout)
    scalar = plgpu.Layout.WG_SPLAT(())

    @mosaic.inline_mgpu(arg_types=(plgpu.RefType(), scalar, scalar), return_type=out)
    def read(
        _: Any, ref: ir.Value, first: mgpu.FragmentedArray, column: mgpu.FragmentedArray
    ) -> mgpu.FragmentedArray:
        index, kind = ir.IndexType.get(), layout.to_mgpu()
        start, place = (arith.index_cast(index, n.registers.item()) for n in (first, column))
        last = mgpu.c(ir.MemRefType(ref.type).shape[0] - 1, index)
        registers = np.empty(kind.registers_shape((ROWS,)), dtype=object)
        for at, (row,) in zip(np.ndindex(registers.shape), kind.thread_idxs((ROWS,)), strict=True):
            row = arith.divui(arith.addi(start, by_turns(row, gap)), mgpu.c(run, index))
            value = memref.load(ref, [arith.minui(row, last), place])
            registers[at] = vector.broadcast(ir.VectorType.get((1,), value.type), value)
        signed = None
        if jnp.issubdtype(dtype, jnp.integer):
            signed = bool(jnp.issubdtype(dtype, jnp.signedinteger))
        return mgpu.FragmentedArray(_registers=registers, _layout=kind, _is_signed=signed)

    return read(ref, first, column)
