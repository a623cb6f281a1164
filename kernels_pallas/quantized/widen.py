"""Products of weights of 8 or 4 bits with bfloat16, in registers of a warpgroup, on Hopper.

A thread reads 16 terms of a row that lie beside each other, of weights and of tokens, and gives
them to the tensor cores four at a time: `mma` adds terms up in whatever order both have. So nothing
is shuffled between threads; of a number some shifts make the bits of a bfloat16, exactly.
"""

from collections.abc import Callable
from typing import Any

from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm, vector
import numpy as np

from jaxrunner.kernels_pallas import mosaic
from jaxrunner.kernels_pallas.mosaic import Layout, Ref
from jaxrunner.quantization.scheme import CODES
from jaxrunner.types import Array

TERMS = 64  # of a sum that `multiply` takes
# (32 bits, which of its pairs, a multiplier) -> two bfloat16
Pair = Callable[[ir.Value, int, ir.Value], ir.Value]


def load_weights(ref: Ref, packed: int) -> Array:
    """Reads weights, [64 or 32, n] in bytes, `packed` numbers in each."""
    return mosaic.load(ref, layout=rows_of(packed, ref.shape[0]), optimized=False)


def load_tokens(ref: Ref) -> Array:
    """Reads tokens, [T, TERMS]; each warp has all."""
    return mosaic.load(ref, layout=_TOKENS, optimized=False)


def multiplier(code: str) -> Array:
    """Returns what `widen` multiplies bits of numbers with, two powers of two in 32 bits.

    A constant would be moved to a register for each product anew: the compiler must not know it.
    """
    out = plgpu.ShapeDtypeStruct((), jnp.int32, layout=plgpu.Layout.WG_SPLAT(()))

    @mosaic.inline_mgpu(arg_types=(), return_type=out)
    def make(_: Any) -> mgpu.FragmentedArray:
        i32 = ir.IntegerType.get_signless(32)
        text = "{ .reg .b32 a; mov.u32 a, %smid; shr.u32 a, a, 31; or.b32 $0, a, "
        value = mosaic.inline_asm(i32, [], f"{text}{_POWERS.get(code, 0):#x}; }}", "=r")
        return mgpu.FragmentedArray.splat(value, (), is_signed=True)

    return make()


def widen(raw: Array, code: str, power: Array) -> Array:
    """Returns weights, [64 or 32, TERMS], a byte or half of one each, as bfloat16, over FACTOR.

    power: the code's `multiplier`.
    """
    pair, packed = PAIRS[code], PACKED[code]
    given, wide = (rows_of(n, raw.shape[0]) for n in (packed, 1))
    out = plgpu.ShapeDtypeStruct((raw.shape[0], TERMS), jnp.bfloat16, layout=wide)

    @mosaic.inline_mgpu(arg_types=(given, plgpu.Layout.WG_SPLAT(())), return_type=out)
    def convert(
        _: Any, raw: mgpu.FragmentedArray, power: mgpu.FragmentedArray
    ) -> mgpu.FragmentedArray:
        twice = power.registers.item()
        i32, kind = ir.IntegerType.get_signless(32), wide.to_mgpu()
        registers = np.empty(kind.registers_shape(out.shape), dtype=object)
        for place, (_, reg) in zip(np.ndindex(registers.shape), np.ndenumerate(raw.registers),
                                   strict=True):  # fmt: skip
            words = utils.bitcast(reg, ir.VectorType.get((4 // packed,), i32))
            pairs = [
                pair(_element(words, i), j, twice)
                for i in range(4 // packed)
                for j in range(2 * packed)
            ]
            registers[place] = utils.bitcast(
                utils.vector_concat([vector.broadcast(_vector(1, i32), p) for p in pairs]),
                _vector(16, ir.BF16Type.get()),
            )
        return mgpu.FragmentedArray(_registers=registers, _layout=kind, _is_signed=None)

    return convert(raw, power)


def multiply(acc: Array, weights: list[Array], tokens: Array) -> Array:
    """Returns acc, [64, T], plus weights, [64, TERMS], times tokens, [T, TERMS].

    Or two times [32, TERMS] of weights: each warp has eight rows of both, one behind the other.
    """
    out = plgpu.ShapeDtypeStruct(acc.shape, acc.dtype, layout=plgpu.Layout.WGMMA)

    layouts = plgpu.Layout.WGMMA, _TOKENS, *[rows_of(1, w.shape[0]) for w in weights]

    @mosaic.inline_mgpu(arg_types=layouts, return_type=out)
    def add(
        _: Any, acc: mgpu.FragmentedArray, x: mgpu.FragmentedArray, *weights: mgpu.FragmentedArray
    ) -> mgpu.FragmentedArray:
        i32 = ir.IntegerType.get_signless(32)

        def words(register: ir.Value) -> list[ir.Value]:
            [num] = ir.VectorType(register.type).shape
            both = utils.bitcast(register, _vector(num // 2, i32))
            return [_element(both, i) for i in range(num // 2)]

        upper, lower = (words(register) for w in weights for register in w.registers.flat)
        mine = [words(register) for register in x.registers.flat]
        found = np.empty_like(acc.registers)
        for n in range(acc.shape[1] // 8):
            terms = [word for part in mine[2 * n : 2 * n + 2] for word in part]
            sums = [_element(r, i) for r in acc.registers[:, n].flat for i in range(2)]
            for q in range(0, 8, 2):
                rows = upper[q], lower[q], upper[q + 1], lower[q + 1]
                sums = _mma(sums, [*rows, *terms[q : q + 2]])
            f32 = ir.F32Type.get()
            halves = [
                utils.vector_concat([vector.broadcast(_vector(1, f32), s) for s in sums[i : i + 2]])
                for i in (0, 2)
            ]
            found[:, n] = np.array(halves, dtype=object).reshape(found[:, n].shape)
        return mgpu.FragmentedArray(_registers=found, _layout=acc.layout, _is_signed=None)

    return add(acc, tokens, *weights)


def _mma(sums: list[ir.Value], operands: list[ir.Value]) -> list[ir.Value]:
    f32 = ir.F32Type.get()
    text = (
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {$0, $1, $2, $3}, {$4, $5, $6, $7}, "
        "{$8, $9}, {$10, $11, $12, $13};"
    )
    out = mosaic.inline_asm(
        llvm.StructType.get_literal([f32] * 4), [*operands, *sums], text,
        ",".join(["=f"] * 4 + ["r"] * 6 + ["f"] * 4),
    )  # fmt: skip
    return [llvm.extractvalue(f32, out, [i]) for i in range(4)]


def _element(values: ir.Value, i: int) -> ir.Value:
    return vector.extract(values, dynamic_position=[], static_position=[i])


def _vector(num: int, kind: ir.Type) -> ir.Type:
    return ir.VectorType.get((num,), kind)


def rows_of(packed: int, height: int) -> Layout:
    """Lays out weights, [height, n]: a warp has 16 rows of 64, or 8 of 32, a thread 16 terms."""
    size = 16 // packed
    tiling = plgpu.Tiling(((height, 4 * size), (height // 4, 4 * size), (8, size)))
    return plgpu.Layout.TILED(tiling, (-6,), (-2, -3), -1)


# A thread has 16 terms of every eighth token, in two registers of 16 bytes.
_TOKENS: Layout = plgpu.Layout.TILED(
    plgpu.Tiling(((8, 64), (8, 16), (8,))), (plgpu.Replicated(4),), (-3, -4), -1
)


def _asm(word: ir.Value, text: str, *more: ir.Value) -> ir.Value:
    i32, kinds = ir.IntegerType.get_signless(32), "=r,r" + ",r" * len(more)
    return mosaic.inline_asm(i32, [word, *more], "{ .reg .b32 a<4>; " + text + " }", kinds)


def _e4m3(word: ir.Value, i: int, power: ir.Value) -> ir.Value:
    """Two numbers of fp8: sign, 4 bits of exponent, 3 of mantissa, each moved to its place."""
    select = 0x9180 if i == 0 else 0xB3A2  # each byte with its sign above
    return _asm(
        word,
        f"prmt.b32 a0, $1, 0, {select:#06x};"
        "shl.b32 a0, a0, 4;"
        "and.b32 a0, a0, 0x87f087f0;"
        "mov.b32 a1, 0x7b807b80;"  # 2 ** 120
        "mul.bf16x2 $0, a0, a1;",
    )


def _int8(word: ir.Value, i: int, power: ir.Value) -> ir.Value:
    """Two signed bytes, a 64th of each.

    In the low 8 bits of a bfloat16 a whole number counts 2 ** -133, in the lowest bit of the
    exponent too.
    """
    select = 0x4140 if i == 0 else 0x4342
    return _asm(
        word,
        "xor.b32 a0, $1, 0x80808080;"  # 128 more
        f"prmt.b32 a0, a0, 0, {select:#06x};"
        "mov.b32 a1, 0xc000c000;"  # -2
        "fma.rn.bf16x2 $0, a0, $2, a1;",
        power,
    )


def _int4(word: ir.Value, i: int, power: ir.Value) -> ir.Value:
    """Two halves of a byte, which are 8 more than the numbers: a 64th of each, as `_int8`.

    All low halves of a word are cut out at once, and all high ones. The sign of a low half is 0.
    """
    return _asm(
        word,
        "and.b32 a0, $1, 0x0f0f0f0f;"
        "and.b32 a1, $1, 0xf0f0f0f0;"
        f"prmt.b32 a0, a0, a1, {0x8480 + 0x1111 * i:#06x};"
        "mov.b32 a1, 0xbe00be00;"  # -8 / 64
        "fma.rn.bf16x2 $0, a0, $2, a1;",
        power,
    )


def _halves(i: int) -> str:
    """Moves the halves of byte i to the low ends of those of a1, with anything above them."""
    return f"shr.u32 a0, $1, 4; prmt.b32 a1, $1, a0, {0xF0F0 | (i + 4) << 8 | i:#06x};"


def _e2m1(word: ir.Value, i: int, power: ir.Value) -> ir.Value:
    """Two numbers of fp4, in halves of a byte."""
    return _asm(
        word,
        f"{_halves(i)}"
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
_POWERS = {"int8": 0x7F007F00, "int4": 0x7D007F00}  # 2 ** 127; 2 ** 127 and 2 ** 123
# The divisors of `widen`: as whole numbers they are the low bits of a bfloat16.
FACTOR = {code: 64.0 if code in ("int8", "int4") else 1.0 for code in PAIRS}
PACKED = {code: CODES[code].packed for code in PAIRS}
