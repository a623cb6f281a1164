"""Sums of products of few tokens with weights of 8 or 4 bits, of 64 rows of weights (Hopper).

What kernels share that read such weights for a few tokens: steps of a sum come into shared memory,
a warpgroup widens its rows of them in registers (`widen`) and multiplies them with all tokens. A
sum of terms that share a scale is multiplied with it in float32, so weights are as exact as they
are stored. Of gates and what they gate each warp has eight rows, which meet in its threads.
"""

from typing import Any, NamedTuple

from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, memref, vector

from jaxrunner.kernels_pallas import mosaic
from jaxrunner.kernels_pallas.mosaic import Barrier, Index, Ref
from jaxrunner.kernels_pallas.products.matmul import ROWS, gated
from jaxrunner.kernels_pallas.quantized import widen
from jaxrunner.kernels_pallas.quantized.scale_window import Window
from jaxrunner.kernels_pallas.quantized.widen import TERMS
from jaxrunner.types import Array

STEP = 128  # bytes of a row of weights that a step takes: the widest swizzle
CONSUMERS = 4  # warpgroups that compute
REGISTERS = 112, 32  # of a thread that computes, and of one that copies: 480 for five warpgroups
AT_ONCE = 16  # tokens whose sums of one scale are in registers
# Of the two eights of rows that a warp has of gates and what they gate: a thread has a row of each.
HALF = plgpu.Layout.TILED(plgpu.Tiling(((32, 8), (8, 8), (2,))), (-5,), (-3, -2), -1)


class Steps(NamedTuple):
    """Sums of a block's rows, as they are known when a kernel is compiled."""

    code: str
    T: int  # tokens of a block
    groups: int  # of warpgroups: each has rows of its own
    steps: int  # of a part of a sum
    run: int  # rows that share a scale
    group: int  # terms that share a scale; 0 for all
    place: int  # rows of a step in shared memory
    gap: int = 0  # rows of the matrix from gates to what they gate; 0 where there are none
    units: int = 0  # gates of a block
    wide: int = 1  # steps that lie side by side in shared memory and are copied at once
    stages: int = 0  # of as many

    @property
    def packed(self) -> int:
        """Numbers that a byte of the weights holds."""
        return widen.PACKED[self.code]

    @property
    def terms(self) -> int:
        """Terms of a step."""
        return STEP * self.packed

    @property
    def sums(self) -> int:
        """Sums of a step, each of which has a scale of its own."""
        return max(1, self.terms // self.group) if self.group else 1

    @property
    def columns(self) -> int:
        """Tokens whose sums of one scale are in registers at a time."""
        return 8 if self.T % AT_ONCE else AT_ONCE

    @property
    def turns(self) -> int:
        """Warpgroups that have the same rows, and steps in turn."""
        return CONSUMERS // self.groups

    @property
    def spare(self) -> int:
        """Rows that a warpgroup reads behind its own."""
        return ROWS - self.place // self.groups

    @property
    def copies(self) -> int:
        """Copies of a part, each of `wide` steps; of the last, steps behind the part are unread."""
        return -(-self.steps // self.wide)

    @property
    def readers(self) -> int:
        """Warpgroups that read a stage."""
        return self.groups * self.wide

    @property
    def window(self) -> Window:
        """Scales that a warpgroup has in shared memory."""
        spans = max(1, self.group // self.terms)
        rounds = -(-self.steps // self.turns) if self.group else 1
        return Window(self.run, self.sums, spans, self.turns, rounds, self.gap)


def unlike(E: int, F: int, scale: tuple[int, ...], code: str) -> str | None:
    """Says why weights of F outputs and E inputs are not served, or None; scale: their shape."""
    terms, group = STEP * widen.PACKED[code], E // scale[1]
    if E % terms or F % 8:
        return f"wants sums of a multiple of {terms} terms and outputs of 8, got {E} and {F}"
    if E % scale[1] or F % scale[0] or (scale[1] > 1 and terms % group and group % terms):
        return f"wants scales of runs that divide {terms} or that it divides, got {group}"
    if group % TERMS:
        return f"wants scales of a multiple of {TERMS} terms, got {group}"
    return None


class Own(NamedTuple):
    """The rows of weights of a warpgroup, and what belongs to them."""

    s: Steps
    group: Array  # of its rows in a block's
    turn: Array  # its first step
    start: Index  # the part's first step, of all
    first: Array  # of its rows in the matrix
    scale: Ref
    zero: Ref | None
    kept: Ref  # [1 or 2, window.size]: scales and zero points in shared memory

    def fill(self, index: Index) -> None:
        """Has scales and zero points of a step in shared memory, and of some after it."""
        refs = [self.scale] if self.zero is None else [self.scale, self.zero]
        kept = [(ref, self.kept.at[i]) for i, ref in enumerate(refs)]
        start = self.start + self.turn if self.s.group else jnp.int32(0)
        self.s.window.fill(index, start, self.first, *kept)

    def scales(self, index: Index, i: int) -> Array:
        """Returns the scales of sum i of a step, [ROWS, columns]."""
        layout, shape = plgpu.Layout.WGMMA, (ROWS, self.s.columns)
        rows = self.s.window.read(self.kept.at[0], index, i, layout)
        return plgpu.layout_cast(lax.broadcast_in_dim(rows, shape, [0]), layout)

    def zeros(self, index: Index, i: int) -> Array:
        """Returns what is taken from the widened weights of sum i of a step, [ROWS, TERMS]."""
        layout = widen.rows_of(1, ROWS)
        less = self.s.window.read(self.kept.at[1], index, i, layout)
        less = (less / widen.FACTOR[self.s.code]).astype(jnp.bfloat16)
        return plgpu.layout_cast(lax.broadcast_in_dim(less, (ROWS, TERMS), [0]), layout)

    @property
    def column(self) -> Index:
        """Which of the steps of a stage is the warpgroup's."""
        return lax.rem(self.turn, self.s.wide) if self.s.wide > 1 else 0

    def read(self, w_smem: Ref, slot: Array) -> list[Array]:
        """Reads a step's weights, [ROWS, n] in bytes; or gates, [ROWS / 2, n], and the others."""
        s, first = self.s, slot * self.s.place
        mine = pl.ds(self.column * STEP, STEP)
        if s.gap:
            starts, num = [self.group * (ROWS // 2) + i * s.units for i in range(2)], ROWS // 2
        else:
            starts, num = [self.group * (s.place // s.groups)], ROWS
        return [
            widen.load_weights(w_smem.at[pl.ds(first + start, num), mine], s.packed)
            for start in starts
        ]


def sums(
    own: Own, w_smem: Ref, x_smem: Ref, full: Barrier, free: Barrier, begin: int = 0
) -> list[Array]:
    """Returns the sums of a warpgroup's steps for its rows, [ROWS, columns] of some tokens each.

    begin: which stage of the ring is the first. Rows of gates are the first eight of sixteen.
    """
    s = own.s
    side = own.column * s.terms
    pieces, size, columns = s.terms // TERMS // s.sums, TERMS // s.packed, s.columns

    def nothing() -> Array:
        return plgpu.layout_cast(jnp.zeros((ROWS, columns), jnp.float32), plgpu.Layout.WGMMA)

    def one(index: Array, totals: list[Array]) -> list[Array]:
        s.window.refill(index, own.fill)
        slot = lax.rem(begin + lax.div(own.turn + index * s.turns, s.wide), s.stages)
        mosaic.barrier_wait(full.at[slot])
        raw = own.read(w_smem, slot)
        for i in range(s.sums):
            values = []
            for j in range(i * pieces, (i + 1) * pieces):
                cut = [lax.slice(r, (0, j * size), (r.shape[0], (j + 1) * size)) for r in raw]
                values.append([widen.widen(r, s.code, power) for r in cut])
            if own.zero is not None:
                less = own.zeros(index, i)
                values = [[value - less for value in both] for both in values]
            scales = own.scales(index, i) if s.group else None
            found = []
            for n, total in enumerate(totals):
                y = total if scales is None else nothing()
                for j, value in enumerate(values, i * pieces):
                    tokens, terms = pl.ds(n * columns, columns), pl.ds(side + j * TERMS, TERMS)
                    x = widen.load_tokens(x_smem.at[slot, tokens, terms])
                    y = widen.multiply(y, value, x)
                found.append(y if scales is None else total + y * scales)
            totals = found
        mosaic.barrier_arrive(free.at[slot])
        return totals

    power = widen.multiplier(s.code)
    rounds = lax.div(s.steps - own.turn + s.turns - 1, s.turns)
    own.fill(0)
    totals = lax.fori_loop(0, rounds, one, [nothing() for _ in range(s.T // columns)])
    factor = widen.FACTOR[s.code]
    return [total * (factor if s.group else own.scales(0, 0) * factor) for total in totals]


def halves(total: Array) -> tuple[Array, Array]:
    """Returns the first eights of rows of sums, [64, n], and the second ones, [32, n] in `HALF`."""
    kind = plgpu.ShapeDtypeStruct((ROWS // 2, total.shape[1]), total.dtype, layout=HALF)

    @mosaic.inline_mgpu(arg_types=(plgpu.Layout.WGMMA,), return_type=(kind, kind))
    def split(_: Any, total: mgpu.FragmentedArray) -> tuple[mgpu.FragmentedArray, ...]:
        layout = HALF.to_mgpu()
        registers = total.registers.reshape(-1, 2)  # a thread has numbers in two rows, by turns
        return tuple(
            mgpu.FragmentedArray(
                _registers=registers[:, i].reshape(layout.registers_shape(kind.shape)),
                _layout=layout, _is_signed=None,
            )
            for i in range(2)
        )  # fmt: skip

    return split(total)


def put_units(total: Array, ref: Ref, first: Array) -> None:
    """Writes the units of a gated MLP of sums, [ROWS, n], to ref, [n or fewer, units of a block].

    first: of the warpgroup's; what is behind the last one is none. arXiv:2002.05202.
    """
    units = gated(*halves(total), "silu").astype(ref.dtype)

    @mosaic.inline_mgpu(arg_types=(HALF, plgpu.RefType(), plgpu.Layout.WG_SPLAT(())))
    def write(_: Any, x: mgpu.FragmentedArray, ref: ir.Value, first: mgpu.FragmentedArray) -> None:
        index = ir.IndexType.get()
        sizes = [mgpu.c(n, index) for n in ir.MemRefType(ref.type).shape]
        begin = arith.index_cast(index, first.registers.item())
        for (row, column), pair in zip(
            x.layout.thread_idxs(x.shape), x.registers.flat, strict=True
        ):
            for i in range(2):
                at = arith.addi(column, mgpu.c(i, index)), arith.addi(row, begin)
                inside = [
                    arith.cmpi(arith.CmpIPredicate.ult, *both)
                    for both in zip(at, sizes, strict=True)
                ]
                with mgpu.when(arith.andi(*inside)):
                    value = vector.extract(pair, dynamic_position=[], static_position=[i])
                    memref.store(value, ref, [*at])

    write(units, ref, first)
