"""Products of a mixture's experts with weights of 8 or 4 bits, on Hopper (Mosaic GPU).

Weights are the tall operand of a product, and the tokens of an expert the narrow one, in tiles as
`group_tokens` lays them. A block of the grid takes two times 64 rows of weights, a warpgroup each,
of one tile after another: of gates and of what they gate, which meet in shared memory; or of
outputs, which are weighed and left by route, for the norm that follows to sum up. Both are kernels
of their own, so that what is between them may round the units to 8 bits. A third warpgroup copies
weights as they are stored; `quantized_sums` widens them in registers. Weights of the outputs are on
their way before the units are there: their kernel must follow one that has waited for the groups.
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
from jaxrunner.kernels_pallas.mixtures import expert_tile
from jaxrunner.kernels_pallas.mixtures.expert_tile import ACTIVATIONS, by_token
from jaxrunner.kernels_pallas.mixtures.group_tokens import Groups
from jaxrunner.kernels_pallas.mixtures.grouped_mlp import POWERS
from jaxrunner.kernels_pallas.mosaic import TOO_OLD, Barrier, Index, Ref, Shaped
from jaxrunner.kernels_pallas.products import copies
from jaxrunner.kernels_pallas.products.gated_mlp import SMEM_BYTES
from jaxrunner.kernels_pallas.products.matmul import COMPILER, ROWS
from jaxrunner.kernels_pallas.quantized import widen, widen_tile
from jaxrunner.kernels_pallas.quantized.quantized_sums import PIECE, Form, Held, Sum, exact, rounded
from jaxrunner.kernels_pallas.stores import put, put_columns, put_routed
from jaxrunner.types import Array

HALVES = 2  # of a piece of work, a warpgroup each
TERMS = 128, 192, 64  # of a step: the first that divides a sum
LEAST = 32  # terms that share a scale
AT_ONCE = 32  # tokens of which gates and what they gate are in registers
# Of a thread that computes, by turns, and of one that copies.
REGISTERS = {1: (232, 40), 2: (112, 32)}


class Few(NamedTuple):
    """Weights of all experts, the rows of one behind those of another."""

    weight: Array  # [rows, E] in 8 bits, or [rows, E / 2] with two numbers a byte
    scale: Array  # [rows / run, E / group], float32, or uint8 with exponents of two plus 127
    zero: Array | None = None  # of the same shape, int8: what is taken from a number first
    bias: Array | None = None  # [rows, 1]


@dataclass(frozen=True)
class TuningConfig:
    """Sizes that change speed alone."""

    turns: int = 1  # pairs of warpgroups that have the same rows, and steps by turns
    stages: int = 16  # steps that are in shared memory, fewer where they do not fit
    num_ctas: int = 132  # an H200's multiprocessors
    dtype: str = "float32"  # of what each expert gives


class _Static(NamedTuple):
    """The compile-time parameters of a kernel."""

    form: Form
    height: int  # rows of an expert's weights
    step: int  # rows from one piece of work to the next
    gap: int  # rows from its first half to the other
    blocks: int  # pieces of work of a tile
    outputs: int  # of an expert
    ctas: int
    activation: str | None  # of units; None where outputs are computed
    names: tuple[str, ...]  # of what is read

    @property
    def tile(self) -> int:
        """Tokens of a tile."""
        return self.form.tokens

    @property
    def width(self) -> int:
        """Bytes of a row of weights that a step takes."""
        return self.form.terms // widen.PACKED[self.form.code]

    @property
    def turns(self) -> int:
        """Pairs of warpgroups that compute."""
        return self.form.turns

    @property
    def places(self) -> int:
        """Places for sums that warpgroups give each other."""
        return _places(self.turns, self.activation)

    def item(self, block: Array, turn: Array) -> tuple[Array, Array]:
        """Returns the tile and the number among its own of a piece of work."""
        number = block + turn * self.ctas
        return lax.div(number, self.blocks), lax.rem(number, self.blocks)


def refuses(
    x: Shaped, w: Few, num_experts: int, code: str, tile: int, activation: str | None = None,
    config: TuningConfig = TuningConfig(),
) -> str | None:  # fmt: skip
    """Says why x, [n, E], and weights are not served, or None. activation: None for outputs."""
    if TOO_OLD is not None:
        return TOO_OLD
    if x.dtype != jnp.bfloat16 or w.scale.dtype not in (jnp.float32, jnp.uint8):
        return (
            f"wants tokens in bfloat16 and scales in float32 or e8m0, got {x.dtype} and "
            f"{w.scale.dtype}"
        )
    if code not in widen_tile.NUMBERS:
        return f"wants weights in one of {[*widen_tile.NUMBERS]}, got {code}"
    if activation not in (None, *ACTIVATIONS):
        return f"wants one of {ACTIVATIONS}, got {activation}"
    if tile not in POWERS:
        return f"wants tiles of {POWERS} rows, got {tile}"
    E, height, group = x.shape[1], w.weight.shape[0] // num_experts, x.shape[1] // w.scale.shape[1]
    outputs = height // HALVES if activation else height
    if E % PIECE or outputs % ROWS:
        return f"wants inputs and outputs of a multiple of {PIECE}, got {E} and {outputs}"
    whole, terms = w.scale.shape[1] == 1, _terms(E)
    if not whole and (E % group or group % LEAST or max(group, terms) % min(group, terms)):
        return f"wants scales of runs that divide {terms} or that it divides, got {group}"
    if not whole and group > LEAST and group % PIECE:
        return f"wants scales of {LEAST} inputs or of a multiple of {PIECE}, got {group}"
    if w.zero is not None and not whole and group < PIECE:
        return f"wants scales of at least {PIECE} inputs where there are zero points, got {group}"
    if w.zero is not None and w.scale.dtype == jnp.uint8:
        return "wants scales in float32 where there are zero points, got e8m0"
    return None


def units(
    groups: Groups, w: Few, num_experts: int, x_scale: Array | None = None, *, code: str,
    activation: str, config: TuningConfig = TuningConfig(),
) -> Array:  # fmt: skip
    """Returns the units of each row of a tile, [tiles * tile, F] in the dtype of the tokens.

    w: of gates, then of what they gate, [X * 2 * F, E]; x_scale: [tiles * tile], float32, what the
    sums of a row are multiplied with. What is of no expert is anything. arXiv:2002.05202.

    Raises:
      ValueError: what `refuses` says.
    """
    if why := refuses(groups.x, w, num_experts, code, groups.tile, activation, config):
        raise ValueError(f"quantized_grouped {why}")
    outputs = w.weight.shape[0] // num_experts // HALVES
    out = jax.ShapeDtypeStruct((groups.x.shape[0], outputs), groups.x.dtype)
    return _call(groups, w, num_experts, x_scale, out, code, activation, config)


def outputs(
    groups: Groups, w: Few, num_experts: int, shape: tuple[int, int], x_scale: Array | None = None,
    *, code: str, config: TuningConfig = TuningConfig(),
) -> Array:  # fmt: skip
    """Returns what each expert of a token gives, weighed: [k, T, E] in `config.dtype`.

    groups: with units in place of tokens, [tiles * tile, F]; w: [X * E, F]; shape: T and k;
    x_scale: as of `units`. What is of no expert is anything.

    Raises:
      ValueError: what `refuses` says.
    """
    if why := refuses(groups.x, w, num_experts, code, groups.tile, None, config):
        raise ValueError(f"quantized_grouped {why}")
    (T, k), E = shape, w.weight.shape[0] // num_experts
    out = jax.ShapeDtypeStruct((k, T, E), jnp.dtype(config.dtype))
    return _call(groups, w, num_experts, x_scale, out, code, None, config)


def _call(
    groups: Groups, w: Few, num_experts: int, x_scale: Array | None, out: Any, code: str,
    activation: str | None, config: TuningConfig,
) -> Array:  # fmt: skip
    given: dict[str, Array | None] = dict(
        x=groups.x, w=w.weight, scale=w.scale, expert=groups.expert, rows=groups.rows,
        count=groups.num_tiles, zero=w.zero, bias=w.bias, x_scale=x_scale,
    )  # fmt: skip
    if activation is None:
        given |= dict(route=groups.route, weight=groups.weight)
    read = {name: array for name, array in given.items() if array is not None}
    s = _static(groups, w, num_experts, code, activation, config)._replace(names=tuple(read))
    f, pieces, width = s.form, s.form.terms // PIECE, s.width
    return plgpu.kernel(
        functools.partial(_kernel, s),
        out_type=out,
        scratch_types=dict(
            w_smem=plgpu.SMEM(
                (f.stages, HALVES * ROWS, width), w.weight.dtype,
                transforms=mosaic.tiled(min(width & -width, 128), 1),
            ),
            x_smem=plgpu.SMEM(
                (f.stages, pieces, s.tile, PIECE), groups.x.dtype,
                transforms=mosaic.tiled(PIECE, 2),
            ),
            kept=plgpu.SMEM((HALVES * s.turns, 1 + (w.zero is not None), f.kept), jnp.float32),
            other=plgpu.SMEM((s.places, ROWS, s.tile) if s.places else (1, 8, 8), jnp.float32),
            full=plgpu.Barrier(num_arrivals=HALVES + pieces, num_barriers=f.stages),
            free=plgpu.Barrier(num_arrivals=HALVES, num_barriers=f.stages),
            told=plgpu.Barrier(num_arrivals=1, num_barriers=HALVES + 1),
            taken=plgpu.Barrier(num_arrivals=1, num_barriers=HALVES + 1),
        ),
        grid=(s.ctas,), grid_names=("block",), num_threads=HALVES * s.turns + 1, thread_name="wg",
        kernel_name="quantized_grouped", compiler_params=COMPILER,
    )(*read.values())  # fmt: skip


def _terms(E: int) -> int:
    """Returns the terms of a step of sums of E, a multiple of 64."""
    return next(terms for terms in TERMS if E % terms == 0)


def _places(turns: int, activation: str | None) -> int:
    """Returns the places for sums that warpgroups give each other: of turns, then of gates."""
    return HALVES * (turns > 1) + (activation is not None)


def _static(
    groups: Groups, w: Few, num_experts: int, code: str, activation: str | None, c: TuningConfig
) -> _Static:
    """Shares the work out."""
    E, tile = groups.x.shape[1], groups.tile
    height, num_scales = w.weight.shape[0] // num_experts, w.scale.shape[1]
    terms = _terms(E)
    size = terms * (2 * tile + HALVES * ROWS // widen.PACKED[code])
    # Sums with zero points, or with exponents, are of terms that share a scale, be they all.
    parted = num_scales > 1 or w.zero is not None or w.scale.dtype == jnp.uint8
    group = E // num_scales if parted else 0
    # As many steps in each turn: one behind the last reads zeros.
    steps, run = -(-E // (terms * c.turns)) * c.turns, w.weight.shape[0] // w.scale.shape[0]
    form = Form(code, tile, terms, steps, run, group, num_scales, 0, c.turns)
    left = SMEM_BYTES - _places(c.turns, activation) * 4 * ROWS * tile - 2048
    left -= HALVES * c.turns * form.kept * (1 + (w.zero is not None)) * 4
    stages = min(c.stages, left // size)
    stages -= stages % c.turns  # a place is of one turn's steps for ever
    form = form._replace(stages=stages)
    outputs = height // HALVES if activation else height
    step, gap = (ROWS, outputs) if activation else (HALVES * ROWS, ROWS)
    blocks = -(-outputs // step)
    return _Static(form, height, step, gap, blocks, outputs, c.num_ctas, activation, ())


def _kernel(
    s: _Static, *refs: Ref, w_smem: Ref, x_smem: Ref, kept: Ref, other: Ref, full: Barrier,
    free: Barrier, told: Barrier, taken: Barrier,
) -> None:  # fmt: skip
    wg, block = lax.axis_index("wg"), lax.axis_index("block")
    *given, out = refs
    at = dict(zip(s.names, given, strict=True))
    held = Held(at["scale"], at.get("zero"), kept.at[wg], w_smem, x_smem, full, free)

    @pl.when(wg < HALVES * s.turns)
    def _() -> None:
        plgpu.set_max_registers(REGISTERS[s.turns][0], action="increase")
        plgpu.griddepcontrol_wait()
        _compute(s, wg, block, at, held, out, other, told, taken)

    @pl.when(wg == HALVES * s.turns)
    def _() -> None:
        plgpu.set_max_registers(REGISTERS[s.turns][1], action="decrease")
        _fetch(s, block, at, held)


def _rounds(s: _Static, block: Array, at: dict[str, Ref]) -> Array:
    """Returns how many pieces of work a block of the grid has."""
    return lax.div(at["count"][0] * s.blocks - block + s.ctas - 1, s.ctas)


def _fetch(s: _Static, block: Array, at: dict[str, Ref], held: Held) -> None:
    """Copies weights and tokens, step by step of each piece of work."""
    f, width = s.form, s.width
    if s.activation:  # the groups are what the kernel before makes
        plgpu.griddepcontrol_wait()
    total = _rounds(s, block, at) * f.steps
    ahead = jnp.minimum(f.stages, total)

    def place(step: Index) -> tuple[Array, Array, Array, Array]:
        tile, part = s.item(block, lax.div(step, f.steps))
        return tile, part, lax.rem(step, f.steps), lax.rem(step, f.stages)

    def weights(step: Index) -> None:
        tile, part, n, slot = place(step)
        first = at["expert"][tile] * s.height + part * s.step
        for i in range(HALVES):
            source = at["w"].at[pl.ds(first + i * s.gap, ROWS), pl.ds(n * width, width)]
            target = held.w.at[slot, pl.ds(i * ROWS, ROWS)]
            mosaic.copy_gmem_to_smem(source, target, held.full.at[slot])

    def tokens(step: Index) -> None:
        tile, _, n, slot = place(step)
        for i in range(f.terms // PIECE):
            terms = pl.ds(n * f.terms + i * PIECE, PIECE)
            source = at["x"].at[pl.ds(tile * s.tile, s.tile), terms]
            mosaic.copy_gmem_to_smem(source, held.x.at[slot, i], held.full.at[slot])

    def wait(step: Array) -> None:
        mosaic.barrier_wait(held.free.at[lax.rem(step, f.stages)])

    copies.begin(ahead, HALVES * ROWS * width, weights, tokens)
    copies.each(ahead, total, wait, weights, tokens)


def _compute(
    s: _Static, wg: Array, block: Array, at: dict[str, Ref], held: Held, out: Ref, other: Ref,
    told: Barrier, taken: Barrier,
) -> None:  # fmt: skip
    """Sums up one half of each piece of work."""
    f, half, turn = s.form, lax.rem(wg, HALVES), lax.div(wg, HALVES)
    by_sums = f.group and f.group % PIECE == 0 and at["scale"].dtype == jnp.float32
    sums = exact if by_sums else rounded

    def one(r: Array, _: None) -> None:
        tile, part = s.item(block, r)
        row = part * s.step + half * s.gap
        first = at["expert"][tile] * s.height + row
        y = sums(f, held, Sum(half, turn if s.turns > 1 else 0, r * f.steps, 0, first))

        def finish(y: Array) -> None:
            if "x_scale" in at:
                y = y * by_token(at["x_scale"], tile, s.tile)
            if "bias" in at:
                y = y + expert_tile.biases(at["bias"], first, s.tile)
            if s.activation:
                meet = functools.partial(
                    _meet, r, y, other.at[s.places - 1], told.at[HALVES], taken.at[HALVES]
                )
                meet(half == 1, half == 0, functools.partial(_gate, s, tile, part, at, out))
            else:
                _leave(s, tile, row, y, at, out)

        if s.turns == 1:
            finish(y)
        else:
            meet = functools.partial(_meet, r, y, other.at[half], told.at[half], taken.at[half])
            meet(turn > 0, turn == 0, lambda y, load: finish(y + load(0, s.tile)))
        return _

    lax.fori_loop(0, _rounds(s, block, at), one, None)


def _meet(
    r: Array, y: Array, place: Ref, told: Barrier, taken: Barrier, gives: Array, takes: Array,
    act: Callable[[Array, Callable[[int, int], Array]], None],
) -> None:  # fmt: skip
    """Has a warpgroup that `takes` act on its y, and on that of the one that `gives` its own.

    act: (y, (first column, columns) -> those of the other's y).
    """

    @pl.when(gives)
    def _() -> None:
        pl.when(r > 0)(lambda: mosaic.barrier_wait(taken))
        put(place, y)
        mosaic.barrier_arrive(told)

    def load(start: int, size: int) -> Array:
        source = place.at[:, pl.ds(start, size)]
        return mosaic.load(source, layout=plgpu.Layout.WGMMA, optimized=False)

    @pl.when(takes)
    def _() -> None:
        mosaic.barrier_wait(told)
        act(y, load)
        mosaic.barrier_arrive(taken)


def _gate(
    s: _Static, tile: Array, part: Array, at: dict[str, Ref], out: Ref, y: Array,
    load: Callable[[int, int], Array],
) -> None:  # fmt: skip
    """Writes the units of gates and of what they gate."""
    rows, size = at["rows"][tile], min(AT_ONCE, s.tile)
    for start in range(0, s.tile, size):
        gate = lax.slice(y, (0, start), (ROWS, start + size))
        made = expert_tile.activate(gate, load(start, size), str(s.activation)).astype(out.dtype)
        mine = pl.ds(tile * s.tile + start, size), pl.ds(part * ROWS, ROWS)
        put_columns(made, out.at[mine], jnp.maximum(rows - start, 0))


def _leave(s: _Static, tile: Array, row: Array, y: Array, at: dict[str, Ref], out: Ref) -> None:
    """Weighs outputs and leaves them by route."""
    routes, num = by_token(at["route"], tile, s.tile), at["rows"][tile]
    y = (y * by_token(at["weight"], tile, s.tile)).astype(out.dtype)
    write = functools.partial(put_routed, y, routes, out, num, row)
    # The last piece of work has one half where outputs are 64 times an odd number.
    pl.when(row < s.outputs)(write) if s.outputs % s.step else write()
