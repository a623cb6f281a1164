"""Rows whose latents several blocks have read: a second kernel merges what these have found.

One block would read all parts of a row alone where a launch of many takes no longer than to start.
A row that is in parts ends in a block of the first kernel, so these stand for the rows.
"""

import functools
from typing import NamedTuple

from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from jaxrunner.kernels_pallas import mosaic
from jaxrunner.kernels_pallas.attention.latent_shares import Shares, of_part
from jaxrunner.kernels_pallas.attention.online_softmax import NOTHING
from jaxrunner.kernels_pallas.mosaic import Ref
from jaxrunner.types import Array

HEADS = 16  # blocks that share the heads of a row
AT_ONCE = 8  # parts that are on their way


class Parts(NamedTuple):
    """The partial results of rows that several blocks share, at the places of `of_part`."""

    value: Ref  # [2 C, H, R], normed, float32
    weight: Ref  # [2 C, H, 8], the base 2 logarithm of what it is of


def merge(parts: Parts, shares: Shares, out: Ref) -> None:
    """Merges the parts of all rows of which there are several into out, [B, H, R]."""
    (C,), H = shares.first.shape, out.shape[1]
    blocks = H if H < HEADS else HEADS
    plgpu.kernel(
        functools.partial(_merge, -(-H // blocks)),
        out_type=(), grid=(C, blocks), grid_names=("cta", "heads"), kernel_name="latent_merge",
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane
        ),
    )(shares.row, shares.head, shares.ends, *parts, out)  # fmt: skip


def _merge(
    heads: int, row: Ref, head_ref: Ref, ends: Ref, value: Ref, weight: Ref, out: Ref
) -> None:
    plgpu.griddepcontrol_wait()
    cta = lax.axis_index("cta")

    @pl.when(ends[cta] == 1)
    def _() -> None:
        head = head_ref[cta]
        for i in range(heads):
            h = jnp.minimum(lax.axis_index("heads") * heads + i, out.shape[1] - 1)
            found = _sum(value.at[:, h], weight.at[:, h], head, cta - head + 1)
            out[row[cta], h] = found.astype(out.dtype)


def _sum(value: Ref, weight: Ref, head: Array, num: Array) -> Array:
    """Merges `num` parts of one head, value [2 C, R] and weight [2 C, 8], from block `head` on."""
    R = value.shape[1]
    layout = plgpu.Layout.WG_STRIDED((R,), vec_size=R // 128)

    def add(chunk: Array, carry: tuple[Array, ...]) -> tuple[Array, ...]:
        acc, best, total = carry
        numbers = [chunk * AT_ONCE + i for i in range(AT_ONCE)]
        places = [of_part(head, jnp.minimum(n, num - 1)) for n in numbers]
        values = [mosaic.load(value.at[p], layout=layout, optimized=False) for p in places]
        weights = [weight[p, 0] for p in places]
        weights = [jnp.where(n < num, w, NOTHING) for n, w in zip(numbers, weights, strict=True)]
        new_best = functools.reduce(jnp.maximum, weights, best)
        kept = jnp.exp2(best - new_best)
        acc, total = acc * kept, total * kept
        for x, w in zip(values, weights, strict=True):
            share = jnp.exp2(w - new_best)
            acc, total = acc + x * share, total + share
        return acc, new_best, total

    start = plgpu.layout_cast(jnp.zeros((R,), jnp.float32), layout)
    scalars = jnp.float32(NOTHING), jnp.float32(0)
    acc, _, total = lax.fori_loop(0, lax.div(num + AT_ONCE - 1, AT_ONCE), add, (start, *scalars))
    return acc * (1 / total)
