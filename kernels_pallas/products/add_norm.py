"""A residual addition and the RMSNorm of its result in one kernel: each row is read once.

A thread block serves one row, held in registers between the sum of squares and the scaling. Each
warp sums up a part of the row, and the warps add their sums up in shared memory. (Mosaic's own
reduction over warps has one scratch for all warpgroups: several at once would race.) A norm's
weights are read before the kernel before has ended, which must not be what makes them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial, reduce
import math
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxrunner.kernels_pallas import mosaic, pdl
from jaxrunner.kernels_pallas.mosaic import Barrier, Index, Layout, Ref, Shaped
from jaxrunner.kernels_pallas.stores import put, put_for_words
from jaxrunner.types import Array

LANES, WARPS = 32, 4  # of a warpgroup, the thread of Mosaic
MAX_LEN = 16384  # of a row
MAX_GROUPS = 8  # warpgroups of a thread block
MAX_RANK = 16  # of adapters: each row reads its own
MAX_WIDTH = 4096  # numbers of a row that fit a warpgroup's registers


@dataclass(frozen=True)
class TuningConfig:
    """How a row is cut."""

    width: int = 2048  # numbers a warpgroup holds at most: 16 a thread


class LowRank(NamedTuple):
    """A product b (a x) of each row's own adapter."""

    low: Array  # [parts, T, rank], float32: parts of a x; anything in rows without adapter
    b: Array  # [places, rank, E]
    place: Array  # [T], int32, of a row's adapter, plus one; 0 for none


def refuses(
    x: Shaped, residual: Shaped, weight: Shaped, more: LowRank | None = None,
    end: Shaped | None = None, *, config: TuningConfig = TuningConfig(),
) -> str | None:  # fmt: skip
    """Returns why these shapes and dtypes are not served, None if they are."""
    if x.ndim != 2 or x.shape != residual.shape[-2:]:
        return f"x and residual must be [T, E] alike, got {x.shape} and {residual.shape}"
    T, E = x.shape
    if x.dtype not in (jnp.bfloat16, jnp.float16):
        return f"x must be bfloat16 or float16, got {x.dtype}"
    if weight.dtype != x.dtype:
        return f"weight must be {x.dtype}, got {weight.dtype}"
    served = (x.dtype,) if residual.ndim == 2 else (jnp.dtype(jnp.float32), x.dtype)
    if residual.dtype not in served:
        wanted = " or ".join(map(str, served))
        return f"residual {list(residual.shape)} must be {wanted}, got {residual.dtype}"
    if weight.shape != (E,):
        return f"weight must be [{E}], got {list(weight.shape)}"
    if end is not None and (end.shape != (E,) or end.dtype != x.dtype):
        return f"end must be {x.dtype} [{E}], got {end.dtype} {list(end.shape)}"
    if T < 1:
        return "at least 1 row is needed, got 0"
    if end is not None and not residual.shape[0]:
        return "residual must be in parts where it is normed, got none"
    if E % 64 or not 64 <= E <= MAX_LEN:
        return f"rows must be a multiple of 64 long, at most {MAX_LEN}, got {E}"
    if config.width > MAX_WIDTH:
        return f"width must be at most {MAX_WIDTH}, got {config.width}"
    if not groups_of(E, config.width):
        return f"rows of {E} cannot be cut into 1 to {MAX_GROUPS} of at most {config.width}"
    if more is None:
        return None
    _, rank, _ = more.b.shape
    if more.b.dtype != x.dtype or more.b.shape[-1] != E or rank > MAX_RANK:
        return f"adapters must be {x.dtype} [places, rank <= {MAX_RANK}, {E}], got {more.b}"
    if more.low.shape[1:] != (T, rank) or more.place.shape != (T,):
        return f"[{T}, {rank}] of {T} rows must be known, got {more.low.shape}, {more.place.shape}"
    if residual.ndim == 2:
        return "residuals must be in parts where adapters add to them"
    if end is not None:
        return "residuals that adapters add to are not normed"
    return None


def add_rms_norm(
    x: Array, residual: Array, weight: Array, more: LowRank | None = None,
    end: Array | None = None, *, eps: float, one_more: bool = False, for_words: bool = False,
    config: TuningConfig = TuningConfig(),
) -> tuple[Array, Array]:  # fmt: skip
    """Returns x + residual, [T, E], and the RMSNorm of that sum, [T, E]. arXiv:1910.07467.

    residual may be parts, [parts, T, E] in float32 or x's dtype, summed in float32; of no parts x
    alone is normed. The sum is rounded to the dtype of x before it is normed, in float32; the
    normed row is rounded before it is multiplied by weight, [E], or with `one_more` multiplied by
    1 + weight in float32. more: what adapters add to the sum, in float32. end: [E], weight of an
    RMSNorm of the residual, rounded to the dtype of x before and behind it; then its sum with x is.
    for_words: whether norms come in the order of `widen_tile.in_order`.

    Raises:
      ValueError: what `refuses` says, or `refuses_words`.
    """
    why = refuses(x, residual, weight, more, end, config=config)
    if why := why or (refuses_words(x, config) if for_words else None):
        raise ValueError(why)
    T, E = x.shape
    cut = cut_rows(E, config.width)
    how: Any = dict(eps=eps, one_more=one_more, has_end=end is not None, for_words=for_words)
    body = partial(_kernel, **how)
    run = kernel(body, T, cut, x.dtype, 1 if end is None else 2, name="add_rms_norm")
    total, out = run(
        x.reshape(T, *cut), in_parts(residual, cut), weight.reshape(cut),
        *(() if end is None else (end.reshape(cut),)),
        *(() if more is None else (more.low, more.b.reshape(*more.b.shape[:2], *cut), more.place)),
    )  # fmt: skip
    return total.reshape(T, E), out.reshape(T, E)


def refuses_words(x: Shaped, config: TuningConfig = TuningConfig()) -> str | None:
    """Says why norms of x, [T, E], do not come in the order of `widen_tile.in_order`, or None."""
    E = x.shape[1]
    _, num = cut_of(E // groups_of(E, config.width))
    return None if num == 8 else f"wants 8 neighbours of a row in a thread, got {num} of {E}"


def cut_rows(E: int, width: int = TuningConfig.width) -> tuple[int, int, int]:
    """Returns the shape of a row of E: warpgroups, warps of each, and numbers of a warp."""
    groups = groups_of(E, width)
    warps, _ = cut_of(E // groups)
    return groups, warps, E // (groups * warps)


def in_parts(residual: Array, cut: tuple[int, int, int]) -> Array:
    """Returns a residual, [T, E] or parts of it, as parts of rows that are `cut`."""
    parts = residual[None] if residual.ndim == 2 else residual
    return parts.reshape(*parts.shape[:2], *cut)


def kernel(
    body: Callable[..., None], T: int, cut: tuple[int, int, int], dtype: DTypeLike,
    num_norms: int = 1, *, blocks: int | None = None, name: str,
) -> Callable[..., tuple[Array, Array]]:  # fmt: skip
    """Returns a kernel of a block a row, which makes two arrays, [T, *cut]: a sum and its norm.

    body: gets both behind its inputs, then the sums and the barriers of `normed`, for each norm.
    blocks: fewer than rows, each of which serves several.
    """
    row, (groups, warps, _) = jax.ShapeDtypeStruct((T, *cut), dtype), cut
    more = pdl.spread(T) if blocks is None else {}  # blocks that wait for others keep all room
    return plgpu.kernel(
        body,
        out_type=(row, row),
        scratch_types=(
            plgpu.SMEM((num_norms, groups, warps), jnp.float32),
            plgpu.Barrier(num_arrivals=groups, num_barriers=num_norms),
        ),
        grid=(blocks or T,),
        grid_names=("row",),
        num_threads=groups,
        thread_name="group",
        kernel_name=name,
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True, **more),
    )


def normed(
    x: Array, weight: Array, group: Array, part_smem: Ref, barriers: Barrier, nth: Index = 0, *,
    eps: float, one_more: bool,
) -> Array:  # fmt: skip
    """Returns the norm of a warpgroup's part of a row, [warps, width]; a block's nth norm."""
    _, groups, warps = part_smem.shape
    E, x = groups * math.prod(x.shape), x.astype(jnp.float32)
    part_smem[nth, group] = (x * x).sum(-1)
    # All threads arrive, so that all parts are seen once all are through.
    mosaic.barrier_arrive(barriers.at[nth])
    mosaic.barrier_wait(barriers.at[nth])
    square = sum(part_smem[nth, g, w] for g in range(groups) for w in range(warps))
    gain = lax.rsqrt(square / E + eps)
    if one_more:
        return (x * gain * (1 + weight.astype(jnp.float32))).astype(weight.dtype)
    return (x * gain).astype(weight.dtype) * weight


def _kernel(
    x_ref: Ref, residual_ref: Ref, weight_ref: Ref, *refs: Any, eps: float, one_more: bool,
    has_end: bool, for_words: bool,
) -> None:  # fmt: skip
    *rest, total_ref, out_ref, part_smem, barriers = refs
    _, _, warps, width = x_ref.shape
    row, group = lax.axis_index("row"), lax.axis_index("group")
    load = partial(mosaic.load, layout=layout_of(warps * width), optimized=False)
    norm = partial(
        normed, group=group, part_smem=part_smem, barriers=barriers, eps=eps, one_more=one_more
    )
    weights = [load(ref.at[group]) for ref in (weight_ref, *(rest if has_end else ()))]
    pdl.begin()
    x = load(x_ref.at[row, group])
    residual = [load(residual_ref.at[part, row, group]) for part in range(residual_ref.shape[0])]
    if has_end:
        whole = reduce(jnp.add, (part.astype(jnp.float32) for part in residual))
        x += norm(whole.astype(x.dtype), weights[1], nth=1)
    else:
        x = added(x, residual, _added(row, group, load, *rest) if rest else None)
    put(total_ref.at[row, group], x)
    write = partial(put_for_words, layout_of(warps * width)) if for_words else put
    write(out_ref.at[row, group], norm(x, weights[0]))


def read_sum(
    x: Ref, residual: Ref, row: Array, group: Array, load: Callable[[Ref], Array]
) -> Array:
    """Reads a warpgroup's part of a row of x, and of a residual or its parts; returns their sum."""
    mine = load(x.at[row, group])
    return added(mine, [load(residual.at[part, row, group]) for part in range(residual.shape[0])])


def added(x: Array, residual: Sequence[Array], more: Array | None = None) -> Array:
    """Returns x with a residual, or parts of it, and more; of parts in float32, then rounded."""
    if len(residual) == 1 and residual[0].dtype != jnp.float32:
        return x + residual[0]
    total = sum((part.astype(jnp.float32) for part in residual), x.astype(jnp.float32))
    return (total if more is None else total + more).astype(x.dtype)


def _added(
    row: Array, group: Array, load: Callable[[Ref], Array], low_ref: Ref, b_ref: Ref, place_ref: Ref
) -> Array:
    """Returns what a row's adapter adds to a warpgroup's part of it."""
    place = place_ref[row]
    values = [
        sum(low_ref[part, row, r] for part in range(low_ref.shape[0]))
        for r in range(low_ref.shape[2])
    ]
    p = jnp.maximum(place - 1, 0)
    terms = (
        jnp.where(place > 0, value, 0.0) * load(b_ref.at[p, r, group]).astype(jnp.float32)
        for r, value in enumerate(values)
    )
    return reduce(jnp.add, terms)


def groups_of(E: int, width: int = TuningConfig.width) -> int:
    """Returns how many warpgroups share a row, each with `width` at most; 0 if none can."""
    fits = (n for n in range(1, MAX_GROUPS + 1) if E % (64 * n) == 0 and E // n <= width)
    return next(fits, 0)


def cut_of(width: int) -> tuple[int, int]:
    """Returns how many warps share a warpgroup's part, and how many neighbours a thread holds."""
    sizes = ((warps, vec) for warps in (4, 2, 1) for vec in (8, 4, 2, 1))  # 8: 16 bytes
    return next((w, v) for w, v in sizes if width % (w * LANES * v) == 0)


def layout_of(width: int) -> Layout:
    """Lays out [warps, numbers of a warp]; warps that are left over repeat the work of others."""
    warps, vec = cut_of(width)
    tiling = plgpu.Tiling(((warps, LANES * vec), (vec,)))
    spare = (plgpu.Replicated(WARPS // warps),) if warps < WARPS else ()
    return plgpu.Layout.TILED(tiling, (*spare, *((-3,) if warps > 1 else ())), (-2,), -1)
