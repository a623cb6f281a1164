"""The reads of prefill attention from a cache of 8 bits: the copying warpgroup makes it bfloat16.

Bytes and scales of a step are copied to a place of their own. From there the warpgroup takes them
through its registers to where the computing ones expect them, which so know nothing of it. As soon
as it has a step's bytes in registers it starts the next step's copies.
"""

from collections.abc import Callable
import functools
from typing import Any

from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxrunner.kernels_pallas import mosaic
from jaxrunner.kernels_pallas.attention import quantized_kv
from jaxrunner.kernels_pallas.mosaic import Index, Ref
from jaxrunner.types import Array

ROWS = 64  # keys that go through registers at a time
# Numbers in e4m3 come times 2**-120 and are raised to 2**-20 with their scales: by all of it, a
# large scale would become infinite.
RAISE, BEHIND = 2.0**100, 2.0**20


def behind(dtype: DTypeLike) -> float:
    """Returns what is left to multiply scores and results by."""
    return BEHIND if dtype == jnp.float8_e4m3fn else 1.0


def smem_bytes(D: int, keys: int) -> int:
    """Returns the bytes that a step's keys, values and scales take besides, gaps included."""
    return 2 * keys * (D + 4) + 2048


def scratch(k: Array, keys: int) -> dict[str, Any]:
    """Returns what a block of the grid allocates besides, for k, [N, K, S, D]."""
    _, _, S, D = k.shape
    copies, part = max(1, keys // S), min(keys, S)
    rows = plgpu.SMEM((keys, D), k.dtype, transforms=quantized_kv.tile(D))
    scales = plgpu.SMEM((copies, quantized_kv.head_group(S), part), jnp.float32)
    full = plgpu.Barrier(num_arrivals=2 * copies)
    named = dict(rows=rows, scales=scales, raw=full)
    return {f"{kv}_{name}": x for kv in ("k", "v") for name, x in named.items()}


def fill(
    caches: dict[str, tuple[Ref, Ref]], queries: Callable[[], None],
    places: Callable[[Index], list[Any]], steps: tuple[Array, Array, Array], smem: dict[str, Any],
) -> None:  # fmt: skip
    """Fills the slots of some steps, and has the queries copied.

    caches: rows and scales of "k" and "v". queries: starts their copy, once there is room.
    places: (step) -> block, head and slice of each copy. steps: how many there were before, the
    number, and the KV head.
    """
    (before, num, head), (stages, keys, _) = steps, smem["k_smem"].shape
    head = lax.rem(head, smem["k_scales"].shape[1])

    def start(kv: str, step: Index) -> None:
        parts = places(step)
        for i, place in enumerate(parts):
            size = keys // len(parts)
            to = smem[f"{kv}_rows"].at[pl.ds(i * size, size)], smem[f"{kv}_scales"].at[i]
            quantized_kv.fetch(*caches[kv], place, to, smem[f"{kv}_raw"])

    for kv in caches:
        pl.when(num > 0)(functools.partial(start, kv, 0))
    queries()

    def body(j: Array, _: None) -> None:
        slot = lax.rem(before + j, stages)
        for kv in caches:
            mosaic.barrier_wait(smem[f"{kv}_raw"])
            mosaic.barrier_wait(smem[f"{kv}_free"].at[slot])
            for first in range(0, keys, ROWS):
                at = pl.ds(first, ROWS)
                scale = quantized_kv.scales(smem[f"{kv}_scales"].at[:, head], first, ROWS)
                smem[f"{kv}_smem"][slot, at] = _scaled(smem[f"{kv}_rows"].at[at], scale)
            plgpu.commit_smem()
            mosaic.barrier_arrive(smem[f"{kv}_full"].at[slot])
            # Behind the barrier of the commit: all have read what is overwritten.
            pl.when(j + 1 < num)(functools.partial(start, kv, j + 1))
        return _

    lax.fori_loop(0, num, body, None)


def _scaled(ref: Ref, scale: Array) -> Array:
    """Loads rows, [64, D], times their scales, [64], in bfloat16: rounded once, as they fit it."""
    raised = RAISE if ref.dtype == jnp.float8_e4m3fn else 1.0
    x = quantized_kv.widen(ref, ordered=True)
    return x * lax.broadcast_in_dim((scale * raised).astype(x.dtype), x.shape, [0])
