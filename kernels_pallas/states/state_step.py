"""Matrices of requests carried on over a few tokens, each read once and written in place.

A thread block has a part of one matrix in the registers of a warpgroup, from its load until behind
the last token. Tokens are summed up along one axis of a matrix; parts are cut along the other one,
and each warp has whole sums of its own: nothing passes through shared memory.
"""

from dataclasses import dataclass
import functools
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from jaxrunner.kernels_pallas import mosaic, pdl
from jaxrunner.kernels_pallas.mosaic import Layout, Ref
from jaxrunner.kernels_pallas.stores import put
from jaxrunner.types import Array

LANES, WARPS = 32, 4  # of a warpgroup, the thread of Mosaic
DTYPES = (jnp.float32, jnp.bfloat16)  # of states
BYTES = 16  # that a thread loads at once
LANES_OF_RUNS = (2, 4, 8, 16)  # 32 to 256 bytes of a row
MAX_SHARED = 4  # neighbours of a thread, which Mosaic adds up over warps
MAX_NUMBERS = 8192  # of a part, 64 a thread: twice as many would leave room for two blocks
BLOCKS = 528  # four thread blocks a multiprocessor of H200: below that, parts are smaller


@dataclass(frozen=True)
class TuningConfig:
    """How matrices are cut."""

    numbers: int = 4096  # of a part, 32 a thread; fewer where there are few matrices
    # Whether warps add their sums up in shared memory, where keys lie along rows: they wait for one
    # another, and each reads longer runs of a row.
    shared: bool = False


class Rows(NamedTuple):
    """Where the matrices of each row are, by their index, and its tokens."""

    source: Array  # [B], int32, before its first token; N for zeros
    place: Array  # [B, P], int32, behind its first token; N for fewer than P places
    start: Array  # [B], int32, its first token
    num: Array  # [B], int32, its tokens
    waiting: Array  # [B], int32, of K tokens those that come before the first


class Tokens(NamedTuple):
    """The inputs of each token, float32; heads share keys and queries by groups."""

    value: Array  # [T, H, X]
    key: Array  # [T, G, Y]
    query: Array | None  # [T, G, Y]; None where the matrices are not read
    keep: Array  # [T, H], what the matrices are multiplied with
    beta: Array | None = None  # [T, H], how much of the value at a key gives way; None: none does


def refuses(
    states: Any, rows: Rows, tokens: Tokens, *, axis: int, query_len: int = 0,
    waiting: Tokens | None = None, config: TuningConfig = TuningConfig(),
) -> str | None:  # fmt: skip
    """Returns why these shapes and dtypes are not served, None if they are."""
    if states.ndim != 4 or states.dtype not in DTYPES:
        names = " or ".join(jnp.dtype(d).name for d in DTYPES)
        return f"wants states in {names}, [N, H, rows, columns], got {states}"
    _, H, *sizes = states.shape
    (T, G, Y), B, X = tokens.key.shape, rows.num.shape[0], sizes[1 - axis]
    for of in (tokens, waiting or tokens):
        T = of.key.shape[0]
        shapes = (T, H, X), (T, G, Y), (T, G, Y), (T, H), (T, H)
        for name, x, shape in zip(Tokens._fields, of, shapes, strict=True):
            if x is not None and (x.shape != shape or x.dtype != jnp.float32):
                return f"wants {name} in float32, {list(shape)}, got {x}"
    if Y != sizes[axis] or not G or H % G:
        return f"wants keys of {sizes[axis]} for groups of {H} heads, got {list(tokens.key.shape)}"
    if query_len and tokens.key.shape[0] != B * query_len:
        return f"wants query_len={query_len} places of {B} rows, got {tokens.key.shape[0]} tokens"
    if waiting is not None and waiting.key.shape[0] % B:
        return f"wants as many waiting tokens of each of {B} rows, got {waiting.key.shape[0]}"
    if not _cuts(states, axis, config.shared):
        return f"wants matrices that warps share in parts of at most {MAX_NUMBERS}, got {sizes}"
    return None


def state_step(
    states: Array, rows: Rows, tokens: Tokens, *, axis: int, query_len: int = 0,
    waiting: Tokens | None = None, config: TuningConfig = TuningConfig(), interpret: Any = None,
) -> tuple[Array, Array]:  # fmt: skip
    """Carries matrices S of rows on, a token after the other, and reads them by a query.

    S = keep S, then S += value key', or beta (value - S key) key' if there is beta; out = S query.
    Keys lie along `axis` of a matrix, values along the other one: 1 of a state space, 0 of a delta
    rule. Behind each token S is rounded to the dtype of `states`.

    states: [N, H, rows, columns], written in place where the caller donates them, once a row: S
    behind its first token, whose first place must be below N. Rows without tokens touch nothing.
    query_len: places that each row has for its tokens, side by side in the order of rows; 0 if they
    have as many as tokens. waiting: K tokens of each row, without queries, of which `rows.waiting`
    come before the row's own. Where it is None, rows have a token at most.
    Returns the states and out, [T, H, X], zeros for tokens of no row.

    Raises:
      ValueError: what `refuses` says.
    """
    static = dict[str, Any](axis=axis, query_len=query_len)
    if why := refuses(states, rows, tokens, waiting=waiting, config=config, **static):
        raise ValueError(f"state_step {why}")
    (_, H, *size), B = states.shape, rows.num.shape[0]
    width, lanes = _cut(states, axis, B * H, config)
    shape = jax.ShapeDtypeStruct(tokens.value.shape, jnp.float32)
    held = jax.new_ref(states)
    zeros = []
    if not query_len:  # padding is of no row: zeros are written before
        # They follow the values: XLA would make the zeros of all layers at once, and hold them.
        zero, value = lax.optimization_barrier((jnp.zeros((), jnp.float32), tokens.value))
        tokens = tokens._replace(value=value)
        zeros = [jax.new_ref(lax.broadcast(zero, shape.shape))]
    given, tree = jax.tree.flatten((tokens, waiting))
    layout = _layout(axis, lanes, states.dtype, config.shared)
    static |= dict(width=width, layout=layout, tree=tree)
    made = plgpu.kernel(
        functools.partial(_kernel, **static, is_device=interpret is None),
        out_type=(shape,) if query_len else (),
        grid=(B, H, size[1 - axis] // width),
        grid_names=("row", "head", "part"),
        kernel_name="state_step",
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
        interpret=interpret,
    )(held, *rows, *given, *zeros)
    (out,) = made or map(jax.freeze, zeros)
    return jax.freeze(held), out


def _kernel(
    states: Ref, source_ref: Ref, place_ref: Ref, start_ref: Ref, num_ref: Ref, waiting_ref: Ref,
    *refs: Ref, axis: int, query_len: int, width: int, layout: Layout, tree: Any, is_device: bool,
) -> None:  # fmt: skip
    pdl.begin(is_device)
    *given, out = refs
    tokens, waiting = jax.tree.unflatten(tree, given)  # references in place of arrays
    (N, H, *size), G = states.shape, tokens.key.shape[1]
    row, head, part = (lax.axis_index(name) for name in ("row", "head", "part"))
    source, start, num = source_ref[row], start_ref[row], num_ref[row]
    group, mine = lax.div(head, H // G), pl.ds(part * width, width)
    size[1 - axis] = width
    load = functools.partial(mosaic.load, optimized=False)
    along, across = layout.reduce(axis), layout.reduce(1 - axis)

    def spread(x: Array, dim: int) -> Array:
        return lax.broadcast_in_dim(x, tuple(size), [dim])

    def state_at(place: Array) -> Ref:
        return states.at[place, head, mine] if axis else states.at[place, head, :, mine]

    def take_in(of: Any, t: Any, state: Array) -> Array:
        """Returns the matrix behind a token."""
        value = load(of.value.at[t, head, mine], layout=along)
        key = spread(load(of.key.at[t, group], layout=across), axis)
        state = of.keep[t, head] * state
        if of.beta is not None:
            value = of.beta[t, head] * (value - (state * key).sum(axis))
        return state + spread(value, 1 - axis) * key

    def rounded(state: Array) -> Array:
        return state.astype(states.dtype).astype(jnp.float32)  # as if each token had a step

    def carry_on(j: Any, state: Array) -> Array:
        """Takes in token j of the row, which reads the matrix behind it."""
        t = start + j
        state = take_in(tokens, t, state)
        query = spread(load(tokens.query.at[t, group], layout=across), axis)
        put(out.at[t, head, mine], (state * query).sum(axis))
        return rounded(state)

    # Whoever had the block of a new row before is not read. `num` is looked at behind the load:
    # else one would wait for the other.
    state = lax.cond(
        source < N,
        lambda: load(state_at(source), layout=layout).astype(jnp.float32),
        lambda: plgpu.layout_cast(jnp.zeros(tuple(size), jnp.float32), layout),
    )

    @pl.when(num > 0)
    def _() -> None:
        behind = state
        if waiting is not None:
            K = waiting.key.shape[0] // num_ref.shape[0]

            def replay(k: Array, state: Array) -> Array:
                return rounded(take_in(waiting, row * K + k, state))

            behind = lax.fori_loop(0, waiting_ref[row], replay, behind)
        first = carry_on(0, behind)
        put(state_at(place_ref[row, 0]), first.astype(states.dtype))
        for nth in range(1, place_ref.shape[1]):
            pl.when(place_ref[row, nth] < N)(
                lambda nth=nth: put(state_at(place_ref[row, nth]), first.astype(states.dtype))
            )
        if waiting is not None:
            lax.fori_loop(1, num, carry_on, first)

    if query_len:
        nothing = plgpu.layout_cast(jnp.zeros((width,), jnp.float32), along)

        def put_nothing(j: Array, carried: None) -> None:
            put(out.at[start + j, head, mine], nothing)

        lax.fori_loop(num, query_len, put_nothing, None)


def _cut(states: Any, axis: int, matrices: int, config: TuningConfig) -> tuple[int, int]:
    """Returns the best of `_cuts`: large parts, as far as there are enough of them."""
    cuts, (size, other) = _cuts(states, axis, config.shared), _sides(states, axis)
    full = [
        (width, lanes)
        for width, lanes in cuts
        if width * other <= config.numbers and matrices * (size // width) >= BLOCKS
    ]
    return max(full or [cut for cut in cuts if cut[0] == min(cuts)[0]])


def _cuts(states: Any, axis: int, shared: bool) -> list[tuple[int, int]]:
    """Returns how much of its axis a part can have, and the lanes that share a run of a row."""
    (size, other), found = _sides(states, axis), []
    for lanes in LANES_OF_RUNS:
        (tall, wide), _, _ = _tiles(axis, lanes, states.dtype, shared)
        unit, step = (tall, wide) if axis else (wide, tall)
        if size % unit == other % step == 0:
            widths = range(unit, min(size, MAX_NUMBERS // other) + 1, unit)
            found += [(width, lanes) for width in widths if size % width == 0]
    return found


def _sides(states: Any, axis: int) -> tuple[int, int]:
    """Returns the sizes of a matrix along the axis that is cut and along that of sums."""
    return states.shape[3 - axis], states.shape[2 + axis]


def _tiles(axis: int, lanes: int, dtype: Any, shared: bool) -> tuple[tuple[int, ...], ...]:
    """Returns what a warpgroup, a warp and a thread load at once, in rows and columns.

    Warps lie side by side along the axis that parts are cut on, unless they share sums.
    """
    vec = min(BYTES // dtype.itemsize, MAX_SHARED if shared else BYTES)
    tall, wide = LANES // lanes, lanes * vec
    block = (WARPS * tall, wide) if axis or shared else (tall, WARPS * wide)
    return block, (tall, wide), (vec,)


def _layout(axis: int, lanes: int, dtype: Any, shared: bool) -> Layout:
    tiling = plgpu.Tiling(_tiles(axis, lanes, dtype, shared))
    return plgpu.Layout.TILED(tiling, (-5 if axis or shared else -4,), (-3, -2), -1)
