"""Parts of a row merged in the shared memory of a thread-block cluster, whose blocks have one each.

Each block stores its part in the shared memory of all: in each block's the columns that this one
merges. So no part goes through device memory, and the blocks meet once, at the cluster's barrier.
PTX: https://docs.nvidia.com/cuda/parallel-thread-execution/ (`mapa`, `st.shared::cluster`,
`barrier.cluster`).
"""

from collections.abc import Sequence
from typing import Any

from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, memref, vector

from jaxrunner.kernels_pallas import lanes, mosaic
from jaxrunner.kernels_pallas.attention.query_rows import Tile, split
from jaxrunner.kernels_pallas.mosaic import Ref
from jaxrunner.types import Array

PEER = "peer"  # the axis of a cluster's blocks
QUAD = 4  # threads that have a row of a product's result
COLUMNS = 8  # that those have side by side
SCALAR = plgpu.Layout.WG_SPLAT(())


def scratch(size: int, rows: int, D: int) -> list[Any]:
    """Returns what a block of a cluster of `size` receives: columns of parts, and their weights."""
    parts = plgpu.SMEM((size, rows, D // size), jnp.float32)
    return [parts, plgpu.SMEM((size, rows), jnp.float32)]


def exchange(acc: Array, weight: Array, tile: Tile, boxes: Sequence[Ref]) -> None:
    """Stores this block's part, [64, D], and its weight, [64], in all blocks; then all have all.

    acc: normed; weight: the base 2 logarithm of its total; tile: which of 64 rows are stored;
    boxes: `scratch`. The cluster's axis is `PEER`.
    """
    layout = plgpu.Layout.WGMMA

    @mosaic.inline_mgpu(arg_types=(layout, layout.reduce(1), *[plgpu.RefType()] * 2, SCALAR))
    def send(
        _: Any, acc: mgpu.FragmentedArray, weight: mgpu.FragmentedArray, parts: ir.Value,
        weights: ir.Value, peer: mgpu.FragmentedArray,
    ) -> None:  # fmt: skip
        size, rows, width = ir.MemRefType(parts.type).shape
        index, i32 = ir.IndexType.get(), ir.IntegerType.get_signless(32)
        to_parts = [_there(parts, mgpu.c(i, i32)) for i in range(size)]
        first, column = next(iter(acc.layout.thread_idxs(acc.shape)))
        quad = arith.divui(arith.index_cast(i32, column), mgpu.c(2, i32))
        for half in range(1 if tile.lower_halves else 2):
            # A thread has numbers in two rows, eight apart, by turns.
            (row,), inside = tile.place(arith.addi(first, mgpu.c(8 * half, index)), flat=True)
            with mgpu.when(inside):
                begin = arith.muli(peer.registers.item(), mgpu.c(rows, i32))
                place = arith.addi(begin, arith.index_cast(i32, row))
                at = arith.muli(place, mgpu.c(width, i32))
                at = _bytes(arith.addi(at, arith.index_cast(i32, column)))
                for i, pair in enumerate(acc.registers.reshape(-1)[half::2]):
                    to, group = divmod(i, width // COLUMNS)
                    _store(arith.addi(to_parts[to], at), pair, 4 * COLUMNS * group)
                value = weight.registers.reshape(-1)[half]
                for i in range(0, size, QUAD):
                    to = arith.addi(quad, mgpu.c(i, i32))
                    with mgpu.when(arith.cmpi(arith.CmpIPredicate.ult, to, mgpu.c(size, i32))):
                        _store(arith.addi(_there(weights, to), _bytes(place)), value)
        _meet()

    send(acc, weight, *boxes, lax.axis_index(PEER))


def merge(boxes: Sequence[Ref], out: Ref) -> None:
    """Writes this block's columns of what `exchange` has brought, merged, to device memory.

    out: [rows, D], or [Q, G, D].
    """

    @mosaic.inline_mgpu(arg_types=(*[plgpu.RefType()] * 3, SCALAR))
    def take(
        _: Any, parts: ir.Value, weights: ir.Value, out: ir.Value, peer: mgpu.FragmentedArray
    ) -> None:
        width, of = ir.MemRefType(parts.type).shape[2], ir.MemRefType(out.type)
        (*shape, _), index, i32 = of.shape, ir.IndexType.get(), ir.IntegerType.get_signless(32)
        pair = ir.VectorType.get((2,), of.element_type)
        half = mgpu.c(width // 2, index)
        pairs = shape[0] * (shape[1] if len(shape) > 1 else 1) * width // 2
        begin = arith.muli(peer.registers.item(), mgpu.c(width, i32))
        thread = lanes.thread()
        for start in range(0, pairs, utils.WARPGROUP_SIZE):
            at = arith.addi(arith.index_cast(index, thread), mgpu.c(start, index))
            with mgpu.when(arith.cmpi(arith.CmpIPredicate.ult, at, mgpu.c(pairs, index))):
                row = arith.divui(at, half)
                column = arith.muli(arith.remui(at, half), mgpu.c(2, index))
                acc = arith.truncf(pair, _merged(parts, weights, row, column))
                column = arith.addi(arith.index_cast(index, begin), column)
                place = [row] if len(shape) == 1 else split(row, shape[1])
                alignment = utils.bitwidth(of.element_type) // 4  # bytes of two
                vector.store(acc, out, [*place, column], alignment=alignment)

    take(*boxes, out, lax.axis_index(PEER))


def meet() -> None:
    """Waits for the blocks of the cluster."""
    mosaic.inline_mgpu(arg_types=())(lambda _: _meet())()


def _merged(parts: ir.Value, weights: ir.Value, row: ir.Value, column: ir.Value) -> ir.Value:
    """Returns two numbers of a row, merged. In MLIR."""
    size, index = ir.MemRefType(parts.type).shape[0], ir.IndexType.get()
    two = ir.VectorType.get((2,), ir.F32Type.get())
    blocks = [mgpu.c(i, index) for i in range(size)]
    logs = [memref.load(weights, [i, row]) for i in blocks]
    values = [vector.load(two, parts, [i, row, column]) for i in blocks]
    best = logs[0]
    for log in logs[1:]:
        best = arith.maximumf(best, log)
    shares = [_float("ex2", arith.subf(log, best)) for log in logs]
    total, acc = shares[0], arith.mulf(values[0], vector.broadcast(two, shares[0]))
    for share, value in zip(shares[1:], values[1:], strict=True):
        total = arith.addf(total, share)
        acc = arith.addf(acc, arith.mulf(value, vector.broadcast(two, share)))
    return arith.mulf(acc, vector.broadcast(two, _float("rcp", total)))


def _there(ref: ir.Value, block: ir.Value) -> ir.Value:
    """Returns where a block of the cluster has what this one has at ref. In MLIR."""
    i32 = ir.IntegerType.get_signless(32)
    here = llvm.ptrtoint(i32, utils.memref_ptr(ref))
    return mosaic.inline_asm(i32, [here, block], "mapa.shared::cluster.u32 $0, $1, $2;", "=r,r,r")


def _bytes(count: ir.Value) -> ir.Value:
    """Returns how long so many numbers of 32 bits are. In MLIR."""
    return arith.muli(count, mgpu.c(4, ir.IntegerType.get_signless(32)))


def _store(at: ir.Value, value: ir.Value, offset: int = 0) -> None:
    """Stores one or two numbers in a cluster's shared memory. In MLIR."""
    num = ir.VectorType(value.type).shape[0]
    numbers = [vector.extract(value, dynamic_position=[], static_position=[i]) for i in range(num)]
    kind, what = ("v2.f32", "{$1, $2}") if num == 2 else ("f32", "$1")
    mosaic.inline_asm(
        ir.Type.parse("!llvm.void"), [at, *numbers],
        f"st.shared::cluster.{kind} [$0+{offset}], {what};", ",".join(["r", *["f"] * num]),
        has_side_effects=True,
    )  # fmt: skip


def _meet() -> None:
    """Waits for the threads of the cluster and for what they have stored. In MLIR."""
    for what in ("arrive.release", "wait.acquire"):
        mosaic.inline_asm(
            ir.Type.parse("!llvm.void"), [], f"barrier.cluster.{what};", "~{memory}",
            has_side_effects=True,
        )  # fmt: skip


def _float(what: str, x: ir.Value) -> ir.Value:
    """Returns an approximate function of a number. In MLIR."""
    return mosaic.inline_asm(ir.F32Type.get(), [x], f"{what}.approx.ftz.f32 $0, $1;", "=f,f")
