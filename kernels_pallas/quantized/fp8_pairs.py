"""Tokens as pairs of fp8 numbers whose sum they are, for weights that are held in fp8 (Mosaic GPU).

A number of bfloat16 has 8 significant bits, one of float8_e4m3fn 4: the upper four of a number, and
what they leave, are two numbers of fp8. A power of two, which all numbers of a token share, has its
largest one in their range. So tensor cores multiply weights of fp8 as they are stored, with as many
operations as in bfloat16 and without an instruction that widens them. Below 2 ** -10 of a token's
largest number bits are lost: these are less than the largest one's own rounding to bfloat16.
"""

import functools
from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

from jaxrunner.kernels_pallas import mosaic, pdl
from jaxrunner.kernels_pallas.mosaic import TOO_OLD, Barrier, Ref, Shaped
from jaxrunner.kernels_pallas.products import add_norm
from jaxrunner.kernels_pallas.quantized.fp8_rounding import swiglu
from jaxrunner.kernels_pallas.quantized.fp8_tiles import E4M3
from jaxrunner.kernels_pallas.stores import put
from jaxrunner.types import Array

WIDTH = 512  # numbers of a warpgroup, or a multiple: a thread has 4 neighbours at least
LEAST = 2.0**-100  # the largest number of a token of zeros, so that nothing is divided by 0
TOP = 7  # the exponent of the largest number of a token
EXPONENT = 0x7F800000  # the bits of a float32 that have it
LOWEST = 2.0**-6  # the smallest fp8 number whose four bits all count


def refuses(x: Shaped) -> str | None:
    """Says why x, [T, E], or gates and units, [T, 2, E], are not served, or None."""
    if TOO_OLD is not None:
        return TOO_OLD
    if x.dtype != jnp.bfloat16:
        return f"wants tokens in bfloat16, got {x.dtype}"
    groups = add_norm.groups_of(x.shape[-1])
    if not groups or x.shape[-1] % (groups * WIDTH):
        return f"wants tokens of which each of 8 warpgroups holds {WIDTH} or more, got {x.shape}"
    return None


def fp8_pairs(x: Array, *, interpret: Any = None) -> tuple[Array, Array]:
    """Returns x, [T, E], as pairs of float8_e4m3fn, [2, T, E], and their scales, float32 [T].

    The sum of a pair times its token's scale is the number. Gates and units, [T, 2, E], of a SwiGLU
    are multiplied first, as `fp8_rounding` does. interpret: parameters of Pallas' interpreter; None
    on a GPU.

    Raises:
      ValueError: what `refuses` says.
    """
    if why := refuses(x):
        raise ValueError(f"fp8_pairs {why}")
    T, E = x.shape[0], x.shape[-1]
    cut = add_norm.cut_rows(E)
    numbers, scale = plgpu.kernel(
        functools.partial(_kernel, interpret is None),
        out_type=(
            jax.ShapeDtypeStruct((2, T, *cut), E4M3), jax.ShapeDtypeStruct((T,), jnp.float32),
        ),
        scratch_types=(
            plgpu.SMEM((1, *cut[:2]), jnp.float32),
            plgpu.Barrier(num_arrivals=cut[0], num_barriers=1),
        ),
        grid=(T,), grid_names=("row",), num_threads=cut[0], thread_name="group",
        kernel_name="fp8_pairs",
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True, approx_math=True),
        interpret=interpret,
    )(x.reshape(*x.shape[:-1], *cut))  # fmt: skip
    return numbers.reshape(2, T, E), scale


def _kernel(
    is_device: bool, x: Ref, numbers: Ref, scale: Ref, most_smem: Ref, barriers: Barrier
) -> None:
    pdl.begin(is_device)
    row, group = lax.axis_index("row"), lax.axis_index("group")
    layout = add_norm.layout_of(x.shape[-2] * x.shape[-1])

    def load(ref: Ref) -> Array:
        return mosaic.load(ref, layout=layout, optimized=False).astype(jnp.float32)

    if len(x.shape) == 4:
        wide = load(x.at[row, group])
    else:
        wide = swiglu(load(x.at[row, 0, group]), load(x.at[row, 1, group]), x.dtype)
    leave(wide, row, group, numbers, scale, most_smem, barriers.at[0], is_device)


def leave(
    wide: Array, row: Array, group: Array, numbers: Ref, scale: Ref, most_smem: Ref,
    barrier: Barrier, is_device: bool,
) -> None:  # fmt: skip
    """Writes a warpgroup's part of a row, [warps, width] in float32, as pairs, and its scale.

    numbers: [2, T, groups, warps, width]; scale: [T]. most_smem: [1, groups, warps], shared memory.
    """
    groups, warps = most_smem.shape[1:]
    most_smem[0, group] = jnp.maximum(wide, -wide).max(-1)
    mosaic.barrier_arrive(barrier)
    mosaic.barrier_wait(barrier)
    each = [most_smem[0, g, w] for g in range(groups) for w in range(warps)]
    most = functools.reduce(jnp.maximum, each, jnp.float32(LEAST))
    power = (_power(most) if is_device else masked(most, EXPONENT)) * 2.0**-TOP
    high, low = split(wide * (1 / power))
    put(numbers.at[0, row, group], high)
    put(numbers.at[1, row, group], low)

    @pl.when(group == 0)
    def _() -> None:
        scale[row] = power


def split(wide: Array) -> tuple[Array, Array]:
    """Returns numbers in float32 as two of fp8: their upper four bits, and what these leave."""
    large = jnp.maximum(wide, -wide) >= LOWEST
    upper = jnp.where(large, masked(wide, -(1 << 20)), jnp.zeros((), wide.dtype))
    return upper.astype(E4M3), (wide - upper).astype(E4M3)


def _power(x: Array) -> Array:
    """Returns the power of two that a scalar is not below, as `masked`, which takes arrays."""
    scalar = plgpu.Layout.WG_SPLAT(())
    out = plgpu.ShapeDtypeStruct((), jnp.float32, layout=scalar)

    @mosaic.inline_mgpu(arg_types=(scalar,), return_type=out)
    def mask(_: Any, x: mgpu.FragmentedArray) -> mgpu.FragmentedArray:
        i32 = ir.IntegerType.get_signless(32)
        bits = arith.andi(arith.bitcast(i32, x.registers.item()), mgpu.c(EXPONENT, i32))
        value = arith.bitcast(ir.F32Type.get(), bits)
        return mgpu.FragmentedArray.splat(value, (), is_signed=None)

    return mask(x)


def masked(x: Array, mask: int) -> Array:
    """Returns x, float32, with those of its bits that a mask has."""
    bits = lax.bitcast_convert_type(x, jnp.int32) & mask
    return lax.bitcast_convert_type(bits, jnp.float32)
