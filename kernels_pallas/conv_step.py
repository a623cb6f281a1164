"""Causal convolutions of one new token a row, over the inputs that its request keeps, on Hopper.

A thread has a few channels of a row: it reads their last inputs, sums them up with the new one, and
moves them on by one in their place.
"""

from dataclasses import dataclass
import functools
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

from jaxrunner.kernels_pallas import lanes, mosaic, pdl
from jaxrunner.kernels_pallas.mosaic import TOO_OLD, Ref, Shaped
from jaxrunner.kernels_pallas.stores import put
from jaxrunner.types import Array

THREADS = 128
DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)


@dataclass(frozen=True)
class TuningConfig:
    """How channels are cut."""

    channels: int = 2  # of a thread at most; fewer where there are few blocks
    blocks: int = 264  # two a multiprocessor of an H200


def refuses(conv: Shaped, x: Shaped, weight: Shaped, bias: Shaped | None) -> str | None:
    """Returns why these shapes and dtypes are not served, None if they are."""
    if TOO_OLD is not None:
        return TOO_OLD
    (_, taps, C), T = conv.shape, x.shape[0]
    if conv.dtype not in DTYPES or x.dtype != conv.dtype:
        return f"wants inputs and what is kept of them in one dtype, got {x.dtype}, {conv.dtype}"
    if C % THREADS:
        return f"wants channels of a multiple of {THREADS}, got {C}"
    shapes = dict(x=(T, C), weight=(C, taps + 1), bias=(C,))
    for (name, shape), given in zip(shapes.items(), (x, weight, bias), strict=True):
        if given is not None and given.shape != shape:
            return f"wants {name} of {list(shape)}, got {list(given.shape)}"
    return None


def conv_step(
    conv: Array, x: Array, weight: Array, bias: Array | None, source: Array, place: Array, *,
    config: TuningConfig = TuningConfig(), interpret: Any = None,
) -> tuple[Array, Array]:  # fmt: skip
    """Returns what is kept once each row has taken in a token, and the sums, [B, C], of x's dtype.

    conv: [N, taps, C], inputs that are kept, the oldest first, written in place where the caller
    donates them; x: [B, C], the new ones; weight: [C, taps + 1], that of the new one last; bias:
    [C]. source and place: [B], int32, where a row's inputs are and where they go; N for zeros, and
    for rows that leave nothing. Sums are float32.

    Raises:
      ValueError: what `refuses` says.
    """
    if why := refuses(conv, x, weight, bias):
        raise ValueError(f"conv_step {why}")
    B, C = x.shape
    held = jax.new_ref(conv)
    vec = _channels(B, C, config)
    biases = () if bias is None else (bias,)
    y = plgpu.kernel(
        functools.partial(_kernel, vec=vec, is_device=interpret is None),
        out_type=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=(C // (THREADS * vec), B),
        grid_names=("part", "row"),
        kernel_name="conv_step",
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
        interpret=interpret,
    )(held, x, weight.reshape(-1), source, place, *biases)
    return jax.freeze(held), y


def _channels(B: int, C: int, config: TuningConfig) -> int:
    """Returns the channels of a thread: many, as far as that leaves enough blocks."""
    fit = [v for v in (1, 2, 4, 8) if v <= config.channels and C % (THREADS * v) == 0]
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
    is_device: bool,
) -> None:  # fmt: skip
    if is_device:  # an interpreter of kernels knows no launches
        pdl.begin()
    *bias, y = refs
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
    inputs = [*old, load(x.at[row, mine])]
    read = _tap if is_device else _any_tap
    terms = [
        one.astype(jnp.float32) * read(weight, first, t, taps + 1, vec).astype(jnp.float32)
        for t, one in enumerate(inputs)
    ]
    total = functools.reduce(jnp.add, terms)
    for ref in bias:
        total = total + load(ref.at[mine]).astype(jnp.float32)
    put(y.at[row, mine], total.astype(y.dtype))

    @pl.when(place < N)
    def _() -> None:
        for t, one in enumerate(inputs[1:]):
            put(conv.at[place, t, mine], one)
