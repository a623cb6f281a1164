"""The units of a gated MLP of prompts from its base products and adapters, on Hopper (Mosaic GPU).

What adapters add to gates and to what they gate meets the base products in registers, on the way
to SwiGLU, so that no sum is written. A block of the grid keeps the adapters' second matrices of
some units in shared memory. Its warpgroups take 64 tokens after the other: the base products of
the next ones are on their way, and the units leave from where the gates were. Of 64 tokens those
adapters alone are multiplied whose places lie between the first and the last that they have: of
one prompt one.
"""

from dataclasses import dataclass
import functools
import itertools
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from jaxrunner.kernels_pallas import mosaic
from jaxrunner.kernels_pallas.lora.lora_rows import (
    LAYOUT,
    ROWS,
    own,
    refuses_gates,
    refuses_places,
    take_places,
    take_rows,
)
from jaxrunner.kernels_pallas.mosaic import TOO_OLD, Barrier, Index, Ref, Shaped
from jaxrunner.kernels_pallas.products.gated_mlp import SMEM_BYTES
from jaxrunner.kernels_pallas.products.matmul import COMPILER, gated
from jaxrunner.types import Array

TILE = 64  # units of a block: 128 bytes, the widest swizzle
RANKS = 16  # of a step of the second product
MAX_RANK = 64  # that registers hold beside the sums


@dataclass(frozen=True)
class TuningConfig:
    """Sizes that change speed alone."""

    groups: int = 4  # warpgroups of a block, where registers and shared memory have room for them
    stages: int = 2  # base products of a warpgroup in shared memory
    turns: int = 8  # that a warpgroup takes 64 tokens, at most

    def fit(self, places: int, rank: int) -> "TuningConfig":
        """Returns the sizes for adapters of a rank, with 0 groups where they do not fit."""
        left = SMEM_BYTES - 4 * places * rank * TILE
        room = max(0, left) // (4 * ROWS * TILE * self.stages)
        most = 4 if rank <= 32 else 3  # warpgroups whose registers hold the ranks
        return TuningConfig(min(self.groups, room, most), self.stages, self.turns)


class _Static(NamedTuple):
    """The compile-time parameters of the kernel."""

    blocks: int  # of 64 tokens
    places: int
    rank: int  # of a place
    groups: int
    stages: int
    turns: int


def refuses(
    y: Shaped, b: Shaped, place: Shaped, config: TuningConfig = TuningConfig()
) -> str | None:
    """Says why y, [T, 2, F], b, [2, places, rank, F], and place, [T], are not served, or None."""
    T, (_, places, rank, F) = y.shape[0], b.shape
    if TOO_OLD is not None:
        return TOO_OLD
    if b.dtype not in (jnp.bfloat16, jnp.float16):
        return f"wants adapters in bfloat16 or float16, got {b.dtype}"
    if T % ROWS:
        return f"wants tokens in blocks of {ROWS}, got {T}"
    if reason := refuses_gates(y, b) or refuses_places(T, place):
        return reason
    if rank % RANKS or rank > MAX_RANK:
        return f"wants ranks in multiples of {RANKS}, at most {MAX_RANK}, got {rank}"
    if F % TILE:
        return f"wants units in tiles of {TILE}, got {F}"
    if not config.fit(places, rank).groups:
        return f"wants ranks of all places that shared memory holds, got {places * rank}"
    return None


def _refuses_low(low: Shaped, b: Shaped, place: Shaped) -> str | None:
    wanted = place.shape[0], 2 * b.shape[2]
    if low.shape != wanted or low.dtype != b.dtype:
        return f"wants ranks, {list(wanted)}, in {b.dtype}, got {low.shape} in {low.dtype}"
    return None


def prefill_units(
    y: Array, low: Array, b: Array, place: Array, config: TuningConfig = TuningConfig()
) -> Array:
    """Returns the units of a gated MLP, [T, F], of its base products, [T, 2, F], and adapters.

    low: a x of each token's own adapter, [T, 2 * rank], in the dtype of b; b: [2, places, rank, F];
    place: [T], int32, of a token's adapter, plus one, 0 for none. Sums are of float32, and nothing
    is rounded before the units are. arXiv:2002.05202.

    Raises:
      ValueError: what `refuses` says.
    """
    if why := refuses(y, b, place, config) or _refuses_low(low, b, place):
        raise ValueError(f"prefill_units {why}")
    (T, _, F), (_, places, rank, _) = y.shape, b.shape
    blocks, fit = T // ROWS, config.fit(places, rank)
    s = _Static(blocks, places, rank, fit.groups, fit.stages, fit.turns)
    slots, grid = s.groups * s.stages, (F // TILE, -(-blocks // (s.groups * s.turns)))
    of_blocks = place.reshape(blocks, ROWS)
    span = jnp.stack([jnp.maximum(of_blocks.min(1), 1), of_blocks.max(1) + 1])
    by_ranks, by_units = mosaic.tiled(RANKS, 2), mosaic.tiled(TILE, 2)
    return plgpu.kernel(
        functools.partial(_kernel, s),
        out_type=jax.ShapeDtypeStruct((T, F), y.dtype),
        scratch_types=dict(
            b_smem=plgpu.SMEM((2, places, rank, TILE), b.dtype, transforms=by_ranks),
            y_smem=plgpu.SMEM((slots, 2, ROWS, TILE), y.dtype, transforms=by_units),
            adapters=plgpu.Barrier(num_arrivals=2 * places),
            full=plgpu.Barrier(num_arrivals=2, num_barriers=slots),
        ),
        grid=grid, grid_names=("tile", "chunk"), num_threads=s.groups, thread_name="wg",
        kernel_name="prefill_units", compiler_params=COMPILER,
    )(y, low, b, place, span)  # fmt: skip


def _kernel(
    s: _Static, y: Ref, low: Ref, b: Ref, place: Ref, span: Ref, out: Ref,
    *, b_smem: Ref, y_smem: Ref, adapters: Barrier, full: Barrier,
) -> None:  # fmt: skip
    tile, chunk, wg = (lax.axis_index(name) for name in ("tile", "chunk", "wg"))
    columns, first = pl.ds(tile * TILE, TILE), chunk * s.turns * s.groups + wg
    turns = jnp.clip(lax.div(s.blocks - first + s.groups - 1, s.groups), 0, s.turns)

    def rows(turn: Index) -> Any:
        return pl.ds((first + turn * s.groups) * ROWS, ROWS)

    def slot(turn: Index) -> Array:
        return wg * s.stages + lax.rem(turn, s.stages)

    def fetch(turn: Index) -> None:
        for half in range(2):
            source, target = y.at[rows(turn), half, columns], y_smem.at[slot(turn), half]
            mosaic.copy_gmem_to_smem(source, target, full.at[slot(turn)])

    @pl.when(wg == 0)
    def _() -> None:
        for half, p in itertools.product(range(2), range(s.places)):
            mosaic.copy_gmem_to_smem(b.at[half, p, :, columns], b_smem.at[half, p], adapters)

    plgpu.griddepcontrol_wait()
    plgpu.griddepcontrol_launch_dependents()
    for turn in range(s.stages):
        pl.when(turn < turns)(functools.partial(fetch, jnp.int32(turn)))
    mosaic.barrier_wait(adapters)

    def one(turn: Array, _: None) -> None:
        block, here = first + turn * s.groups, y_smem.at[slot(turn)]
        more = _second(s, low.at[rows(turn)], b_smem, place.at[rows(turn)], span.at[:, block])
        mosaic.barrier_wait(full.at[slot(turn)])
        gate, up = (
            mosaic.load(here.at[half], layout=LAYOUT).astype(jnp.float32) + more[half]
            for half in range(2)
        )
        here[0] = gated(gate, up, "silu").astype(out.dtype)
        plgpu.commit_smem()
        mosaic.copy_smem_to_gmem(here.at[0], out.at[rows(turn), columns])

        @pl.when(turn + s.stages < turns)
        def _() -> None:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            fetch(turn + s.stages)

        return _

    lax.fori_loop(0, turns, one, None)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _second(s: _Static, low: Ref, b_smem: Ref, place: Ref, span: Ref) -> tuple[Array, Array]:
    """Returns what adapters add to the two products of 64 tokens, [64, tile] each.

    span: the first place that one of them has, plus one, and the one behind the last.
    """
    places = take_places(place, RANKS)
    starts = range(0, s.rank, RANKS)
    ours = [
        [take_rows(low.at[:, pl.ds(half * s.rank + n, RANKS)]) for n in starts] for half in range(2)
    ]

    def multiply(gate: Ref, up: Ref) -> tuple[Array, Array]:
        def add(p: Array, _: None) -> None:
            for half, acc in enumerate((gate, up)):
                for some, n in zip(ours[half], starts, strict=True):
                    matrix = b_smem.at[half, p - 1, pl.ds(n, RANKS)]
                    mosaic.wgmma(acc, own(places, p, some), matrix)
            plgpu.wgmma_wait(0)
            return _

        lax.fori_loop(span[0], span[1], add, None)
        return gate[...], up[...]

    acc = mosaic.ACC((ROWS, TILE), jnp.float32)
    return pl.run_scoped(multiply, acc, mosaic.ACC((ROWS, TILE), jnp.float32))
