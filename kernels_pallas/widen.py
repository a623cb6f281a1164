"""Weights of 8 or 4 bits, in registers, as numbers that a matrix product takes, on Hopper.

A thread reads four bytes at a time, which lie beside each other; a product wants them of threads
beside each other, so they trade. What is left are integers and shifts: each number becomes the
bits of a bfloat16, exactly.
"""

from collections.abc import Callable
import functools
from typing import Any

import jax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith
import numpy as np

from jaxrunner.kernels_pallas import mosaic
from jaxrunner.kernels_pallas.mosaic import Layout, Ref
from jaxrunner.types import Array

Pair = Callable[[ir.Value, int], ir.Value]  # (32 bits, which of its pairs) -> two bfloat16


def load(ref: Ref, code: str) -> Array:
    """Reads weights, [64, n] in bytes, as bfloat16, [64, n] or twice as many."""
    pair, layout = PAIRS[code], LAYOUTS[PACKED[code]]
    raw = mosaic.load(ref, layout=layout)
    shape = raw.shape[0], raw.shape[1] * PACKED[code]
    out = plgpu.ShapeDtypeStruct(shape, jnp.bfloat16, layout=plgpu.Layout.WGMMA)

    @mosaic.inline_mgpu(arg_types=(layout,), return_type=out)
    def widen(_: Any, raw: mgpu.FragmentedArray) -> mgpu.FragmentedArray:
        return _widen(raw, shape, PACKED[code], pair)

    return widen(raw)


def _widen(
    raw: mgpu.FragmentedArray, shape: tuple[int, int], packed: int, pair: Pair
) -> mgpu.FragmentedArray:
    layout = plgpu.Layout.WGMMA.to_mgpu()
    i32 = ir.IntegerType.get_signless(32)
    registers = np.empty(layout.registers_shape(shape), dtype=object)
    lane = arith.remui(mgpu.thread_idx(), mgpu.c(4, i32))

    def bit(value: int) -> ir.Value:
        masked = arith.andi(lane, mgpu.c(value, i32))
        return arith.cmpi(arith.CmpIPredicate.eq, masked, mgpu.c(0, i32))

    first, second = bit(1), bit(2)
    for index, reg in np.ndenumerate(raw.registers):
        word = utils.bitcast(reg, i32)
        if packed == 2:
            # Of 8 columns a thread, halves of 4 go to the thread two further.
            word = _trade(word, 2, second, 0x5410, 0x3276)
            # Of each half, the thread beside takes two.
            word = _trade(word, 1, first, 0x6240, 0x3715)
            # Bytes are pairs now.
        else:
            word = _trade(word, 1, first, 0x5410, 0x3276)
        num = 2 * packed
        for i in range(num):
            place = (index[0], index[1] * num + i, *index[2:-1])
            registers[place] = utils.bitcast(
                pair(word, i), ir.VectorType.get((2,), ir.BF16Type.get())
            )
    return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)


def _trade(word: ir.Value, mask: int, own: ir.Value, low: int, high: int) -> ir.Value:
    """Blends the bytes of two threads, whose numbers differ by `mask`."""
    i32 = ir.IntegerType.get_signless(32)
    other = utils.shfl_bfly(word, mask)
    return utils.prmt(word, other, arith.select(own, mgpu.c(low, i32), mgpu.c(high, i32)))


def _asm(word: ir.Value, text: str) -> ir.Value:
    i32 = ir.IntegerType.get_signless(32)
    return mosaic.inline_asm(i32, [word], "{ .reg .b32 a<4>; " + text + " }", "=r,r")


def _e4m3(word: ir.Value, i: int) -> ir.Value:
    """Two numbers of fp8: sign, 4 bits of exponent, 3 of mantissa, each moved to its place."""
    select = 0x1404 if i == 0 else 0x3424  # bytes to the upper halves, zeros below
    return _asm(
        word,
        f"prmt.b32 a0, $1, 0, {select:#06x};"
        "shr.u32 a1, a0, 4;"
        "and.b32 a1, a1, 0x07f007f0;"
        "lop3.b32 a1, a0, 0x80008000, a1, 0xea;"  # (a0 & sign) | a1
        "mov.b32 a2, 0x7b807b80;"  # 2 ** 120
        "mul.bf16x2 $0, a1, a2;",
    )


def _int8(word: ir.Value, i: int) -> ir.Value:
    """Two signed bytes: each is a mantissa of 128, less what its highest bit counts."""
    select = 0x4140 if i == 0 else 0x4342
    return _asm(
        word,
        f"prmt.b32 a0, $1, 0x43, {select:#06x};"
        "and.b32 a1, a0, 0xff7fff7f;"
        "and.b32 a2, a0, 0xff80ff80;"
        "sub.bf16x2 $0, a1, a2;",
    )


def _int4(word: ir.Value, i: int) -> ir.Value:
    """Two halves of a byte, which are 8 more than the numbers."""
    return _asm(
        word,
        "shr.u32 a0, $1, 4;"
        f"prmt.b32 a1, $1, a0, {0xF0F0 | (i + 4) << 8 | i:#06x};"
        "lop3.b32 a2, a1, 0x000f000f, 0x43004300, 0xea;"
        "mov.b32 a3, 0x43084308;"
        "sub.bf16x2 $0, a2, a3;",
    )


def _e2m1(word: ir.Value, i: int) -> ir.Value:
    """Two numbers of fp4, in halves of a byte."""
    return _asm(
        word,
        "shr.u32 a0, $1, 4;"
        f"prmt.b32 a1, $1, a0, {0xF0F0 | (i + 4) << 8 | i:#06x};"
        "shl.b32 a2, a1, 6;"
        "shl.b32 a3, a1, 12;"
        "and.b32 a2, a2, 0x01c001c0;"
        "lop3.b32 a2, a3, 0x80008000, a2, 0xea;"
        "mov.b32 a3, 0x7e807e80;"  # 2 ** 126
        "mul.bf16x2 $0, a2, a3;",
    )


PAIRS: dict[str, Pair] = {
    "float8_e4m3fn": _e4m3, "int8": _int8, "int4": _int4, "float4_e2m1fn": _e2m1,
}  # fmt: skip
PACKED = {"float8_e4m3fn": 1, "int8": 1, "int4": 2, "float4_e2m1fn": 2}
LAYOUTS: dict[int, Layout] = {1: plgpu.Layout.WGMMA_UPCAST_2X, 2: plgpu.Layout.WGMMA_8BIT}
