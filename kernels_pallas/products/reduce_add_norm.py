"""A sum over devices, a residual addition and the RMSNorm of its result in one kernel.

A thread block serves one row, as in `add_norm`: it sums up its device's parts of the row, writes
that into all peers' memory, waits for theirs and goes on with the sum of all. No block waits for
another row's, and each has written before it waits; so devices need meet nowhere. vLLM's custom
all-reduce and TensorRT-LLM's one-shot all-reduce with a norm are made like that.
"""

from functools import partial, reduce

from jax import lax
import jax.numpy as jnp

from jaxrunner.kernels_pallas import mosaic, pdl
from jaxrunner.kernels_pallas.mosaic import Barrier, Ref, Shaped
from jaxrunner.kernels_pallas.products import add_norm, peer_rows
from jaxrunner.kernels_pallas.stores import put
from jaxrunner.types import Array

MAX_GROUPS = 528  # warpgroups of a call: 4 on each of 132 multiprocessors, by 128 registers


def refuses(x: Shaped, parts: Shaped, weight: Shaped, places: Shaped) -> str | None:
    """Returns why these shapes and dtypes are not served, None if they are."""
    if parts.ndim != 3:
        return f"parts must be [parts, T, E], got {list(parts.shape)}"
    if why := add_norm.refuses(x, parts, weight):
        return why
    (T, E), peers = x.shape, places.shape[0] - 2
    groups = add_norm.groups_of(E)
    if E % (groups * 1024):
        return f"rows must be a multiple of {groups * 1024} long, got {E}"
    most = min(peer_rows.MAX_ROWS, MAX_GROUPS // groups)
    if T > most:
        return f"at most {most} rows of {E} are on the chip at once, got {T}"
    if peers < 2:
        return f"several devices must be there, got {peers}"
    return None


def reduce_add_norm(
    x: Array, parts: Array, weight: Array, places: Array, *, eps: float, one_more: bool = False
) -> tuple[Array, Array]:
    """Returns x plus the sum of all devices' parts, [T, E], and the RMSNorm of that, [T, E].

    x: [T, E], alike on all devices, as the results are, bit by bit. parts: [parts, T, E], in
    float32 or x's dtype, what a device adds; their sum is rounded to x's dtype, and is added to x
    in float32 by the devices' ranks. weight, eps and one_more: as in `add_rms_norm`. places:
    [devices + 2, 2], a device's own of `peer_rows.Exchange`, made for E. Each call must depend on
    the one before.

    Raises:
      ValueError: what `refuses` says.
    """
    if why := refuses(x, parts, weight, places):
        raise ValueError(why)
    T, E = x.shape
    cut = add_norm.cut_rows(E)
    body = partial(_kernel, eps=eps, one_more=one_more)
    run = add_norm.kernel(body, T, cut, x.dtype, name="reduce_add_norm")
    total, out = run(x.reshape(T, *cut), parts.reshape(-1, T, *cut), weight.reshape(cut), places)
    return total.reshape(T, E), out.reshape(T, E)


def _kernel(
    x_ref: Ref, parts_ref: Ref, weight_ref: Ref, places_ref: Ref, total_ref: Ref, out_ref: Ref,
    part_smem: Ref, barriers: Barrier, *, eps: float, one_more: bool,
) -> None:  # fmt: skip
    pdl.begin()
    _, groups, warps, width = x_ref.shape
    E, row, group = groups * warps * width, lax.axis_index("row"), lax.axis_index("group")
    layout = add_norm.layout_of(warps * width)
    load = partial(mosaic.load, layout=layout, optimized=False)
    turn, start = peer_rows.region(places_ref, row, group, E)
    x, weight = load(x_ref.at[row, group]), load(weight_ref.at[group])
    own = [load(parts_ref.at[part, row, group]) for part in range(parts_ref.shape[0])]
    sent = reduce(jnp.add, (part.astype(jnp.float32) for part in own)).astype(x.dtype)
    found = peer_rows.exchange(places_ref, sent, group, start, groups, layout)
    wide = (part.astype(jnp.float32) for part in found)
    x = reduce(jnp.add, wide, x.astype(jnp.float32)).astype(x.dtype)
    put(total_ref.at[row, group], x)
    normed = add_norm.normed(x, weight, group, part_smem, barriers, eps=eps, one_more=one_more)
    peer_rows.end(places_ref, row, group, turn)
    put(out_ref.at[row, group], normed)
