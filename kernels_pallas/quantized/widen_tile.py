"""Weights of 8 or 4 bits as the left operand of `wgmma`, in registers of a warpgroup, on Hopper.

A thread reads two numbers of a row at a time, those that `wgmma` wants of it, so that nothing is
shuffled between threads. Of 4 bits it may read eight numbers at a time, a word, if tokens have
their terms in the order that this asks for (`in_order`): a product adds terms up in any order that
both sides have.
"""

from collections.abc import Callable, Sequence
from typing import Any

from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, vector
import numpy as np

from jaxrunner.kernels_pallas import mosaic
from jaxrunner.kernels_pallas.mosaic import Layout, Ref
from jaxrunner.kernels_pallas.quantized import widen
from jaxrunner.kernels_pallas.quantized.quantized_steps import HALF
from jaxrunner.types import Array

# A thread has every fourth byte of two rows: two halves that lie beside each other.
_BYTES: Layout = plgpu.Layout.TILED(
    plgpu.Tiling(((64, 4), (16, 4), (8, 4), (1,))), (-7,), (-3, -2), -1
)
# Each warp has eight of 32 rows.
_HALF_BYTES: Layout = plgpu.Layout.TILED(plgpu.Tiling(((32, 4), (8, 4), (1,))), (-5,), (-3, -2), -1)
# A thread has every fourth word of two rows, or of one.
_WORDS: Layout = plgpu.Layout.TILED(
    plgpu.Tiling(((64, 16), (16, 16), (8, 16), (4,))), (-7,), (-3, -2), -1
)
_HALF_WORDS: Layout = plgpu.Layout.TILED(
    plgpu.Tiling(((32, 16), (8, 16), (4,))), (-5,), (-3, -2), -1
)
# (the number's word, a multiply-add's operands or none) -> PTX for two bfloat16 numbers in a0
_E4M3 = (
    "prmt.b32 a0, $1, 0, 0x9180;"  # each byte with its sign above
    "shl.b32 a0, a0, 4;"
    "and.b32 a0, a0, 0x87f087f0;"
)
_INT8 = (
    "prmt.b32 a0, $1, 0x43, 0x4140;"
    "and.b32 a1, a0, 0xff7fff7f;"
    "and.b32 a2, a0, 0xff80ff80;"
    "sub.bf16x2 a0, a1, a2;"
)
_HALVES = "mul.lo.u32 a0, $1, 0x1001;"
_INT4 = (
    _HALVES + "lop3.b32 a0, a0, 0x000f000f, 0x43004300, 0xea;"
    "mov.b32 a1, 0x43084308;"
    "sub.bf16x2 a0, a0, a1;"
)
_E2M1 = (
    _HALVES + "shl.b32 a1, a0, 6;"
    "shl.b32 a2, a0, 12;"
    "and.b32 a1, a1, 0x01c001c0;"
    "lop3.b32 a0, a2, 0x80008000, a1, 0xea;"
)
NUMBERS = {"float8_e4m3fn": _E4M3, "int8": _INT8, "int4": _INT4, "float4_e2m1fn": _E2M1}
# The powers of 2 that numbers are multiplied by: as bfloat16 their exponents are too small.
_POWER = {"float8_e4m3fn": 120, "float4_e2m1fn": 126}
_LESS = 8  # of which sums get this much: a scale times the power stays a bfloat16
FACTOR = {code: 2.0**_LESS if code in _POWER else 1.0 for code in NUMBERS}
WORD_FACTOR = 64.0
# Halves of bytes i and i + 4 of a word, 8 more than the numbers: of these a 64th.
_PAIRS = [
    ("shr.u32 a0, $1, 8;" if i > 1 else "mov.b32 a0, $1;") + f"and.b32 a0, a0, {mask};"
    f"mov.b32 a1, {power}; mov.b32 a2, 0xbe00be00; fma.rn.bf16x2 $0, a0, a1, a2;"
    for i, (mask, power) in enumerate(
        [("0x000f000f", "0x7f007f00"), ("0x00f000f0", "0x7d007d00")] * 2
    )
]


def in_order(x: Any) -> Any:
    """Returns tokens, [..., E], with terms in the order that words of weights ask for.

    Of a run of 32 thread t has the t-th word, terms 8 t to 8 t + 7, which it widens by pairs, i and
    i + 4. `wgmma` takes pair i of it for terms 8 i + 2 t and the next: so these are put there.
    """
    runs = x.reshape(*x.shape[:-1], -1, 4, 2, 4)  # [run, thread, which of a pair, pair]
    first, n = range(runs.ndim - 3), runs.ndim
    return runs.transpose(*first, n - 1, n - 3, n - 2).reshape(x.shape)


def load(ref: Ref, packed: int, *, words: bool = False) -> Array:
    """Reads weights, [64, n] in bytes, `packed` numbers in each. words: for tokens `in_order`."""
    layout, _ = _layouts(packed, words)
    return mosaic.load(ref, layout=layout, optimized=False)


def _layouts(packed: int, words: bool) -> tuple[Layout, Layout]:
    """Returns the layouts of 64 rows, and of 32 of which each warp has eight."""
    if packed == 1:
        return plgpu.Layout.WGMMA, HALF
    return (_WORDS, _HALF_WORDS) if words else (_BYTES, _HALF_BYTES)


def load_by_turns(refs: Sequence[Ref], packed: int, *, words: bool = False) -> Array:
    """Reads two [32, n] in bytes as [64, n], whose eights of rows are of both by turns."""
    layout, half = _layouts(packed, words)
    [_, n] = refs[0].shape
    out = plgpu.ShapeDtypeStruct((64, n), refs[0].dtype, layout=layout)

    @mosaic.inline_mgpu(arg_types=(half, half), return_type=out)
    def join(_: Any, *parts: mgpu.FragmentedArray) -> mgpu.FragmentedArray:
        kind = layout.to_mgpu()
        # A thread has numbers in two rows, by turns.
        registers = np.stack([part.registers.reshape(-1) for part in parts], 1)
        registers = registers.reshape(kind.registers_shape(out.shape))
        return mgpu.FragmentedArray(
            _registers=registers, _layout=kind, _is_signed=parts[0].is_signed
        )

    return join(*[mosaic.load(ref, layout=half, optimized=False) for ref in refs])


def split(scale: Array, code: str) -> tuple[Array, Array]:
    """Returns scales of rows, [64] in float32, as two summands in bfloat16."""
    if code in _POWER:
        scale = scale * 2.0 ** (_POWER[code] - _LESS)
    high = scale.astype(jnp.bfloat16)
    return high, (scale - high.astype(jnp.float32)).astype(jnp.bfloat16)


def scaled(raw: Array, scales: Sequence[tuple[Array, Array]], code: str) -> Array:
    """Returns weights, [64, n] in bytes, times scales of rows, [64], less FACTOR, rounded once.

    scales: what `split` returns, of equal parts of the weights of a row, one behind the other.
    """
    text = NUMBERS[code] + "mul.bf16x2 a1, a0, $3; fma.rn.bf16x2 $0, a0, $2, a1;"
    return _convert(raw, scales, code, lambda word, rows: _asm([word, *rows], text))


def shifted(raw: Array, powers: Sequence[Array], code: str) -> Array:
    """Returns weights, [64, n] in bytes, times powers of two of rows, [64] in bfloat16, exactly.

    powers: of equal parts of the weights of a row, one behind the other.
    """
    text = _plain(code, "a0") + "mul.bf16x2 $0, a0, $2;"
    rows = [(power,) for power in powers]
    return _convert(raw, rows, code, lambda word, rows: _asm([word, *rows], text))


def plain(raw: Array, code: str) -> Array:
    """Returns weights, [64, n] in bytes, as numbers in bfloat16."""
    text = _plain(code, "$0")
    return _convert(raw, [()], code, lambda word, _: _asm([word], text))


def of_words(raw: Array) -> Array:
    """Returns weights of int4, [64, n] in bytes by words, as bfloat16, over `WORD_FACTOR`.

    As in `widen`: a whole number in the low 8 bits of a bfloat16 counts 2 ** -133.
    """
    out = plgpu.ShapeDtypeStruct((raw.shape[0], raw.shape[1] * 2), jnp.bfloat16,
                                 layout=plgpu.Layout.WGMMA)  # fmt: skip

    @mosaic.inline_mgpu(arg_types=(_WORDS,), return_type=out)
    def convert(_: Any, raw: mgpu.FragmentedArray) -> mgpu.FragmentedArray:
        i32, kind = ir.IntegerType.get_signless(32), plgpu.Layout.WGMMA.to_mgpu()
        two = ir.VectorType.get((2,), ir.BF16Type.get())
        registers = np.empty((raw.registers.size // 2, len(_PAIRS), 2), dtype=object)
        for n, reg in enumerate(raw.registers.flat):  # words of two rows, by turns
            word = utils.bitcast(reg, i32)
            for i, text in enumerate(_PAIRS):
                registers[n // 2, i, n % 2] = utils.bitcast(_asm([word], text), two)
        shaped = registers.reshape(kind.registers_shape(out.shape))
        return mgpu.FragmentedArray(_registers=shaped, _layout=kind, _is_signed=None)

    return convert(raw)


def _plain(code: str, target: str) -> str:
    """Returns PTX for two numbers in `target`."""
    if code not in _POWER:
        return NUMBERS[code] + f"mov.b32 {target}, a0;"
    bits = (127 + _POWER[code]) << 7
    return NUMBERS[code] + f"mov.b32 a1, {bits << 16 | bits:#x}; mul.bf16x2 {target}, a0, a1;"


def _convert(
    raw: Array, rows: Sequence[tuple[Array, ...]], code: str,
    pair: Callable[[ir.Value, list[ir.Value]], ir.Value],
) -> Array:  # fmt: skip
    packed, layout = widen.PACKED[code], plgpu.Layout.WGMMA
    out = plgpu.ShapeDtypeStruct((raw.shape[0], raw.shape[1] * packed), jnp.bfloat16, layout=layout)
    given, num = layout if packed == 1 else _BYTES, len(rows[0])

    @mosaic.inline_mgpu(arg_types=(given, *[layout.reduce(1)] * (num * len(rows))), return_type=out)
    def convert(
        _: Any, raw: mgpu.FragmentedArray, *rows_of_parts: mgpu.FragmentedArray
    ) -> mgpu.FragmentedArray:
        i32, kind = ir.IntegerType.get_signless(32), layout.to_mgpu()
        two = ir.VectorType.get((2,), ir.BF16Type.get())
        registers = np.empty(kind.registers_shape(out.shape), dtype=object)
        twice = [
            [utils.bitcast(vector.broadcast(two, _only(r)), i32) for r in row.registers.flat]
            for row in rows_of_parts
        ]
        narrow = ir.IntegerType.get_signless(16 // packed)
        places = np.ndindex(registers.shape)
        for i, (place, reg) in enumerate(zip(places, raw.registers.flat, strict=True)):
            word = arith.extui(i32, utils.bitcast(reg, narrow))
            part = i * len(rows) // raw.registers.size
            mine = twice[part * num : (part + 1) * num]
            # A thread has numbers in two rows, by turns.
            registers[place] = utils.bitcast(pair(word, [each[i % 2] for each in mine]), two)
        return mgpu.FragmentedArray(_registers=registers, _layout=kind, _is_signed=None)

    return convert(raw, *[row for part in rows for row in part])


def _only(register: ir.Value) -> ir.Value:
    return vector.extract(register, dynamic_position=[], static_position=[0])


def _asm(words: list[ir.Value], text: str) -> ir.Value:
    i32 = ir.IntegerType.get_signless(32)
    kinds = ",".join(["=r"] + ["r"] * len(words))
    return mosaic.inline_asm(i32, words, "{ .reg .b32 a<4>; " + text + " }", kinds)
