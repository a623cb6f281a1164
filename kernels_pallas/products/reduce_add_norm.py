"""A sum over devices, a residual addition and the RMSNorm of its result in one kernel.

A thread block serves a row, or several by turns, as in `add_norm`: it sums up its device's parts of
the row, writes that into all peers' memory, waits for theirs and goes on with the sum of all. All
blocks are on the chip at once, none waits for another row's, and each has written before it waits;
so devices need meet nowhere. vLLM's custom all-reduce and TensorRT-LLM's one-shot all-reduce with a
norm are made like that.
"""

from functools import partial, reduce

from jax import lax
import jax.numpy as jnp

from jaxrunner.kernels_pallas import mosaic, pdl
from jaxrunner.kernels_pallas.mosaic import Barrier, Index, Ref, Shaped
from jaxrunner.kernels_pallas.products import add_norm, peer_rows
from jaxrunner.kernels_pallas.products.peer_rows import Peers
from jaxrunner.kernels_pallas.stores import put
from jaxrunner.types import Array

MAX_GROUPS = 528  # warpgroups of a call: 4 on each of 132 multiprocessors, by 128 registers


def refuses(x: Shaped, parts: Shaped, weight: Shaped, peers: Peers) -> str | None:
    """Returns why these shapes and dtypes are not served, None if they are."""
    if parts.ndim != 3:
        return f"parts must be [parts, T, E], got {list(parts.shape)}"
    if why := add_norm.refuses(x, parts, weight):
        return why
    (T, E), num = x.shape, peers.places.shape[0] - 2
    groups = add_norm.groups_of(E)
    if E % (groups * 1024):
        return f"rows must be a multiple of {groups * 1024} long, got {E}"
    if num < 2:
        return f"several devices must be there, got {num}"
    if T > peers.rows or E != peers.E:
        return f"memory is for {peers.rows} rows of {peers.E}, got {T} of {E}"
    return None


def reduce_add_norm(
    x: Array, parts: Array, weight: Array, peers: Peers, *, eps: float, one_more: bool = False
) -> tuple[Array, Array]:
    """Returns x plus the sum of all devices' parts, [T, E], and the RMSNorm of that, [T, E].

    x: [T, E], alike on all devices, as the results are, bit by bit. parts: [parts, T, E], in
    float32 or x's dtype, what a device adds; their sum is rounded to x's dtype, and is added to x
    in float32 by the devices' ranks. weight, eps and one_more: as in `add_rms_norm`. Each call must
    depend on the one before.

    Raises:
      ValueError: what `refuses` says.
    """
    if why := refuses(x, parts, weight, peers):
        raise ValueError(why)
    T, E = x.shape
    cut = add_norm.cut_rows(E)
    blocks = min(T, MAX_GROUPS // cut[0])
    body = partial(_kernel, blocks=blocks, eps=eps, one_more=one_more)
    run = add_norm.kernel(body, T, cut, x.dtype, 2, blocks=blocks, name="reduce_add_norm")
    rows = x.reshape(T, *cut), parts.reshape(-1, T, *cut), weight.reshape(cut)
    total, out = run(*rows, peers.places)
    return total.reshape(T, E), out.reshape(T, E)


def _kernel(
    x_ref: Ref, parts_ref: Ref, weight_ref: Ref, places_ref: Ref, total_ref: Ref, out_ref: Ref,
    part_smem: Ref, barriers: Barrier, *, blocks: int, eps: float, one_more: bool,
) -> None:  # fmt: skip
    pdl.begin()
    rows, groups, warps, width = x_ref.shape
    block, group = lax.axis_index("row"), lax.axis_index("group")
    layout = add_norm.layout_of(warps * width)
    load = partial(mosaic.load, layout=layout, optimized=False)
    weight = load(weight_ref.at[group])

    def serve(turn: Index, _: None) -> None:
        row = block + turn * blocks
        nth, start = peer_rows.region(places_ref, row, group, groups * warps * width)
        x = load(x_ref.at[row, group])
        own = [load(parts_ref.at[part, row, group]) for part in range(parts_ref.shape[0])]
        sent = reduce(jnp.add, (part.astype(jnp.float32) for part in own)).astype(x.dtype)
        found = peer_rows.exchange(places_ref, sent, group, start, groups, layout)
        wide = (part.astype(jnp.float32) for part in found)
        x = reduce(jnp.add, wide, x.astype(jnp.float32)).astype(x.dtype)
        put(total_ref.at[row, group], x)
        # Sums of squares have two places: a warpgroup may be a row ahead of another that reads.
        normed = add_norm.normed(
            x, weight, group, part_smem, barriers, turn % 2, eps=eps, one_more=one_more
        )
        peer_rows.end(places_ref, row, group, nth)
        put(out_ref.at[row, group], normed)

    if rows == blocks:
        serve(0, None)
    else:
        lax.fori_loop(0, (rows - block + blocks - 1) // blocks, serve, None)
