"""Matrices of requests carried on over many tokens, a chunk after the other, on Hopper.

A warpgroup has the part of one head's matrix that belongs to 64 of its values, from its load until
behind the last token of a row. Within a chunk, tokens see those before them as in attention, with
decays in place of a softmax: arXiv:2405.21060, section 6, and for delta rules, whose chunks
`delta_chunks` solves first, arXiv:2412.06464. Two other warpgroups go ahead: they read what the
next chunk's products take, and one of them finds what its tokens see of one another. Products are
of float32 numbers, each in two of bfloat16 (`halves.py`).
"""

from collections.abc import Iterator
import contextlib
import functools
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from jaxrunner.kernels_pallas import mosaic
from jaxrunner.kernels_pallas.mosaic import TOO_OLD, Ref
from jaxrunner.kernels_pallas.states.halves import Halves, halves, pair, product, put_halves
from jaxrunner.kernels_pallas.stores import put
from jaxrunner.types import Array

CHUNK = 64  # tokens: the height of a Hopper matrix product
VALUES = 64  # numbers of a value that a thread block has
KEYS = (64, 128)  # numbers of a key; more would want more registers
DTYPES = (jnp.float32, jnp.bfloat16)  # of states
LAYOUT = plgpu.Layout.WGMMA
KEY_SLOTS = 2  # chunks whose keys are in shared memory
# Of a thread that computes, and of one that reads: 384 threads have 65,536.
REGISTERS = 216, 144
COMPILER = plgpu.CompilerParams(lowering_semantics=mgpu.LoweringSemantics.Lane)
PER_ROW, PER_COLUMN = LAYOUT.reduce(1), LAYOUT.reduce(0)


class Rows(NamedTuple):
    """Where the matrices of each row are, by their index, its tokens and its chunks."""

    source: Array  # [B], int32, before its first token; N for zeros
    place: Array  # [B], int32, behind its last token
    start: Array  # [B], int32, its first token
    num: Array  # [B], int32, its tokens; a row of none touches nothing
    chunk: Array  # [B], int32, its first chunk; the others follow


class Tokens(NamedTuple):
    """The inputs of each token, float32; heads share keys and queries by groups. Arrays of tokens
    have `CHUNK` more, of anything."""

    value: Array  # [T + CHUNK, H, X]; of a delta rule what `delta_chunks` made of it
    key: Array  # [T + CHUNK, G, Y]
    query: Array  # [T + CHUNK, G, Y]
    # [C, H, CHUNK], by chunk, the sum of the decays of its tokens so far; a decay is the logarithm
    # of what a token multiplies the matrices with, and 0 behind a chunk's last token.
    total: Array
    moved: Array | None = None  # [T + CHUNK, H, Y], what times the matrices is added to values


def refuses(states: Any, tokens: Tokens, *, axis: int) -> str | None:
    """Returns why these shapes and dtypes are not served, None if they are."""
    if TOO_OLD is not None:
        return TOO_OLD
    if states.ndim != 4 or states.dtype not in DTYPES:
        names = " or ".join(jnp.dtype(d).name for d in DTYPES)
        return f"wants states in {names}, [N, H, rows, columns], got {states}"
    _, H, *sizes = states.shape
    (T, G, _), X, Y = tokens.key.shape, sizes[1 - axis], sizes[axis]
    if Y not in KEYS or X % VALUES:
        return f"wants keys of 64 or 128 numbers and values of a multiple of {VALUES}, got {Y}, {X}"
    if not G or H % G:
        return f"wants heads that are a multiple of the groups, got {H} for {G}"
    shapes = (T, H, X), (T, G, Y), (T, G, Y), (tokens.total.shape[0], H, CHUNK), (T, H, Y)
    for name, x, shape in zip(Tokens._fields, tokens, shapes, strict=True):
        if x is not None and (x.shape != shape or x.dtype != jnp.float32):
            return f"wants {name} in float32, {list(shape)}, got {x}"
    return None


def state_chunks(
    states: Array, rows: Rows, tokens: Tokens, out: Array, *, axis: int, interpret: Any = None
) -> tuple[Array, Array]:
    """Carries matrices S of rows on by chunks of 64 tokens, and reads them by queries.

    S = exp(decay) S, then S += value key', where `tokens.moved` times the S before its chunk is
    added to the value; out = S query. Keys lie along `axis` of a matrix, values along the other
    one: 1 of a state space, 0 of a delta rule. Behind each chunk S is rounded to the dtype of
    `states`.

    states: [N, H, rows, columns], and out: [T, H, X], float32; both are written in place where the
    caller donates them. Nothing is read or written for tokens of no row. Returns both.

    Raises:
      ValueError: what `refuses` says.
    """
    if why := refuses(states, tokens, axis=axis):
        raise ValueError(f"state_chunks {why}")
    (_, H, *sizes), B = states.shape, rows.num.shape[0]
    held, made = jax.new_ref(states), jax.new_ref(out)
    given, tree = jax.tree.flatten(tokens)
    plgpu.kernel(
        functools.partial(_kernel, axis=axis, tree=tree, is_device=interpret is None),
        out_type=(),
        scratch_types=_scratch(sizes[axis], axis, tokens.moved is not None),
        grid=(H, sizes[1 - axis] // VALUES, B),
        grid_names=("head", "part", "row"),
        num_threads=3,
        thread_name="wg",
        kernel_name="state_chunks",
        compiler_params=COMPILER,
        interpret=interpret,
    )(held, made, *rows, *given)
    return jax.freeze(held), jax.freeze(made)


def _scratch(Y: int, axis: int, moves: bool) -> dict[str, Any]:
    """Returns what a block of the grid allocates: a high and a low half of all, but for rows."""
    tiled = mosaic.tiled(64, 2)

    def both(*shape: int) -> Any:
        return plgpu.SMEM((*shape[:-2], 2, *shape[-2:]), jnp.bfloat16, transforms=tiled)

    state, slots = (VALUES, Y) if axis else (Y, VALUES), plgpu.Barrier(num_barriers=KEY_SLOTS)
    one = plgpu.Barrier()
    moved = dict(moved=both(1, CHUNK, Y), moved_full=one, moved_free=one) if moves else {}
    return moved | dict(
        state=both(*state), value=both(CHUNK, VALUES), gained=both(CHUNK, VALUES),
        rows=plgpu.SMEM((CHUNK, VALUES), jnp.float32),
        key=both(KEY_SLOTS, CHUNK, Y), key_full=slots, key_free=slots,
        query=both(1, CHUNK, Y), query_full=one, query_free=plgpu.Barrier(num_arrivals=2),
        scores=both(1, CHUNK, CHUNK), scores_full=one, scores_free=one,
    )  # fmt: skip


class Decays(NamedTuple):
    """The decay factors within a chunk, [C] each."""

    grown: Array  # of the matrices before the chunk, at each token
    left: Array  # of what each token brought, behind the chunk
    whole: Array  # of the matrices before the chunk, behind it, alike for all


def decays(total: Ref) -> Decays:
    """Returns what is left at the ends of a chunk, given the sum of decays up to each token."""
    at, last = mosaic.load(total, layout=PER_ROW, optimized=False), total[CHUNK - 1]
    whole = plgpu.layout_cast(jnp.full((CHUNK,), jnp.exp(last)), PER_ROW)
    return Decays(jnp.exp(at), jnp.exp(last - at), whole)


def since(total: Ref) -> Array:
    """Returns what is left of token j at token i, [C, C]; 0 where j is behind i."""
    shape = CHUNK, CHUNK
    i, j = (plgpu.broadcasted_iota(jnp.int32, shape, dim, layout=LAYOUT) for dim in (0, 1))
    at = mosaic.load(total, layout=PER_ROW, optimized=False)
    before = mosaic.load(total, layout=PER_COLUMN, optimized=False)
    apart = lax.broadcast_in_dim(at, shape, [0]) - lax.broadcast_in_dim(before, shape, [1])
    return jnp.where(j <= i, jnp.exp(apart), 0.0)


def tokens_of(ref: Ref, num: Array) -> Array:
    """Returns the rows of a reference, [C, n]; zeros for those behind the first `num`."""
    x = mosaic.load(ref, layout=LAYOUT, optimized=False)
    row = plgpu.broadcasted_iota(jnp.int32, x.shape, 0, layout=LAYOUT)
    return jnp.where(row < num, x, 0.0)


class _Item(NamedTuple):
    """The work item of a thread block."""

    head: Array
    group: Array
    part: Array
    source: Array
    place: Array
    start: Array
    num: Array
    chunk: Array  # its first one

    def chunks(self) -> Array:
        return lax.div(self.num + CHUNK - 1, CHUNK)

    def tokens(self, c: Array) -> Any:
        return pl.ds(self.start + c * CHUNK, CHUNK)


def _kernel(
    states: Ref, out: Ref, source: Ref, place: Ref, start: Ref, num: Ref, chunk: Ref, *given: Ref,
    axis: int, tree: Any, is_device: bool, **smem: Any,
) -> None:  # fmt: skip
    tokens = jax.tree.unflatten(tree, given)  # references in place of arrays
    head, part, row, wg = (lax.axis_index(name) for name in ("head", "part", "row", "wg"))
    group = lax.div(head, states.shape[1] // tokens.key.shape[1])
    item = _Item(head, group, part, *(r[row] for r in (source, place, start, num, chunk)))

    def registers(k: int, action: Any) -> None:
        if is_device:  # an interpreter of kernels knows no registers
            plgpu.set_max_registers(REGISTERS[k], action=action)

    @pl.when((item.num > 0) & (wg == 0))
    def _() -> None:
        registers(0, "increase")
        _carry_on(item, tokens, states, out, axis, smem)

    @pl.when((item.num > 0) & (wg == 1))
    def _() -> None:
        registers(1, "decrease")
        _fetch(item, dict(key=tokens.key.at[:, group]), smem, tokens.total)

    @pl.when((item.num > 0) & (wg == 2))
    def _() -> None:
        registers(1, "decrease")
        moved = {} if tokens.moved is None else dict(moved=tokens.moved.at[:, head])
        _fetch(item, moved | dict(query=tokens.query.at[:, group]), smem)


def _fetch(
    item: _Item, given: dict[str, Ref], smem: dict[str, Any], total: Ref | None = None
) -> None:  # fmt: skip
    """Reads what each chunk's products take, and leaves both halves of it in shared memory.

    total: as in `Tokens`; with it, scores are left there too.
    """

    def leave(name: str, slot: Array | int, x: Halves) -> None:
        mosaic.barrier_wait(_barrier(smem, name, "free", slot))
        for k, half in enumerate(x):
            smem[name].at[slot, k][...] = half
        plgpu.commit_smem()
        mosaic.barrier_arrive(_barrier(smem, name, "full", slot))

    def fetch(c: Array, carried: None) -> None:
        for name, ref in given.items():
            x = halves(tokens_of(ref.at[item.tokens(c)], item.num - c * CHUNK))
            leave(name, lax.rem(c, smem[name].shape[0]), x)
        if total is not None:
            key = pair(smem["key"].at[lax.rem(c, KEY_SLOTS)])
            with _read(smem, "query") as query:
                scores = product(query, key.T)
            leave("scores", 0, halves(scores * since(total.at[item.chunk + c, item.head])))

    left = [*given, *(() if total is None else ("scores",))]
    if total is not None:
        mosaic.barrier_arrive(smem["query_free"])
    lax.fori_loop(0, item.chunks(), fetch, None)
    for name in left:
        for slot in range(smem[name].shape[0]):
            mosaic.barrier_wait(_barrier(smem, name, "free", slot))


def _carry_on(
    item: _Item, tokens: Any, states: Ref, out: Ref, axis: int, smem: dict[str, Any]
) -> None:
    """Carries the part of a matrix on, and reads it, chunk by chunk."""
    head, mine, Y = item.head, pl.ds(item.part * VALUES, VALUES), tokens.key.shape[2]
    tall, wide = (VALUES, Y) if axis else (Y, VALUES)
    tiles = [pl.ds(at, CHUNK) for at in range(0, tall, CHUNK)]  # of a matrix, by its rows
    value, gained, held = (pair(smem[name]) for name in ("value", "gained", "state"))
    before = held.T if axis else held  # keys along rows

    def place_of(index: Array, tile: Any) -> Ref:
        return states.at[index, head, mine] if axis else states.at[index, head, tile, mine]

    def hold(state: list[Array]) -> None:
        for tile, x in zip(tiles, state, strict=True):
            put_halves(x, held, tile)

    def chunk(c: Array, state: list[Array]) -> list[Array]:
        there, slot = item.num - c * CHUNK, lax.rem(c, KEY_SLOTS)
        left = decays(tokens.total.at[item.chunk + c, head])
        moved = tokens_of(tokens.value.at[item.tokens(c), head, mine], there)
        if tokens.moved is not None:
            with _read(smem, "moved") as moving:
                moved = moved + product(moving, before)
        behind_chunk = moved * _spread(left.left, VALUES)
        put_halves(moved, value)
        put_halves(behind_chunk, gained)
        plgpu.commit_smem()
        with _read(smem, "query") as query:
            read = product(query, before) * _spread(left.grown, VALUES)
        with _read(smem, "scores") as scores:
            read = read + product(scores, value)
        with _read(smem, "key", slot) as key:
            behind = []
            for tile, x in zip(tiles, state, strict=True):
                keys = Halves(*(k.at[:, tile] for k in key)) if not axis else key
                into = (gained.T, keys) if axis else (keys.T, gained)
                x = x * _spread(left.whole, wide) + product(*into)
                behind.append(x.astype(states.dtype).astype(jnp.float32))
        hold(behind)
        plgpu.commit_smem()
        _put_tokens(read, out.at[:, head, mine], smem["rows"], item.start + c * CHUNK, there)
        return behind

    for name in ("key", "query", "scores", "moved")[: 3 + (tokens.moved is not None)]:
        for slot in range(smem[name].shape[0]):
            mosaic.barrier_arrive(_barrier(smem, name, "free", slot))
    # Whoever had the block of a new row before is not read.
    state = [
        lax.cond(
            item.source < states.shape[0],
            lambda tile=tile: mosaic.load(
                place_of(item.source, tile), layout=LAYOUT, optimized=False
            ).astype(jnp.float32),
            lambda: plgpu.layout_cast(jnp.zeros((CHUNK, wide), jnp.float32), LAYOUT),
        )
        for tile in tiles
    ]
    hold(state)
    plgpu.commit_smem()
    state = lax.fori_loop(0, item.chunks(), chunk, state)
    for tile, x in zip(tiles, state, strict=True):
        put(place_of(item.place, tile), x.astype(states.dtype))


@contextlib.contextmanager
def _read(smem: dict[str, Any], name: str, slot: Array | int = 0) -> Iterator[Halves]:
    """Waits for what was fetched, and gives its place back once it was read."""
    mosaic.barrier_wait(_barrier(smem, name, "full", slot))
    yield pair(smem[name].at[slot])
    mosaic.barrier_arrive(_barrier(smem, name, "free", slot))


def _barrier(smem: dict[str, Any], name: str, state: str, slot: Array | int) -> Any:
    barrier = smem[f"{name}_{state}"]
    return barrier.at[slot] if smem[name].shape[0] > 1 else barrier


def _spread(x: Array, wide: int) -> Array:
    return lax.broadcast_in_dim(x, (CHUNK, wide), [0])


def _put_tokens(x: Array, out: Ref, place: Ref, first: Array, num: Array) -> None:
    """Writes the first `num` rows of x, [C, n], to those of out, [T, n], from `first` on; by way of
    `place`, [C, n] in shared memory, where not all are there."""
    pl.when(num >= CHUNK)(lambda: put(out.at[pl.ds(first, CHUNK)], x))

    @pl.when(num < CHUNK)
    def _() -> None:
        put(place, x)
        plgpu.commit_smem()

        def put_row(i: Array, carried: None) -> None:
            put(out.at[first + i], mosaic.load(place.at[i], layout=PER_COLUMN, optimized=False))

        lax.fori_loop(0, num, put_row, None)
