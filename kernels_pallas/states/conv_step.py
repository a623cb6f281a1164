"""Causal convolutions of one new token a row, over the inputs that its request keeps, on Hopper.

A thread has a few channels of a row: it reads their last inputs, sums them up with the new one, and
moves them on by one in their place. Where `ConvParts` are asked for, sums go through SiLU, each
part to an array of its own; a warp has the whole of a vector that is scaled to a norm.
"""

from dataclasses import dataclass
import functools
import math
from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, memref, vector
import numpy as np

from jaxrunner.caches.state import ConvParts
from jaxrunner.kernels_pallas import lanes, mosaic, pdl
from jaxrunner.kernels_pallas.mosaic import TOO_OLD, Ref, Shaped
from jaxrunner.kernels_pallas.states import conv_parts
from jaxrunner.kernels_pallas.states.conv_parts import THREADS, WARP
from jaxrunner.kernels_pallas.stores import put
from jaxrunner.types import Array

DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)
EPS = 1e-6  # of the squares of a vector that is scaled to a norm


@dataclass(frozen=True)
class TuningConfig:
    """How channels are cut."""

    channels: int = 2  # of a thread at most; fewer where there are few blocks
    blocks: int = 264  # two a multiprocessor of an H200


def refuses(
    conv: Shaped, x: Shaped, weight: Shaped, bias: Shaped | None, parts: ConvParts | None = None
) -> str | None:
    """Returns why these shapes and dtypes are not served, None if they are."""
    if TOO_OLD is not None:
        return TOO_OLD
    (_, taps, C), T = conv.shape, x.shape[0]
    if conv.dtype not in DTYPES or x.dtype != conv.dtype:
        return f"wants inputs and what is kept of them in one dtype, got {x.dtype}, {conv.dtype}"
    if C % THREADS:
        return f"wants channels of a multiple of {THREADS}, got {C}"
    shapes = dict(x=(T, C), weight=(C, taps + 1), bias=(C,))
    if parts is not None:
        if x.ndim != 3:
            return f"wants x of [{T}, groups, numbers], got {list(x.shape)}"
        (G, wide), num = x.shape[1:], parts.channels
        if parts.start + num > wide or C != G * num:
            return f"wants parts that are {C} channels of {[G, wide]} numbers, got {parts}"
        shapes = dict(x=x.shape, weight=(G, num, taps + 1), bias=(G, num))
        if not _channels(T, C, TuningConfig(), parts):
            return f"wants parts of whole warps, and vectors of one size, got {parts}"
    for (name, shape), given in zip(shapes.items(), (x, weight, bias), strict=True):
        if given is not None and given.shape != shape:
            return f"wants {name} of {list(shape)}, got {list(given.shape)}"
    return None


def conv_step(
    conv: Array, x: Array, weight: Array, bias: Array | None, source: Array, place: Array, *,
    parts: ConvParts | None = None, config: TuningConfig = TuningConfig(), interpret: Any = None,
) -> tuple[Array, Any]:  # fmt: skip
    """Returns what is kept once each row has taken in a token, and the sums, [B, C], of x's dtype.

    conv: [N, taps, C], inputs that are kept, the oldest first, written in place where the caller
    donates them; x: [B, C], the new ones; weight: [C, taps + 1], that of the new one last; bias:
    [C]. source and place: [B], int32, where a row's inputs are and where they go; N for zeros, and
    for rows that leave nothing. Sums are float32.
    With `parts` x is [B, G, M], weight [G, C / G, taps + 1] and bias [G, C / G]. The sums, rounded
    to x's dtype, then go through SiLU, and are returned as parts, [B, G, n] each, in float32.

    Raises:
      ValueError: what `refuses` says.
    """
    if why := refuses(conv, x, weight, bias, parts):
        raise ValueError(f"conv_step {why}")
    B, C, held = x.shape[0], conv.shape[2], jax.new_ref(conv)
    vec = _channels(B, C, config, parts)
    biases = () if bias is None else (bias.reshape(-1),)
    out = jax.ShapeDtypeStruct(x.shape, x.dtype)
    wide, groups = x.shape[-1], 1 if parts is None else x.shape[1]
    if parts is not None:
        out = tuple(jax.ShapeDtypeStruct((B, groups * n), jnp.float32) for n in parts.sizes)
    y = plgpu.kernel(
        functools.partial(_kernel, vec=vec, parts=parts, wide=wide, is_device=interpret is None),
        out_type=out,
        grid=(C // (THREADS * vec), B),
        grid_names=("part", "row"),
        kernel_name="conv_step",
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
        interpret=interpret,
    )(held, x.reshape(B, -1), weight.reshape(-1), source, place, *biases)
    if parts is not None:
        y = tuple(part.reshape(B, groups, -1) for part in y)
    return jax.freeze(held), y


def _channels(B: int, C: int, config: TuningConfig, parts: ConvParts | None = None) -> int:
    """Returns the channels of a thread: many, as far as that leaves enough blocks.

    Of vectors that are scaled a warp has one each. 0 where they, or parts, do not fit.
    """
    fit = [v for v in (1, 2, 4, 8) if C % (THREADS * v) == 0]
    if parts is not None:
        sizes = {num for _, num, norm in parts.spans if norm}
        unit = math.gcd(*parts.sizes)
        fit = [v for v in fit if unit % v == 0]
        if sizes:
            return max(
                (v for v in fit if sizes == {WARP * v} and unit % (WARP * v) == 0), default=0
            )
    fit = [v for v in fit if v <= config.channels]
    return max(v for v in fit if v == 1 or B * C // (THREADS * v) >= config.blocks)


def _tap(weight: Ref, first: Array, tap: int, num: int, vec: int) -> Array:
    """Reads one weight of each channel of this block: the numbers of a channel lie side by side."""
    layout = plgpu.Layout.WG_STRIDED((THREADS * vec,), vec_size=vec)

    @mosaic.inline_mgpu(
        arg_types=(plgpu.RefType(), plgpu.Layout.WG_SPLAT(())),
        return_type=plgpu.ShapeDtypeStruct((THREADS * vec,), weight.dtype, layout=layout),
    )
    def load(_: Any, weight: ir.Value, first: mgpu.FragmentedArray) -> mgpu.FragmentedArray:
        index, i32 = ir.IndexType.get(), ir.IntegerType.get_signless(32)
        channel = arith.muli(lanes.thread(), mgpu.c(vec, i32))
        channel = arith.addi(first.registers.item(), channel)
        start = arith.index_cast(index, arith.muli(channel, mgpu.c(num, i32)))
        places = [arith.addi(start, mgpu.c(i * num + tap, index)) for i in range(vec)]
        numbers = [memref.load(weight, [place]) for place in places]
        both = vector.from_elements(ir.VectorType.get((vec,), numbers[0].type), numbers)
        return mgpu.FragmentedArray(
            _registers=np.array([both], object),
            _layout=mgpu.WGStridedFragLayout((THREADS * vec,), vec),
            _is_signed=None,
        )

    return load(weight, first)


def _any_tap(weight: Ref, first: Array, tap: int, num: int, vec: int) -> Array:
    """As `_tap`, for an interpreter of kernels."""
    return weight[pl.ds(first * num, THREADS * vec * num)].reshape(-1, num)[:, tap]


def _kernel(
    conv: Ref, x: Ref, weight: Ref, source_ref: Ref, place_ref: Ref, *refs: Ref, vec: int,
    parts: ConvParts | None, wide: int, is_device: bool,
) -> None:  # fmt: skip
    pdl.begin(is_device)
    num = 1 if parts is None else len(parts.sizes)
    bias, made = refs[:-num], refs[-num:]
    N, taps = conv.shape[:2]
    row = lax.axis_index("row")
    source, place = source_ref[row], place_ref[row]
    first = lax.axis_index("part") * THREADS * vec
    mine = pl.ds(first, THREADS * vec)
    layout = plgpu.Layout.WG_STRIDED((THREADS * vec,), vec_size=vec)

    def load(ref: Ref) -> Array:
        return mosaic.load(ref, layout=layout, optimized=False)

    def zeros() -> list[Array]:
        zero = plgpu.layout_cast(jnp.zeros((THREADS * vec,), conv.dtype), layout)
        return [zero] * taps

    # Whoever had the block of a new row before is not read.
    old = lax.cond(source < N, lambda: [load(conv.at[source, t, mine]) for t in range(taps)], zeros)
    if parts is None:
        new = load(x.at[row, mine])
    else:
        take = conv_parts.take if is_device else conv_parts.any_take
        new = take(x.at[row], first, vec, (parts.channels, wide, parts.start))
    inputs = [*old, new]
    read = _tap if is_device else _any_tap
    terms = [
        one.astype(jnp.float32) * read(weight, first, t, taps + 1, vec).astype(jnp.float32)
        for t, one in enumerate(inputs)
    ]
    total = functools.reduce(jnp.add, terms)
    for ref in bias:
        total = total + load(ref.at[mine]).astype(jnp.float32)
    total = total.astype(x.dtype)
    if parts is None:
        put(made[0].at[row, mine], total)
    else:
        _put_parts(total.astype(jnp.float32), first, vec, parts, row, made, is_device)

    @pl.when(place < N)
    def _() -> None:
        for t, one in enumerate(inputs[1:]):
            put(conv.at[place, t, mine], one)


def _put_parts(
    x: Array, first: Array, vec: int, parts: ConvParts, row: Array, made: tuple[Ref, ...],
    is_device: bool,
) -> None:  # fmt: skip
    """Writes what SiLU makes of a block's sums to the arrays of their parts."""
    x = x / (1 + jnp.exp(-x))
    scale: Any = None
    if any(parts.l2_norms):
        squares = conv_parts.sum_of_warp if is_device else conv_parts.any_sum_of_warp
        scale = lax.rsqrt(squares(x * x, vec) + EPS)
    write = conv_parts.put if is_device else conv_parts.any_put
    for ref, (start, num, norm) in zip(made, parts.spans, strict=True):
        value = x * (scale * norm) if norm else x
        write(value, ref.at[row], first, vec, (parts.channels, num, start))
