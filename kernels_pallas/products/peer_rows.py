"""Rows that devices exchange by plain stores into each other's memory, each word its own flag.

A word that is not there yet is `MISSING`, which no sender sends: a receiver reads until none is
left, so that nothing else need tell it, and then makes all of them `MISSING` again. NCCL's LL
protocol and TensorRT-LLM's one-shot all-reduce ("Lamport") work like that.

Each row has two places, used by turns, which are counted a row, in the same memory. No word is
lost. Say that device A writes its words of call i + 2 into device B's memory, where those of call i
were. A's kernel of call i + 1 has ended by then, so A has read B's words of call i + 1. B wrote
these after its kernel of call i had ended, in which it read A's words of call i, and made their
place `MISSING`. So no device is more than one call ahead, and two places do.

All devices must make the same calls in the same order, and a call must depend on the one before:
XLA does not know that they share memory. Their program has a collective of XLA's too: for it XLA
loads all kernels and lets devices meet before the first of them runs, and might else load one on a
device that others wait for. Addresses are numbers that the host reads once. Pallas' `remote_ref`
has XLA exchange those of each call's operands, which wants the first devices in their order, and
has a barrier of them before each call unless it is told to skip that.
"""

from collections.abc import Callable, Sequence
import functools
import math
from typing import Any, NamedTuple

import jax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, memref, scf, vector
import numpy as np

from jaxrunner.kernels_pallas import lanes, mosaic
from jaxrunner.kernels_pallas.mosaic import Layout, Ref
from jaxrunner.types import Array

MAX_ROWS = 16384  # of a call
MAX_GROUPS = 8  # warpgroups that share a row
ITEM_BYTES = 2  # of a number that is sent, bfloat16 or float16
HEAD_BYTES = MAX_ROWS * MAX_GROUPS * 4  # turns, before the rows
MISSING, INSTEAD = -1, 0x7FFF7FFF  # both NaN, or two of them, in any float
SPLAT = plgpu.Layout.WG_SPLAT(())


class Exchange(NamedTuple):
    """Memory that devices write into each other's: both arrays must live as long as calls do."""

    memory: Array  # [devices, words], uint32
    # [devices, devices + 2, 2], uint32: halves of all addresses, of its own once more, and its rank
    places: Array


class Peers(NamedTuple):
    """Where devices write rows of E numbers, as a kernel of one of N devices takes it."""

    places: Array  # [N + 2, 2], its own of `Exchange`
    rows: int  # of a call, at most
    E: int


def make(mesh: Mesh, axis: str, rows: int, E: int) -> Exchange:
    """Returns memory for rows of E numbers among the devices of an axis of a mesh.

    All calls that use it must have rows of that E: places follow each other at that distance.

    Raises:
      ValueError: some of them are another process's.
    """
    if len(mesh.local_devices) < mesh.size:
        raise ValueError(
            f"rows are exchanged within a process, which has {len(mesh.local_devices)} of "
            f"{mesh.size} devices: sum them by psum"
        )
    num, names = mesh.shape[axis], PartitionSpec(mesh.axis_names)
    words = num_bytes(num, rows, E) // 4
    fill = jax.jit(
        lambda: jnp.full((mesh.size, words), 0xFFFFFFFF, jnp.uint32),
        out_shardings=NamedSharding(mesh, names),
    )
    memory = jax.block_until_ready(fill())
    address = {s.device: s.data.unsafe_buffer_pointer() for s in memory.addressable_shards}
    at = mesh.axis_names.index(axis)
    groups = np.moveaxis(mesh.devices, at, -1).reshape(-1, num)
    places = {
        device: [*(address[peer] for peer in group), address[device], rank]
        for group in groups
        for rank, device in enumerate(group)
    }
    table = np.array([places[device] for device in mesh.devices.flat], np.uint64)
    halves = np.stack([table & 0xFFFFFFFF, table >> 32], -1).astype(np.uint32)
    return Exchange(memory, jax.device_put(halves, abstract_places(mesh, axis).sharding))


def abstract_places(mesh: Mesh, axis: str) -> jax.ShapeDtypeStruct:
    """Returns the shape of `Exchange.places`, and where each device's own lie."""
    at = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
    return jax.ShapeDtypeStruct((mesh.size, mesh.shape[axis] + 2, 2), jnp.uint32, sharding=at)


def num_bytes(num: int, rows: int, E: int) -> int:
    """Returns the bytes of each of `num` devices for rows of E numbers."""
    return HEAD_BYTES + rows * 2 * (num - 1) * E * ITEM_BYTES


def region(places: Ref, row: Array, group: Array, E: int) -> tuple[Array, Array]:
    """Returns a row's turn, for `end`, and where its place of this turn begins, in bytes."""
    num = places.shape[0] - 2

    @mosaic.inline_mgpu(
        arg_types=(plgpu.RefType(), SPLAT, SPLAT),
        return_type=plgpu.ShapeDtypeStruct((), jnp.int32, layout=SPLAT),
    )
    def read(_: Any, places: ir.Value, *at: mgpu.FragmentedArray) -> mgpu.FragmentedArray:
        i32 = ir.IntegerType.get_signless(32)
        turn = mosaic.inline_asm(
            i32, [_turn(places, *at)], "ld.relaxed.sys.global.b32 $0, [$1];", "=r,l",
            has_side_effects=True,
        )  # fmt: skip
        return mgpu.FragmentedArray.splat(turn, (), is_signed=True)

    turn = read(places, row, group)
    return turn, (2 * row + (turn & 1)) * ((num - 1) * E * ITEM_BYTES) + HEAD_BYTES


def end(places: Ref, row: Array, group: Array, turn: Array) -> None:
    """Counts a row's turn, once all threads of the warpgroup have read it."""

    @mosaic.inline_mgpu(arg_types=(plgpu.RefType(), *[SPLAT] * 3))
    def write(
        _: Any, places: ir.Value, row: mgpu.FragmentedArray, group: mgpu.FragmentedArray,
        turn: mgpu.FragmentedArray,
    ) -> None:  # fmt: skip
        i32 = ir.IntegerType.get_signless(32)
        first = arith.cmpi(arith.CmpIPredicate.eq, lanes.thread(), mgpu.c(0, i32))
        more = arith.addi(turn.registers.item(), mgpu.c(1, i32))
        _store(_turn(places, row, group), [more], first)

    write(places, row, group, turn)


def exchange(
    places: Ref, own: Array, group: Array, start: Array, groups: int, layout: Layout
) -> Sequence[Array]:
    """Returns what each device has of a part of a row, its own as well, by their ranks.

    own: [...] of a warpgroup, in 16 bits, with a word of neighbours a thread or more; start: of
        `region`.
    """
    num = places.shape[0] - 2
    out = plgpu.ShapeDtypeStruct(own.shape, own.dtype, layout=layout)
    part_bytes = math.prod(own.shape) * ITEM_BYTES

    @mosaic.inline_mgpu(arg_types=(plgpu.RefType(), layout, SPLAT, SPLAT), return_type=[out] * num)
    def run(
        _: Any, places: ir.Value, own: mgpu.FragmentedArray, group: mgpu.FragmentedArray,
        start: mgpu.FragmentedArray,
    ) -> list[mgpu.FragmentedArray]:  # fmt: skip
        i32 = ir.IntegerType.get_signless(32)
        words, rank = _words(own), memref.load(places, _at(num + 1, 0))
        offset = arith.muli(group.registers.item(), mgpu.c(part_bytes, i32))
        offset = arith.addi(offset, start.registers.item())
        size = math.gcd(len(words[0]), 4)  # words of a load or a store
        offset = arith.addi(offset, arith.muli(lanes.thread(), mgpu.c(4 * size, i32)))
        sent = [word for some in words for word in some]
        chunks = [sent[i : i + size] for i in range(0, len(sent), size)]
        step = 4 * size * utils.WARPGROUP_SIZE
        slot = groups * part_bytes

        def of(peer: ir.Value | int, source: ir.Value, target: ir.Value) -> list[ir.Value]:
            """Returns the addresses of the chunks that come from a rank, at a peer of a rank."""
            behind = arith.cmpi(arith.CmpIPredicate.ugt, source, target)  # none is its own
            nth = arith.subi(source, arith.extui(i32, behind))
            base = arith.extui(_i64(), arith.addi(offset, arith.muli(nth, mgpu.c(slot, i32))))
            base = arith.addi(_address(places, peer), base)
            return [arith.addi(base, mgpu.c(step * i, _i64())) for i in range(len(chunks))]

        for distance in range(1, num):
            peer = arith.addi(rank, mgpu.c(distance, i32))
            peer = arith.remui(peer, mgpu.c(num, i32))
            for address, chunk in zip(of(peer, rank, peer), chunks, strict=True):
                _store(address, chunk)
        sources = [mgpu.c(source, i32) for source in range(num)]
        others = [arith.cmpi(arith.CmpIPredicate.ne, rank, source) for source in sources]
        addresses = [of(num, source, rank) for source in sources]

        def read() -> list[ir.Value]:
            return [
                word
                for other, some in zip(others, addresses, strict=True)
                for address, chunk in zip(some, chunks, strict=True)
                for word in _load(address, chunk, other)
            ]

        got = _until_there(read, num * len(sent))
        nothing = [mgpu.c(MISSING, i32)] * size
        for other, some in zip(others, addresses, strict=True):
            for address in some:
                _store(address, nothing, other)
        total = len(sent)
        return [_array(own, got[total * i : total * (i + 1)]) for i in range(num)]

    return run(places, own, group, start)


def _until_there(read: Callable[[], list[ir.Value]], count: int) -> list[ir.Value]:
    """Reads so many words until none is `MISSING`. In MLIR, for a thread."""
    i32 = ir.IntegerType.get_signless(32)
    loop = scf.WhileOp([i32] * count, [])
    with ir.InsertionPoint(loop.before.blocks.append()):
        words = read()
        most = functools.reduce(arith.maxui, words)
        missing = arith.cmpi(arith.CmpIPredicate.eq, most, mgpu.c(MISSING, i32))
        scf.condition(missing, words)
    with ir.InsertionPoint(loop.after.blocks.append(*[i32] * count)):
        scf.yield_([])
    return list(loop.results)


def _words(x: mgpu.FragmentedArray) -> list[list[ir.Value]]:
    """Returns a thread's numbers as words that may be sent, those of each register."""
    i32 = ir.IntegerType.get_signless(32)
    missing, instead = mgpu.c(MISSING, i32), mgpu.c(INSTEAD, i32)
    found = []
    for register in x.registers.flat:
        num = utils.bitwidth(register.type) // 32
        whole = vector.bitcast(ir.VectorType.get((num,), i32), register)
        words = [
            vector.extract(whole, dynamic_position=[], static_position=[i]) for i in range(num)
        ]
        same = [arith.cmpi(arith.CmpIPredicate.eq, word, missing) for word in words]
        found.append([arith.select(s, instead, word) for s, word in zip(same, words, strict=True)])
    return found


def _array(like: mgpu.FragmentedArray, words: Sequence[ir.Value]) -> mgpu.FragmentedArray:
    """Returns what `_words` made words of, one register's after another's."""
    i32 = ir.IntegerType.get_signless(32)
    registers = np.empty_like(like.registers)
    num = len(words) // registers.size
    for i, register in enumerate(like.registers.flat):
        some = words[num * i : num * (i + 1)]
        whole = vector.from_elements(ir.VectorType.get((num,), i32), some)
        registers.flat[i] = vector.bitcast(register.type, whole)
    return mgpu.FragmentedArray(
        _registers=registers, _layout=like.layout, _is_signed=like.is_signed
    )


def _load(address: ir.Value, otherwise: Sequence[ir.Value], where: ir.Value) -> list[ir.Value]:
    """Reads words that others may be writing; where not, returns `otherwise`."""
    i32, num = ir.IntegerType.get_signless(32), len(otherwise)
    names = ", ".join(f"${i}" for i in range(num))
    names = f"{{{names}}}" if num > 1 else names
    text = f"@${num + 1} ld.relaxed.sys.global{_vector(num)}.b32 {names}, [${num}];"
    tied = [str(i) for i in range(num)]
    types = ", ".join(["i32"] * num)
    made = i32 if num == 1 else ir.Type.parse(f"!llvm.struct<({types})>")
    got = mosaic.inline_asm(
        made, [address, where, *otherwise], text, ",".join(["=r"] * num + ["l", "b", *tied]),
        has_side_effects=True,
    )  # fmt: skip
    return [got] if num == 1 else [llvm.extractvalue(i32, got, [i]) for i in range(num)]


def _store(address: ir.Value, words: Sequence[ir.Value], where: ir.Value | None = None) -> None:
    """Writes words that others may be reading."""
    num, more = len(words), () if where is None else (where,)
    names = ", ".join(f"${i + 1}" for i in range(num))
    names = f"{{{names}}}" if num > 1 else names
    text = f"st.relaxed.sys.global{_vector(num)}.b32 [$0], {names};"
    mosaic.inline_asm(
        ir.Type.parse("!llvm.void"), [address, *words, *more],
        f"@${num + 1} {text}" if more else text,
        ",".join(["l"] + ["r"] * num + ["b"] * len(more)), has_side_effects=True,
    )  # fmt: skip


def _vector(num: int) -> str:
    return f".v{num}" if num > 1 else ""


def _turn(places: ir.Value, row: Any, group: Any) -> ir.Value:
    """Returns the address of where a row's turns are counted, for each of its warpgroups."""
    i32, own = ir.IntegerType.get_signless(32), ir.MemRefType(places.type).shape[0] - 2
    at = arith.muli(row.registers.item(), mgpu.c(MAX_GROUPS, i32))
    at = arith.muli(arith.addi(at, group.registers.item()), mgpu.c(4, i32))
    return arith.addi(_address(places, own), arith.extui(_i64(), at))


def _address(places: ir.Value, peer: ir.Value | int) -> ir.Value:
    """Returns the address of a peer's memory."""
    low, high = (arith.extui(_i64(), memref.load(places, _at(peer, half))) for half in (0, 1))
    return arith.ori(low, arith.shli(high, mgpu.c(32, _i64())))


def _at(row: ir.Value | int, column: int) -> list[ir.Value]:
    index = ir.IndexType.get()
    place = mgpu.c(row, index) if isinstance(row, int) else arith.index_cast(index, row)
    return [place, mgpu.c(column, index)]


def _i64() -> ir.Type:
    return ir.IntegerType.get_signless(64)
