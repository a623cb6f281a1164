"""Scales of a warpgroup's 64 rows of weights in shared memory, of its next steps of a sum (Hopper).

A scale is read once, so it comes from the device's memory, whose delay is longer than a step takes.
Read a step ahead it would have each step wait; here all steps of a window are asked for at once,
while the first weights are on their way.
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
from jaxlib.mlir.dialects import arith, llvm, memref, scf, vector
import numpy as np

from jaxrunner.kernels_pallas import lanes, mosaic
from jaxrunner.kernels_pallas.mosaic import Index, Layout, Ref
from jaxrunner.kernels_pallas.products.matmul import ROWS
from jaxrunner.types import Array

MAX_ENTRIES = 32  # scales of a row in a window
EIGHT = 8  # rows that a tile of a product's operand has at least: they may share a scale
LINE = 4  # scales that are copied at once, at most: 16 bytes


class Window(NamedTuple):
    """The compile-time parameters of a window."""

    run: int  # rows that share a scale
    sums: int  # of a step, each of which has a scale of its own
    spans: int  # steps that share a scale
    turns: int  # from one step of the warpgroup to its next
    rounds: int  # steps of the warpgroup: with one turn, sums begin at a multiple of them
    gap: int = 0  # where eights of rows lie in two places by turns: from the first to the other

    @property
    def steps(self) -> int:
        """Steps of the warpgroup that a window holds."""
        return max(1, min(self.rounds, MAX_ENTRIES // self.sums))

    @property
    def units(self) -> int:
        """Rows that are held: one of eight where these share a scale."""
        return ROWS // EIGHT if self.run % EIGHT == 0 else ROWS

    @property
    def entries(self) -> int:
        """Scales of a row that a window holds."""
        return self.steps * self.sums

    @property
    def line(self) -> int:
        """Scales of a row that one copy may take: they lie beside each other in its matrix, too."""
        beside = 1 if self.spans > 1 else self.sums
        if self.spans == self.turns == 1:
            beside = math.gcd(self.entries, self.rounds * self.sums)
        return math.gcd(LINE, beside)

    @property
    def stride(self) -> int:
        """From one row to the next: an odd number of lines, for the banks of shared memory."""
        return self.line * (-(-self.entries // self.line) | 1)

    @property
    def size(self) -> int:
        """Numbers of 4 bytes that a window takes in shared memory."""
        return self.units * self.stride

    def fill(self, index: Index, start: Index, first: Array, *kept: tuple[Ref, Ref]) -> None:
        """Reads what the steps from `index` on need.

        index: of the warpgroup's steps; start: which step of all its first is; first: of its rows
        in the matrix of scales, times `run`. kept: matrices, [rows / run, G], in float32, in
        int8 or in e8m0, and what of them is held in shared memory, [size] in float32.
        """
        for ref, held in kept:
            self._copy(start + index * self.turns, first, ref, held)

    def refill(self, index: Array, fill: Callable[[Array], None]) -> None:
        """Has what a step needs read, if it is the first of a window behind the first."""
        if self.steps < self.rounds:
            pl.when((index > 0) & (lax.rem(index, self.steps) == 0))(lambda: fill(index))

    def read(self, held: Ref, index: Index, i: int, layout: Layout) -> Array:
        """Returns what 64 rows have for sum i of a step, [64] in float32.

        layout: of the matrices, [64, n], whose rows they are.
        """
        layout = layout.reduce(1)
        out = plgpu.ShapeDtypeStruct((ROWS,), jnp.float32, layout=layout)

        @mosaic.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.Layout.WG_SPLAT(())), return_type=out)
        def load(_: Any, held: ir.Value, entry: mgpu.FragmentedArray) -> mgpu.FragmentedArray:
            kind, each = layout.to_mgpu(), _number(ROWS // self.units)
            begin, stride = _index(entry), _number(self.stride)
            registers = np.empty(kind.registers_shape((ROWS,)), dtype=object)
            for at, (row,) in zip(
                np.ndindex(registers.shape), kind.thread_idxs((ROWS,)), strict=True
            ):
                place = arith.addi(begin, arith.muli(arith.divui(row, each), stride))
                value = memref.load(held, [place])
                registers[at] = vector.broadcast(ir.VectorType.get((1,), value.type), value)
            return mgpu.FragmentedArray(_registers=registers, _layout=kind, _is_signed=None)

        return load(held, lax.rem(index, self.steps) * self.sums + i)

    def _copy(self, step: Index, first: Array, ref: Ref, held: Ref) -> None:
        """Reads a window; `step`: which of all its first is."""
        scalar, powers = plgpu.Layout.WG_SPLAT(()), ref.dtype == jnp.uint8
        num = math.gcd(self.line, ref.shape[1]) if ref.dtype == jnp.float32 else 1
        copies = self.entries // num  # of a row

        @mosaic.inline_mgpu(arg_types=(*[plgpu.RefType()] * 2, scalar, scalar))
        def copy(
            _: Any, ref: ir.Value, held: ir.Value, step: mgpu.FragmentedArray,
            first: mgpu.FragmentedArray,
        ) -> None:  # fmt: skip
            thread = arith.index_cast(ir.IndexType.get(), lanes.thread())
            start, row = _index(step), _index(first)
            mgpu.warpgroup_barrier()  # the old scales may be overwritten
            # Unrolled it would need registers that sums are in.
            total = _number(copies * self.units)
            loop = scf.ForOp(thread, total, _number(utils.WARPGROUP_SIZE))
            with ir.InsertionPoint(loop.body):
                number = loop.induction_variable
                unit = arith.divui(number, _number(copies))
                entry = arith.muli(arith.remui(number, _number(copies)), _number(num))
                place = self._place(ref, start, row, unit, entry, num)
                to = arith.addi(arith.muli(unit, _number(self.stride)), entry)
                _move(ref, place, held, to, num, powers)
                scf.yield_([])
            _tell("cp.async.wait_all;")
            mgpu.warpgroup_barrier()

        copy(ref, held, step, first)

    def _place(
        self, ref: ir.Value, start: ir.Value, first: ir.Value, unit: ir.Value, entry: ir.Value,
        num: int,
    ) -> list[ir.Value]:  # fmt: skip
        """Returns where `num` scales lie in their matrix, the last ones for those that are none."""
        rows, columns = ir.MemRefType(ref.type).shape
        row = by_turns(arith.muli(unit, _number(ROWS // self.units)), self.gap)
        row = arith.addi(first, row)
        row = arith.divui(row, _number(self.run))
        turn = arith.divui(entry, _number(self.sums))
        step = arith.addi(start, arith.muli(turn, _number(self.turns)))
        column = arith.muli(arith.divui(step, _number(self.spans)), _number(self.sums))
        column = arith.addi(column, arith.remui(entry, _number(self.sums)))
        ends = (row, rows - 1), (column, columns - num)
        return [arith.minui(at, _number(last)) for at, last in ends]


def by_turns(row: ir.Value, gap: int) -> ir.Value:
    """Returns where a row lies whose eights are in two places by turns, `gap` rows apart, in MLIR.

    gap: 0 for rows that lie beside each other.
    """
    if not gap:
        return row
    eight, rest = (op(row, _number(EIGHT)) for op in (arith.divui, arith.remui))
    pair, half = (op(eight, _number(2)) for op in (arith.divui, arith.remui))
    row = arith.addi(rest, arith.muli(half, _number(gap)))
    return arith.addi(row, arith.muli(pair, _number(EIGHT)))


def _move(
    ref: ir.Value, place: list[ir.Value], held: ir.Value, to: ir.Value, num: int, powers: bool
) -> None:
    """Copies `num` numbers; in bytes there are integers, or exponents of `powers` of two."""
    f32 = ir.F32Type.get()
    if ir.MemRefType(ref.type).element_type != f32:
        value = memref.load(ref, place)
        value = _power(value) if powers else arith.sitofp(f32, value)
        memref.store(value, held, [to])
        return
    [_, columns] = ir.MemRefType(ref.type).shape
    number = arith.addi(arith.muli(place[0], _number(columns)), place[1])
    i64 = ir.IntegerType.get_signless(64)
    source = _address(ref, number, i64, i64)
    target = _address(held, to, _I32(), i64)
    nothing = ir.Type.parse("!llvm.void")
    mosaic.inline_asm(
        nothing, [target, source], f"cp.async.ca.shared.global [$0], [$1], {4 * num};", "r,l",
        has_side_effects=True,
    )  # fmt: skip


def _power(bits: ir.Value) -> ir.Value:
    """Returns a power of two as float32 of its exponent in e8m0: 127 for 1. In MLIR."""
    bits = arith.extui(_I32(), bits)
    least = arith.cmpi(arith.CmpIPredicate.eq, bits, mgpu.c(0, _I32()))
    # 2 ** -127 has no exponent of its own in float32, either.
    shifted = arith.shli(bits, mgpu.c(23, _I32()))
    value = arith.select(least, mgpu.c(1 << 22, _I32()), shifted)
    return arith.bitcast(ir.F32Type.get(), value)


def _address(ref: ir.Value, number: ir.Value, kind: ir.Type, wide: ir.Type) -> ir.Value:
    """Returns the address of one of the numbers of 4 bytes that lie behind each other."""
    start = llvm.ptrtoint(wide, utils.memref_ptr(ref))
    offset = arith.muli(arith.index_cast(wide, number), mgpu.c(4, wide))
    address = arith.addi(start, offset)
    return address if kind == wide else arith.trunci(kind, address)


def _tell(text: str) -> None:
    mosaic.inline_asm(ir.Type.parse("!llvm.void"), [], text, "", has_side_effects=True)


def _index(scalar: mgpu.FragmentedArray) -> ir.Value:
    return arith.index_cast(ir.IndexType.get(), scalar.registers.item())


def _number(n: int) -> ir.Value:
    return mgpu.c(n, ir.IndexType.get())


def _I32() -> ir.Type:
    return ir.IntegerType.get_signless(32)
