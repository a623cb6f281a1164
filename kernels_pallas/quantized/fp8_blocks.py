"""Products of tokens with weights, both in fp8 with scales of blocks, on Hopper (Mosaic GPU).

`fp8_tiles` sums up tiles of 128 tokens and 128 or 256 outputs, which this writes in any dtype. Of
tokens that are pairs (`fp8_bands`) a tile has half as many, whose two rows are added up.
"""

import functools
from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from jaxrunner.kernels_pallas import mosaic
from jaxrunner.kernels_pallas.mosaic import Ref
from jaxrunner.kernels_pallas.products.matmul import COMPILER, ROWS
from jaxrunner.kernels_pallas.quantized import fp8_bands, fp8_tiles
from jaxrunner.kernels_pallas.quantized.fp8_tiles import (
    DEFAULT,
    GROUPS,
    HEIGHT,
    TERMS,
    TILE,
    Held,
    Item,
    Tiles,
    TuningConfig,
)
from jaxrunner.kernels_pallas.registers import OWN_REGISTERS
from jaxrunner.types import Array

MAX_PARTS = 8
# By the tiles that a block has at once: how long they take, as an H200 with 8,192 tokens says.
PACE = {1: 1.0, 2: 1.7} if OWN_REGISTERS else {1: 1.0}


def fp8_blocks(
    x: Array, x_scale: Array, weight: Array, scale: Array, *, dtype: Any = jnp.bfloat16,
    pairs: bool = False, config: TuningConfig = DEFAULT, interpret: Any = None,
) -> Array:  # fmt: skip
    """Returns x, [T, E], times weight, [F, E], both in float8_e4m3fn: [T, F] in `dtype`.

    With several parts, which are to be added up: [parts, T, F].
    x_scale: [E / 128, T or more], float32, of each token, as `fp8_rounding` and `fp8_gates` return
    it; scale: [F / run, E / 128], float32, of runs of outputs. pairs: whether rows of x are those
    of pairs, of T / 2 tokens, which is what comes then. interpret: parameters of Pallas'
    interpreter; None on a GPU.

    Raises:
      ValueError: what `fp8_tiles.refuses` says, or `config.parts` do not divide the sums, or
        `config.halves` the outputs.
    """
    c, (T, E), F = config, x.shape, weight.shape[0]
    if why := fp8_tiles.refuses(x, x_scale, weight, scale):
        raise ValueError(f"fp8_blocks {why}")
    if E % (TERMS * c.parts):
        raise ValueError(f"fp8_blocks wants parts that divide {E // TERMS} steps, got {c.parts}")
    size, tokens = jnp.dtype(dtype).itemsize, T // 2 if pairs else T
    halves = c.halves or num_halves(T, F, c)
    if halves not in (1, 2) or F % (halves * TILE):
        want = f"halves=1, or 2 where they divide {F // TILE} tiles, or 0"
        raise ValueError(f"fp8_blocks wants {want}, got {halves}")
    width = TILE // halves  # columns that are written at once: what they take, stages have not
    s = fp8_tiles.fit(T, E, F // halves, F // scale.shape[0], width * size, c, halves)
    return plgpu.kernel(
        functools.partial(_kernel, s, pairs, interpret is None),
        out_type=jax.ShapeDtypeStruct((tokens, F) if c.parts == 1 else (c.parts, tokens, F), dtype),
        scratch_types=fp8_tiles.scratch(s) | dict(
            out_smem=plgpu.SMEM(
                (GROUPS, _height(pairs), width), dtype, transforms=mosaic.tiled(128 // size, size)
            )
        ),
        **fp8_tiles.grid(s),
        kernel_name="fp8_blocks_of_pairs" if pairs else "fp8_blocks", compiler_params=COMPILER,
        interpret=interpret,
    )(x, x_scale, weight, fp8_tiles.padded(scale))  # fmt: skip


def num_parts(T: int, E: int, F: int, num_ctas: int = TuningConfig.num_ctas) -> int:
    """Returns into how many parts sums are best cut: those that leave least idle, of equals few."""
    steps, tiles = E // TERMS, -(-T // HEIGHT) * (F // TILE)
    parts = [n for n in range(1, MAX_PARTS + 1) if steps % n == 0 and (n == 1 or T <= 2 * HEIGHT)]
    return min(parts, key=lambda n: -(-tiles * n // num_ctas) / n)


def num_halves(T: int, F: int, config: TuningConfig) -> int:
    """Returns how many tiles a block has at once: those that are done first, of equals few.

    Sums in parts are of few tokens.
    """

    def time(halves: int) -> float:
        tiles = -(-T // HEIGHT) * (F // (halves * TILE))
        return -(-tiles // config.num_ctas) * PACE[halves]

    served = [halves for halves in PACE if F % (halves * TILE) == 0]
    return min(served, key=time) if config.parts == 1 else 1


def _height(pairs: bool) -> int:
    """Returns the tokens of a warpgroup."""
    return ROWS // 2 if pairs else ROWS


def _kernel(
    s: Tiles, pairs: bool, is_device: bool, x: Ref, x_scale: Ref, w: Ref, scale: Ref, out: Ref, *,
    out_smem: Ref, **smem: Any,
) -> None:  # fmt: skip
    def leave(wg: Array, at: Item, totals: list[Array]) -> None:
        place = out_smem.at[wg]
        height, width = place.shape
        target = out if s.parts == 1 else out.at[at.part]
        rows = pl.ds((at.tokens * GROUPS + wg) * height, height)
        for half, total in enumerate(totals):
            if pairs:
                total = fp8_bands.fold(total, is_device=is_device)
            for first in range(0, TILE, width):
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                place[...] = total[:, first : first + width].astype(out.dtype)
                plgpu.commit_smem()
                columns = pl.ds(s.place(at, half) * TILE + first, width)
                mosaic.copy_smem_to_gmem(place, target.at[rows, columns])

    fp8_tiles.run(s, is_device, x, x_scale, w, scale, Held(**smem), leave)
