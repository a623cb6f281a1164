"""Products of dozens to hundreds of tokens with weights of 8 or 4 bits, on Hopper (Mosaic GPU).

Weights are the tall operand: a block of the grid computes some of their rows for all tokens, so
that each weight is read and widened once. Warpgroups widen 64 rows each in registers and multiply
them with `wgmma`, by turns: while the tensor cores work for one of them, another widens. While its
products are made, a warpgroup copies weights and tokens of a later step of the sum into shared
memory (`copies.Producer`): one that did nothing else would take registers of the others. Blocks of
a cluster share what they read of the tokens, and may share the rows of a warpgroup, of which each
then has half of the tokens. Scales are multiplied either with the widened weights, which rounds
them to bfloat16 as plain JAX does, or with the sums of the terms that share one. A scale that all
terms share is multiplied with their sum. Weights in fp8 are not widened where tokens come as pairs
of fp8 numbers (`fp8_pairs`). Of a gated MLP a warpgroup has eight gates and the eight rows that
they gate by turns, so that both meet in a thread, and units alone are written.
Weights are on their way before the kernel that makes the tokens has ended, so it must not be that
kernel which makes the weights.
"""

from collections.abc import Callable
import functools
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from jaxrunner.kernels_pallas import mosaic
from jaxrunner.kernels_pallas.mosaic import Barrier, Index, Ref
from jaxrunner.kernels_pallas.products import copies
from jaxrunner.kernels_pallas.products.matmul import COMPILER, ROWS, gated
from jaxrunner.kernels_pallas.quantized.quantized_fit import (
    DEFAULT,
    Shares,
    TuningConfig,
    fit,
    refuses,
    share_out,
)
from jaxrunner.kernels_pallas.quantized.quantized_steps import HALF, halves
from jaxrunner.kernels_pallas.quantized.quantized_sums import (
    PIECE,
    Form,
    Held,
    Sum,
    exact,
    paired,
    rounded,
)
from jaxrunner.kernels_pallas.stores import put, put_all_transposed, put_transposed
from jaxrunner.types import Array


def quantized_tile(
    x: Array, weight: Array, scale: Array, x_scale: Array | None = None, *, code: str,
    dtype: Any = None, activation: str | None = None, words: bool = False,
    for_words: bool = False, config: TuningConfig = DEFAULT,
) -> Array:  # fmt: skip
    """Returns x, [T, E], times the weights: [T, F] in `dtype`, that of x if None.

    With several parts, which are to be added up: [parts, T, F]. With an activation the first half
    of the weights are gates of the others, and their units are returned: [T, F / 2]
    (arXiv:2002.05202). weight: [F, E] in 8 bits, or
    [F, E / 2] with two numbers a byte, the first in the low half, of int4 8 more than the number.
    scale: float32 [F / run, E / group], of runs of rows and of terms. Or x, [2, T, E], and x_scale,
    [T], are what `fp8_pairs` returns. words: whether x comes as `widen_tile.in_order` returns it,
    of weights in int4; for_words: whether units are to come so.

    Raises:
      ValueError: what `refuses` says.
    """
    if why := refuses(x, weight, scale, code, config, activation, words):
        raise ValueError(f"quantized_tile {why}")
    T, F, c = x.shape[-2], weight.shape[0], config
    s = share_out(x.shape, F, scale.shape, code, c, activation, words)
    assert isinstance(s, Shares) and (x_scale is not None) == s.form.paired
    s = s._replace(for_words=for_words)
    width, F = c.terms // s.packed, F // s.halves
    shape = (T, F) if c.parts == 1 else (c.parts, T, F)
    of_pairs = () if x_scale is None else (x_scale,)
    return plgpu.kernel(
        functools.partial(_kernel, s),
        out_type=jax.ShapeDtypeStruct(shape, dtype or x.dtype),
        scratch_types=dict(
            w_smem=plgpu.SMEM(
                (s.stages, s.rows, width), weight.dtype, transforms=mosaic.tiled(min(width, 128), 1)
            ),
            x_smem=plgpu.SMEM(
                (s.stages, s.pieces, s.T, s.piece), x.dtype,
                transforms=mosaic.tiled(s.piece, x.dtype.itemsize),
            ),
            other=plgpu.SMEM(
                (max(s.writers, 1), *((ROWS, s.T) if s.writers else (8, 8))), jnp.float32
            ),
            kept=plgpu.SMEM((s.consumers, 1, s.form.kept), jnp.float32),
            full=plgpu.Barrier(num_arrivals=s.halves + s.pieces, num_barriers=s.stages),
            free=copies.free_slots(s.stages, s.c.groups, s.c.cluster),
            told=plgpu.Barrier(num_arrivals=max(s.writers, 1)),
            read=plgpu.Barrier(num_arrivals=c.groups),
        ),
        grid=(s.clusters,), grid_names=("team",), num_threads=s.consumers, thread_name="wg",
        cluster=(c.cluster,) if c.cluster > 1 else (),
        cluster_names=("peer",) if c.cluster > 1 else (),
        kernel_name="quantized_tile", compiler_params=COMPILER,
    )(x, weight, scale, *of_pairs)  # fmt: skip


class _Item(NamedTuple):
    """The work item that a block computes at a time."""

    first: Array  # of its rows, by warpgroups
    part: Array
    chunk: Array


def _kernel(
    s: Shares, x: Ref, w: Ref, scale: Ref, *refs: Ref, w_smem: Ref, x_smem: Ref, other: Ref,
    kept: Ref, full: Barrier, free: Barrier, told: Barrier, read: Barrier,
) -> None:  # fmt: skip
    *of_pairs, out = refs
    wg, team = lax.axis_index("wg"), lax.axis_index("team")
    peer = lax.axis_index("peer") if s.c.cluster > 1 else 0
    rounds = lax.div(s.items - team + s.clusters - 1, s.clusters)

    def item(r: Array) -> _Item:
        n = team + r * s.clusters
        tile, rest = lax.rem(n, s.tiles), lax.div(n, s.tiles)
        first = tile * (s.c.height // ROWS) + peer * s.c.own
        return _Item(first, lax.rem(rest, s.c.parts), lax.div(rest, s.c.parts))

    weights, tokens = _starts(s, item, x, w, w_smem, x_smem, full)
    producer = copies.Producer(s.stages, rounds * s.steps, free, weights, (tokens,))

    pl.when(wg == 0)(lambda: producer.begin(s.weight_bytes))
    group, turn = lax.rem(wg, s.c.groups), lax.div(wg, s.c.groups)
    refill = functools.partial(producer.refill, wg, s.consumers, turns=s.c.turns)
    held = Held(scale, None, kept.at[wg], w_smem, x_smem, full, free, refill)

    def one(r: Array, _: None) -> None:
        at = item(r)
        first = (at.first + group) * s.outputs
        mine = Sum(group, turn, r * s.steps, at.part * s.steps, first)

        def add_up(form: Form, held: Held, skip: Index = 0) -> None:
            begin = at.chunk * s.T + skip
            y = (paired if of_pairs else exact if s.c.exact else rounded)(form, held, mine)
            for x_scale in of_pairs:
                y = y * _by_token(x_scale.at[pl.ds(begin, form.tokens)])
            _finish(s, group, turn, r, at, first, begin, y, out, other, told, read)

        if not s.c.shared:
            add_up(s.form, held)
            return _
        half = s.T // 2
        skip = pl.multiple_of(jnp.asarray(peer * half), 8)
        some = held._replace(x=x_smem.at[:, :, pl.ds(skip, half)])
        is_shared = group == (s.c.groups - 1) * (1 - peer)  # the last of one, the other's first
        pl.when(is_shared)(lambda: add_up(s.form._replace(tokens=half), some, skip))
        pl.when(jnp.logical_not(is_shared))(lambda: add_up(s.form, held))
        return _

    lax.fori_loop(0, rounds, one, None)
    producer.end(wg, s.consumers)


def _starts(
    s: Shares, item: Callable[[Array], _Item], x: Ref, w: Ref, w_smem: Ref, x_smem: Ref,
    full: Barrier,
) -> tuple[Callable[[Index], None], Callable[[Index], None]]:  # fmt: skip
    """Returns what starts the copies of a step's weights, and of its tokens."""
    peers: dict[str, Any] = dict(collective_axes="peer") if s.c.cluster > 1 else {}

    def place(step: Index) -> tuple[_Item, Array, Array]:
        at = item(lax.div(step, s.steps))
        return (
            at,
            at.part * s.steps + lax.rem(step, s.steps),
            lax.rem(step, s.stages),
        )

    def weights(step: Index) -> None:
        (first, _, _), n, slot = place(step)
        width, num = s.c.terms // s.packed, s.rows // s.halves
        for half in range(s.halves):
            rows = pl.ds(first * s.outputs + half * s.form.gap, num)
            source = w.at[rows, pl.ds(n * width, width)]
            target = w_smem.at[slot, pl.ds(half * num, num)] if s.halves > 1 else w_smem.at[slot]
            mosaic.copy_gmem_to_smem(source, target, full.at[slot])

    def tokens(step: Index) -> None:
        (_, _, chunk), n, slot = place(step)
        rows, first = pl.ds(chunk * s.T, s.T), n * s.c.terms
        for i in range(s.pieces):
            if s.form.paired:
                source = x.at[i, rows, pl.ds(first, s.piece)]
            else:
                source = x.at[rows, pl.ds(first + i * PIECE, PIECE)]
            mosaic.copy_gmem_to_smem(source, x_smem.at[slot, i], full.at[slot], **peers)

    return weights, tokens


def _by_token(x_scale: Ref) -> Array:
    """Reads scales of tokens, [T], for sums, [ROWS, T]."""
    layout = plgpu.Layout.WGMMA
    scale = mosaic.load(x_scale, layout=layout.reduce(0), optimized=False)
    wide = lax.broadcast_in_dim(scale, (ROWS, *scale.shape), [1])
    return plgpu.layout_cast(wide, layout)


def _finish(
    s: Shares, group: Array, turn: Array, r: Array, at: _Item, first: Array, begin: Array,
    y: Array, out: Ref, other: Ref, told: Barrier, read: Barrier,
) -> None:  # fmt: skip
    """Adds up the sums of warpgroups with the same rows, and writes them.

    first, begin: of their outputs and tokens.
    """
    groups, turns = s.c.groups, s.c.turns
    if turns > 1:

        @pl.when(turn > 0)
        def _() -> None:
            pl.when(r > 0)(lambda: mosaic.barrier_wait(read))
            put(other.at[(turn - 1) * groups + group], y)
            mosaic.barrier_arrive(told)

    @pl.when(turn == 0)
    def _() -> None:
        total = y
        if turns > 1:
            mosaic.barrier_wait(told)
            for i in range(turns - 1):
                source = other.at[i * groups + group]
                total = total + mosaic.load(source, layout=plgpu.Layout.WGMMA, optimized=False)
            mosaic.barrier_arrive(read)
        target = out if len(out.shape) == 2 else out.at[at.part]
        num = min(y.shape[1], target.shape[0])
        outputs, layout = target.at[pl.ds(begin, num), pl.ds(first, s.outputs)], plgpu.Layout.WGMMA
        write = put_all_transposed if num == y.shape[1] else put_transposed
        if s.activation is not None:
            total, layout = gated(*halves(total), s.activation), HALF
        write(total.astype(out.dtype), outputs, layout, for_words=s.for_words)


def multiply(
    x: Array, weight: Array, scale: Array, x_scale: Array | None = None, *, code: str,
    in_parts: bool = False, dtype: Any = None, activation: str | None = None, words: bool = False,
    for_words: bool = False,
) -> Array:  # fmt: skip
    """Returns what `quantized_tile` does, with the sizes that `fit` finds.

    Raises:
      ValueError: what `fit` says.
    """
    of_both: Any = dict(activation=activation, words=words)
    c = fit(x, weight, scale, code, in_parts=in_parts, **of_both)
    if isinstance(c, str):
        raise ValueError(f"quantized_tile {c}")
    wide = jnp.dtype(jnp.float32) if in_parts else dtype
    how: Any = dict(code=code, dtype=wide, for_words=for_words, config=c)
    return quantized_tile(x, weight, scale, x_scale, **of_both, **how)
