"""Keys and values of 8 bits on their way from shared memory to a product in bfloat16."""

from typing import Any

from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector
import numpy as np

from jaxrunner.kernels_pallas import mosaic
from jaxrunner.kernels_pallas.attention.online_softmax import LAYOUT, PER_ROW
from jaxrunner.kernels_pallas.mosaic import Barrier, Ref, Shaped
from jaxrunner.types import Array

DTYPES = (jnp.float8_e4m3fn, jnp.int8)
# Of four e4m3 numbers: what is below the sign, moved to where bfloat16 has it. That is the number
# times 2**-120, and NaN becomes finite.
E4M3_TO_BF16 = """{
.reg .b32 low, high;
shl.b32 low, $2, 4;
and.b32 low, low, 0xf0f0f0f0;
shr.b32 high, $2, 4;
and.b32 high, high, 0x07070707;
lop3.b32 high, $2, 0x80808080, high, 0xea;
prmt.b32 $0, low, high, 0x5140;
prmt.b32 $1, low, high, 0x7362;
}"""


def head_group(S: int) -> int:
    """Returns how many heads' scales are copied together: a copy has at least 128 bytes."""
    return max(1, 32 // S)


def refuses(q: Shaped, k: Shaped) -> str | None:
    """Says why q, [T, H, D], and k of 8 bits, [N, K, S, D], are not served; None if they are."""
    (_, _, D), (_, K, S, _) = q.shape, k.shape
    if q.dtype != jnp.bfloat16:
        return f"wants queries in bfloat16 where the KV cache has 8 bits, got {q.dtype}"
    if D % 64 or D > 256:
        return f"wants a head_dim of 64, 128, 192 or 256 where the KV cache has 8 bits, got {D}"
    if K % (group := head_group(S)):
        return f"wants KV heads that are a multiple of {group} in blocks of {S}, got {K}"
    return None


def unscaled(k: Shaped, k_scale: Shaped | None, v_scale: Shaped | None) -> str | None:
    """Says why scales do not go with k; None if they do."""
    given, wanted = (k_scale is not None, v_scale is not None), k.dtype in DTYPES
    if given != (wanted, wanted):
        return f"wants k_scale and v_scale where the KV cache has 8 bits, got {given} of {k.dtype}"
    if k_scale is not None and (k_scale.shape != k.shape[:3] or k_scale.dtype != jnp.float32):
        want = list(k.shape[:3])
        return f"wants scales float32{want}, got {k_scale.dtype}{list(k_scale.shape)}"
    return None


def tile(D: int) -> tuple[Any, Any]:
    """Returns how rows of D bytes lie in shared memory."""
    return mosaic.tiled(plgpu.find_swizzle(D * 8), 1)


def fetch(
    rows: Ref, scales: Ref, place: tuple[Array, Array, Any], to: tuple[Ref, Ref], ready: Barrier
) -> None:
    """Copies a run of a head's rows and of scales; `place` is its block, head and slice."""
    (block, h, at), group = place, to[1].shape[0]
    heads = pl.ds(h - lax.rem(h, group), group)
    mosaic.copy_gmem_to_smem(rows.at[block, h, at], to[0], ready)
    mosaic.copy_gmem_to_smem(scales.at[block, heads, at], to[1], ready)


def widen(ref: Ref, *, ordered: bool) -> Array:
    """Loads a tile, [64 n, D], as bfloat16 in `LAYOUT`; numbers in e4m3 come times 2**-120.

    If not `ordered`, columns come as they cost nothing: a thread's four bytes in a row become two
    pairs, of the first and of the second eight of 16 columns.
    """
    layout = plgpu.Layout.WGMMA_UPCAST_2X if ordered else plgpu.Layout.WGMMA_8BIT
    out = plgpu.ShapeDtypeStruct(ref.shape, jnp.bfloat16, layout=LAYOUT)

    @mosaic.inline_mgpu(arg_types=(layout,), return_type=out)
    def convert(_: Any, x: mgpu.FragmentedArray) -> mgpu.FragmentedArray:
        if ordered:
            x = _in_order(x)
        if ref.dtype == jnp.int8:
            x = x.astype(ir.BF16Type.get())
        to = mgpu.WGMMA_LAYOUT
        registers = np.empty(to.registers_shape(x.shape), dtype=object)
        for (row, column, *rest), four in np.ndenumerate(x.registers):
            pairs = halves(four) if ref.dtype == jnp.int8 else _from_e4m3(four)
            for half, pair in enumerate(pairs):
                # The other layouts may have one more axis, of size 1.
                registers[row, 2 * column + half, *rest[: registers.ndim - 2]] = pair
        return mgpu.FragmentedArray(_registers=registers, _layout=to, _is_signed=None)

    return convert(mosaic.load(ref, layout=layout))


def _from_e4m3(four: ir.Value) -> list[ir.Value]:
    """Returns four numbers as two pairs in bfloat16, times 2**-120."""
    word, pair = ir.IntegerType.get_signless(32), ir.VectorType.get((2,), ir.BF16Type.get())
    both = llvm.StructType.get_literal([word, word])
    bits = mgpu.utils.bitcast(four, word)
    words = mosaic.inline_asm(both, [bits], E4M3_TO_BF16, "=r,=r,r")
    return [mgpu.utils.bitcast(llvm.extractvalue(word, words, [i]), pair) for i in (0, 1)]


def _in_order(x: mgpu.FragmentedArray) -> mgpu.FragmentedArray:
    """Swaps bytes between neighbours, so that each has two of the first eight columns of 16.

    Of those, an even thread has four of the first eight and its neighbour the four 8 columns on.
    """
    word = ir.IntegerType.get_signless(32)
    parity = arith.remui(mgpu.utils.thread_idx(), mgpu.c(2, word))
    even = arith.cmpi(arith.CmpIPredicate.eq, parity, mgpu.c(0, word))
    # Of bytes 0-3, its own, and 4-7, the neighbour's, from the lowest place up.
    places = arith.select(even, mgpu.c(0x5410, word), mgpu.c(0x3276, word))
    registers = np.empty_like(x.registers)
    for at, own in np.ndenumerate(x.registers):
        bits = mgpu.utils.bitcast(own, word)
        bits = mgpu.utils.prmt(bits, mgpu.utils.shfl_bfly(bits, 1), places)
        registers[at] = mgpu.utils.bitcast(bits, own.type)
    return mgpu.FragmentedArray(_registers=registers, _layout=x.layout, _is_signed=x.is_signed)


def halves(four: ir.Value) -> list[ir.Value]:
    """Returns the two pairs of a vector of four."""
    return [mgpu.utils.vector_slice(four, slice(i, i + 2)) for i in (0, 2)]


def scales(ref: Ref, first: int, count: int) -> Array:
    """Loads scales, `count` of them from `first` on, from ref, [copies, part], one row a key."""
    out = plgpu.ShapeDtypeStruct((count,), jnp.float32, layout=PER_ROW)

    @mosaic.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=out)
    def load(_: Any, ref: ir.Value) -> mgpu.FragmentedArray:
        index, layout = ir.IndexType.get(), mgpu.WGMMA_ROW_LAYOUT
        registers = np.empty(layout.registers_shape((count,)), dtype=object)
        start, part = mgpu.c(first, index), mgpu.c(ir.MemRefType(ref.type).shape[1], index)
        one = ir.VectorType.get((1,), ir.F32Type.get())
        keys = layout.thread_idxs((count,))
        for at, (key,) in zip(np.ndindex(registers.shape), keys, strict=True):
            key = arith.addi(key, start)
            place = [arith.divui(key, part), arith.remui(key, part)]
            registers[at] = vector.load(one, ref, place)
        return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)

    return load(ref)
