"""Products of dozens to hundreds of tokens with weights of 8 or 4 bits, on Hopper (Mosaic GPU).

Weights are the tall operand: a block of the grid computes some of their rows for all tokens, so
that each weight is read and widened once. One warpgroup copies weights and tokens into shared
memory, step by step of the sum; the others widen 64 rows each in registers and multiply them with
`wgmma`, by turns: while the tensor cores work for one of them, another widens. Blocks of a cluster
share what they read of the tokens. Scales are multiplied either with the widened weights, which
rounds them to bfloat16 as plain JAX does, or with the sums of the terms that share one.
A scale that all terms share is multiplied with their sum. Weights in fp8 are not widened where
tokens come as pairs of fp8 numbers (`fp8_pairs`). Of a gated MLP a warpgroup has eight gates and
the eight rows that they gate by turns, so that both meet in a thread, and units alone are written.
Weights are on their way before the kernel that makes the tokens has ended, so it must not be that
kernel which makes the weights.
"""

from collections.abc import Callable
from dataclasses import dataclass
import functools
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from jaxrunner.kernels_pallas import mosaic
from jaxrunner.kernels_pallas.mosaic import Barrier, Index, Ref, Shaped
from jaxrunner.kernels_pallas.products import copies
from jaxrunner.kernels_pallas.products.gated_mlp import SMEM_BYTES
from jaxrunner.kernels_pallas.products.matmul import (
    COMPILER,
    ROWS,
    gated,
    refuses_activation,
)
from jaxrunner.kernels_pallas.quantized import widen, widen_tile
from jaxrunner.kernels_pallas.quantized.quantized_matmul import refuses_numbers
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
from jaxrunner.kernels_pallas.registers import OWN_REGISTERS
from jaxrunner.kernels_pallas.stores import put, put_all_transposed, put_transposed
from jaxrunner.types import Array

MAX_TOKENS = 256
AT_ONCE = 64  # tokens of which two warpgroups' registers hold two sums, beside their total
TERMS = 128  # of pairs, that tensor cores sum up before these sums are multiplied with scales
# Of a thread that computes, by warpgroups that do, and of one that copies.
REGISTERS = {1: (232, 40), 2: (232, 40), 3: (152, 40), 4: (112, 32)}


@dataclass(frozen=True)
class TuningConfig:
    """How the work is shared out."""

    groups: int = 2  # of warpgroups that have rows of their own, 64 each
    turns: int = 1  # warpgroups that have the same rows, and steps by turns
    parts: int = 1  # of a sum
    tokens: int = MAX_TOKENS  # of a block, at most
    cluster: int = 2  # blocks that share their tokens
    terms: int = 128  # of a step
    stages: int = 16  # steps that are in shared memory, fewer where they do not fit
    num_ctas: int = 132  # at most: an H200's
    exact: bool = False  # scales are multiplied with sums
    spread: bool = True  # registers are moved from the warpgroup that copies to the others


class _Static(NamedTuple):
    """The compile-time parameters of the kernel."""

    form: Form  # of a part
    chunks: int  # of tokens
    tiles: int  # of rows, of which a cluster has several
    clusters: int
    items: int  # of a cluster's work
    c: TuningConfig
    activation: str | None  # of gates, which are the first half of the rows
    for_words: bool = False  # units come in the order that words of weights ask for

    @property
    def T(self) -> int:
        """Tokens of a block."""
        return self.form.tokens

    @property
    def steps(self) -> int:
        """Steps of a part."""
        return self.form.steps

    @property
    def stages(self) -> int:
        return self.form.stages

    @property
    def packed(self) -> int:
        return widen.PACKED[self.form.code]

    @property
    def pieces(self) -> int:
        """Copies of a step's tokens: of pairs one for each number."""
        return 2 if self.form.paired else self.c.terms // PIECE

    @property
    def piece(self) -> int:
        """Terms of each."""
        return self.c.terms if self.form.paired else PIECE

    @property
    def halves(self) -> int:
        """Copies of a step's weights: of gates, and of what they gate."""
        return 1 if self.activation is None else 2

    @property
    def rows(self) -> int:
        return self.c.groups * ROWS

    @property
    def outputs(self) -> int:
        """Outputs of a warpgroup's rows."""
        return ROWS // self.halves

    @property
    def consumers(self) -> int:
        return self.c.groups * self.c.turns

    @property
    def writers(self) -> int:
        """Warpgroups whose sums others add to their own."""
        return self.consumers - self.c.groups


def refuses(
    x: Shaped, weight: Shaped, scale: Shaped, code: str, c: TuningConfig,
    activation: str | None = None, words: bool = False,
) -> str | None:  # fmt: skip
    """Says why x, [T, E], or pairs, [2, T, E], weight, [F, E / packed], and scale, [F / run, G],
    are not served."""
    if activation is not None and (reason := _refuses_gates(x, activation, c)) is not None:
        return reason
    if words and (code != "int4" or not c.exact or x.ndim != 2):
        return f"wants words of int4 and sums that are multiplied with scales, got {code} and {c}"
    if x.ndim == 2 and (reason := refuses_numbers(x, scale, code, widen_tile.NUMBERS)) is not None:
        return reason
    if x.ndim == 3 and (reason := _refuses_pairs(x, scale, code, c)) is not None:
        return reason
    fit = _fit(x.shape, weight.shape[0], scale.shape, code, c, activation, words)
    return fit if isinstance(fit, str) else None


def _refuses_gates(x: Shaped, activation: str, c: TuningConfig) -> str | None:
    if x.ndim != 2 or c.parts > 1:
        given = "pairs" if x.ndim == 3 else f"parts={c.parts}"
        return f"wants tokens in bfloat16 and whole sums where it has gates, got {given}"
    return refuses_activation(activation)


def _refuses_pairs(x: Shaped, scale: Shaped, code: str, c: TuningConfig) -> str | None:
    if mosaic.TOO_OLD is not None:
        return mosaic.TOO_OLD
    if code != "float8_e4m3fn" or x.dtype != jnp.float8_e4m3fn or scale.dtype != jnp.float32:
        given = f"{code}, {x.dtype} and {scale.dtype}"
        return f"wants weights and pairs in float8_e4m3fn, and scales in float32, got {given}"
    if c.terms != TERMS or (scale.shape[1] > 1 and x.shape[2] // scale.shape[1] % TERMS):
        return f"wants {TERMS} terms a step, and as many to share a scale, got {c.terms}"
    return None


def _fit(
    x: tuple[int, ...], F: int, scale: tuple[int, ...], code: str, c: TuningConfig,
    activation: str | None, words: bool,
) -> _Static | str:  # fmt: skip
    """Shares the work out, or says why it cannot."""
    T, E = x[-2:]
    # Of one token the copies read eight: what is not there is 0.
    tokens, group, packed = max(8, min(T, c.tokens)), E // scale[1], widen.PACKED[code]
    if (T > 1 and T % tokens) or tokens % (8 * c.cluster):
        return f"wants tokens in multiples of {8 * c.cluster}, {tokens} at a time, got {T}"
    if E % (c.terms * c.parts) or F % (ROWS * c.groups * c.cluster):
        return (
            f"wants sums of a multiple of {c.terms * c.parts} terms and outputs of "
            f"{ROWS * c.groups * c.cluster}, got {E} and {F}"
        )
    if E % scale[1] or F % scale[0] or group % PIECE or (group % c.terms and c.terms % group):
        return f"wants scales of runs that divide {c.terms} or that it divides, got {group}"
    tiles, chunks = F // (ROWS * c.groups), -(-T // tokens)
    size = c.terms * (2 * tokens + ROWS * c.groups // packed)
    steps = E // (c.terms * c.parts)
    form = Form(
        code, tokens, c.terms, steps, F // scale[0], group if scale[1] > 1 else 0, scale[1], 0,
        c.turns, len(x) == 3, words=words, gap=0 if activation is None else F // 2,
    )  # fmt: skip
    left = SMEM_BYTES - c.groups * (c.turns - 1) * ROWS * tokens * 4 - 2048
    left -= c.groups * c.turns * form.kept * 4
    stages = min(c.stages, left // size, steps)
    stages -= stages % c.turns  # a place is of one warpgroup's steps for ever
    if stages < 2 or stages < c.turns or steps % c.turns:
        return f"wants fewer tokens at a time, got {tokens}"
    items = tiles // c.cluster * c.parts * chunks
    two = OWN_REGISTERS and c.groups * c.turns <= 2 and tokens <= AT_ONCE and form.sums % 2 == 0
    form = form._replace(stages=stages, at_once=2 if two else 1)
    clusters = min(items, c.num_ctas // c.cluster)
    return _Static(form, chunks, tiles, clusters, items, c, activation)


def quantized_tile(
    x: Array, weight: Array, scale: Array, x_scale: Array | None = None, *, code: str,
    dtype: Any = None, activation: str | None = None, words: bool = False,
    for_words: bool = False, config: TuningConfig = TuningConfig(),
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
    s = _fit(x.shape, F, scale.shape, code, c, activation, words)
    assert isinstance(s, _Static) and (x_scale is not None) == s.form.paired
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
        grid=(s.clusters,), grid_names=("team",), num_threads=s.consumers + 1, thread_name="wg",
        cluster=(c.cluster,) if c.cluster > 1 else (),
        cluster_names=("peer",) if c.cluster > 1 else (),
        kernel_name="quantized_tile", compiler_params=COMPILER,
    )(x, weight, scale, *of_pairs)  # fmt: skip


class _Item(NamedTuple):
    """The work item that a block computes at a time."""

    tile: Array
    part: Array
    chunk: Array


def _kernel(
    s: _Static, x: Ref, w: Ref, scale: Ref, *refs: Ref, w_smem: Ref, x_smem: Ref, other: Ref,
    kept: Ref, full: Barrier, free: Barrier, told: Barrier, read: Barrier,
) -> None:  # fmt: skip
    *of_pairs, out = refs
    wg, team = lax.axis_index("wg"), lax.axis_index("team")
    peer = lax.axis_index("peer") if s.c.cluster > 1 else 0
    rounds = lax.div(s.items - team + s.clusters - 1, s.clusters)

    def item(r: Array) -> _Item:
        n, wide = team + r * s.clusters, s.tiles // s.c.cluster
        tile, rest = lax.rem(n, wide), lax.div(n, wide)
        return _Item(tile * s.c.cluster + peer, lax.rem(rest, s.c.parts), lax.div(rest, s.c.parts))

    @pl.when(wg < s.consumers)
    def _() -> None:
        if s.c.spread:
            plgpu.set_max_registers(REGISTERS[s.consumers][0], action="increase")
        group, turn = lax.rem(wg, s.c.groups), lax.div(wg, s.c.groups)
        held = Held(scale, None, kept.at[wg], w_smem, x_smem, full, free)

        def one(r: Array, _: None) -> None:
            at = item(r)
            first = (at.tile * s.c.groups + group) * s.outputs
            mine = Sum(group, turn, r * s.steps, at.part * s.steps, first)
            y = (paired if of_pairs else exact if s.c.exact else rounded)(s.form, held, mine)
            for x_scale in of_pairs:
                y = y * _by_token(x_scale.at[pl.ds(at.chunk * s.T, s.T)])
            _finish(s, group, turn, r, at, first, y, out, other, told, read)
            return _

        lax.fori_loop(0, rounds, one, None)

    @pl.when(wg == s.consumers)
    def _() -> None:
        if s.c.spread:
            plgpu.set_max_registers(REGISTERS[s.consumers][1], action="decrease")
        _fetch(s, rounds, item, x, w, w_smem, x_smem, full, free)


def _fetch(
    s: _Static, rounds: Array, item: Callable[[Array], _Item], x: Ref, w: Ref, w_smem: Ref,
    x_smem: Ref, full: Barrier, free: Barrier,
) -> None:  # fmt: skip
    """Copies weights and tokens, step by step of each item."""
    peers: dict[str, Any] = dict(collective_axes="peer") if s.c.cluster > 1 else {}

    def place(step: Index) -> tuple[_Item, Array, Array]:
        at = item(lax.div(step, s.steps))
        return (
            at,
            at.part * s.steps + lax.rem(step, s.steps),
            lax.rem(step, s.stages),
        )

    def weights(step: Index) -> None:
        (tile, _, _), n, slot = place(step)
        width, num = s.c.terms // s.packed, s.rows // s.halves
        for half in range(s.halves):
            first = tile * num + half * s.form.gap
            source = w.at[pl.ds(first, num), pl.ds(n * width, width)]
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

    def wait(step: Array) -> None:
        mosaic.barrier_wait(free.at[lax.rem(step, s.stages)])

    copies.begin(s.stages, s.rows * s.c.terms // s.packed, weights, tokens)
    total = rounds * s.steps
    copies.each(s.stages, total, wait, weights, tokens)
    # A block may not end while its peer still tells it that a slot is free.
    copies.each(total, total + s.stages, wait)


def _by_token(x_scale: Ref) -> Array:
    """Reads scales of tokens, [T], for sums, [ROWS, T]."""
    layout = plgpu.Layout.WGMMA
    scale = mosaic.load(x_scale, layout=layout.reduce(0), optimized=False)
    wide = lax.broadcast_in_dim(scale, (ROWS, *scale.shape), [1])
    return plgpu.layout_cast(wide, layout)


def _finish(
    s: _Static, group: Array, turn: Array, r: Array, at: _Item, first: Array, y: Array, out: Ref,
    other: Ref, told: Barrier, read: Barrier,
) -> None:  # fmt: skip
    """Adds up the sums of warpgroups with the same rows, and writes them."""
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
        num = min(s.T, target.shape[0])
        outputs = target.at[pl.ds(at.chunk * s.T, num), pl.ds(first, s.outputs)]
        write, layout = put_all_transposed if num == s.T else put_transposed, plgpu.Layout.WGMMA
        if s.activation is not None:
            total, layout = gated(*halves(total), s.activation), HALF
        write(total.astype(out.dtype), outputs, layout, for_words=s.for_words)
