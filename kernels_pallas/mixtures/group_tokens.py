"""Tokens sorted by the experts that they are sent to, on Hopper (Mosaic GPU): a counting sort.

The tokens of an expert lie side by side and begin at a tile, of which the last ones may be partly
empty. A block of the grid finds the places of its tokens and copies them there. Each counts the
tokens of all experts for itself, which is quicker than to wait for another block; of many tokens a
kernel before it has counted those of parts of the step, and a block counts within its own part.
"""

import functools
from typing import NamedTuple

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from jaxrunner.kernels_pallas import lanes, pdl
from jaxrunner.kernels_pallas.lanes import LANES
from jaxrunner.kernels_pallas.mosaic import TOO_OLD, Ref, Shaped
from jaxrunner.types import Array

MAX_ROUTES = 1 << 12  # tokens times experts of a token: what a block reads
MAX_EXPERTS = 4 * LANES
BLOCKS = 1 << 10  # of a grid, about as many as run at a time
PARTS = 32, 128  # of a step whose routes are too many for one block, at least and at most
LEAST = 8  # rows of the smallest tile


class Groups(NamedTuple):
    """Tokens by expert, in tiles of `tile` rows; or one token, of which each route is a tile."""

    x: Array  # [tiles * tile, E]; rows of no token are anything; [1, E] of one token
    route: Array  # [tiles * tile], which of T * k routes a row is; [k] of one token
    weight: Array  # [tiles * tile], what that route counts, float32; [k] of one token
    expert: Array  # [tiles], the expert of a tile; of the first `num_tiles[0]`
    rows: Array  # [tiles], how many of a tile's rows have tokens
    num_tiles: Array  # [1]

    @property
    def is_one(self) -> bool:
        """Whether it is one token, the first row of each tile."""
        return self.x.shape[0] == 1

    @property
    def tile(self) -> int:
        """Rows of a tile."""
        return LEAST if self.is_one else self.x.shape[0] // self.expert.shape[0]


def max_tiles(routes: int, experts: int, tile: int) -> int:
    """Returns the most tiles that so many routes may take."""
    return min(routes, routes // tile + experts)


class _Sizes(NamedTuple):
    """What the blocks of a grid share out, the last ones maybe less."""

    tokens: int
    k: int  # experts of a token
    own: int  # tokens of a block
    part: int  # tokens of a part, a multiple of `own`; all of them where there is one part

    @property
    def parts(self) -> int:
        """Returns how many parts there are, or one too many where a part has no room."""
        return -(-self.tokens // self.part) if self.part else PARTS[1] + 1


def _sizes(tokens: int, k: int) -> _Sizes:
    if tokens * k <= MAX_ROUTES:
        return _Sizes(tokens, k, 1, tokens)
    own = -(-tokens // BLOCKS)
    blocks = min(-(-tokens // (PARTS[0] * own)), MAX_ROUTES // (k * own))  # of a part
    return _Sizes(tokens, k, own, own * blocks)


def refuses(x: Shaped, experts: Shaped, num_experts: int) -> str | None:
    """Says why x, [T, E], and experts, [T, k], are not served; None if they are."""
    if TOO_OLD is not None:
        return TOO_OLD
    if x.dtype not in (jnp.bfloat16, jnp.float16):
        return f"wants tokens in bfloat16 or float16, got {x.dtype}"
    if x.shape[1] % 2 or x.shape[1] < 2 * LANES:
        return f"wants tokens of an even count of at least {2 * LANES} numbers, got {x.shape[1]}"
    T, k = experts.shape
    if k > LANES:
        return f"wants at most {LANES} experts a token, got {k}"
    if _sizes(T, k).parts > PARTS[1]:
        return f"wants at most about {PARTS[1]} x {MAX_ROUTES} routes, got {T} x {k}"
    if num_experts > MAX_EXPERTS:
        return f"wants at most {MAX_EXPERTS} experts, got {num_experts}"
    return None


def group_tokens(
    x: Array, experts: Array, weights: Array, num_experts: int, *, tile: int
) -> Groups:
    """Returns the tokens, [T, E], by the experts that they are sent to, [T, k].

    weights: [T, k], float32, what each expert counts. An expert of `num_experts` is none.

    Raises:
      ValueError: what `refuses` says.
    """
    if why := refuses(x, experts, num_experts):
        raise ValueError(f"group_tokens {why}")
    (T, E), k = x.shape, experts.shape[1]
    sizes, width = _sizes(T, k), -(-num_experts // LANES) * LANES
    tiles = max_tiles(T * k, num_experts, tile)
    flat = experts.reshape(-1)
    counts: tuple[Array, ...] = ()
    if sizes.parts > 1:
        count = lanes.kernel(
            functools.partial(_count, num_experts, sizes),
            jax.ShapeDtypeStruct((sizes.parts * width,), jnp.int32),
            (sizes.parts,),
            (plgpu.SMEM((width,), jnp.int32),),
        )
        counts = (count(flat),)
    words = lax.bitcast_convert_type(x.reshape(T, E // 2, 2), jnp.int32).reshape(-1)
    out = [(tiles * tile * E // 2,), (tiles * tile,), (tiles * tile,), (tiles,), (tiles,), (1,)]
    scratch = [(width,), (width,), (width,), (2 * LANES,)]
    body = functools.partial(_group, num_experts, sizes, tile)
    found = lanes.kernel(
        body,
        tuple(jax.ShapeDtypeStruct(shape, jnp.int32) for shape in out),
        (-(-T // sizes.own),),
        tuple(plgpu.SMEM(shape, jnp.int32) for shape in scratch),
    )(words, flat, lax.bitcast_convert_type(weights, jnp.int32).reshape(-1), *counts)
    rows = lax.bitcast_convert_type(found[0].reshape(tiles * tile, E // 2), x.dtype)
    weight = lax.bitcast_convert_type(found[2], jnp.float32)
    return Groups(rows.reshape(tiles * tile, E), found[1], weight, *found[3:])


def of_one(x: Array, experts: Array, weights: Array) -> Groups:
    """Returns one token, [1, E], by its experts, [1, k], with what each counts: nothing is moved.

    The tile of an expert that is none has weights of zeros.
    """
    k = experts.shape[1]
    route, rows, num = jnp.arange(k, dtype=jnp.int32), jnp.ones(k, jnp.int32), jnp.array([k])
    return Groups(x, route, weights.reshape(k), experts.reshape(k), rows, num)


class _Routes(NamedTuple):
    """A part's routes, [128] at a time: which they are, their experts, and which of them count."""

    number: list[Array]
    expert: list[Array]
    real: list[Array]


def _routes(X: int, sizes: _Sizes, part: Array, experts_ref: Ref) -> _Routes:
    """Reads a part's routes: all is on its way at once."""
    size, last = sizes.part * sizes.k, sizes.tokens * sizes.k
    first = part * size
    number = [first + i * LANES + lanes.lane() for i in range(-(-size // LANES))]
    expert = [lanes.gather(experts_ref, jnp.minimum(n, last - 1)) for n in number]
    end = jnp.minimum(first + size, last)
    return _Routes(
        number, expert, [(n < end) & (e < X) for n, e in zip(number, expert, strict=True)]
    )


def _count(
    X: int, sizes: _Sizes, part: Array, experts_ref: Ref, counts_ref: Ref, smem: Ref
) -> None:
    """Counts a part's tokens of each expert."""
    pdl.begin()
    routes = _routes(X, sizes, part, experts_ref)
    starts = range(0, smem.shape[0], LANES)
    for start in starts:
        smem[pl.ds(start, LANES)] = lanes.full(0, jnp.int32)
    lanes.tally(smem, routes.expert, routes.real)
    for start in starts:
        counts_ref[pl.ds(part * smem.shape[0] + start, LANES)] = smem[pl.ds(start, LANES)]


def _group(
    X: int, sizes: _Sizes, tile: int, block: Array, x_ref: Ref, experts_ref: Ref, weights_ref: Ref,
    *refs: Ref,
) -> None:  # fmt: skip
    *counts, out_ref, route_ref, weight_ref, expert_ref, rows_ref, count_ref = refs[:-4]
    all_smem, before_smem, start_smem, scan_smem = refs[-4:]
    pdl.begin()
    k, words, width = sizes.k, x_ref.shape[0] // sizes.tokens, all_smem.shape[0]
    token, part = block * sizes.own, lax.div(block * sizes.own, sizes.part)
    x = _read(x_ref, token, words)
    own = [experts_ref[token * k + j] for j in range(k)]
    parts = [pl.ds(start, LANES) for start in range(0, width, LANES)]
    routes = _routes(X, sizes, part, experts_ref)
    earlier = [real & (n < token * k) for real, n in zip(routes.real, routes.number, strict=True)]
    for i, at in enumerate(parts):
        every = earlier_parts = lanes.full(0, jnp.int32)
        for other in range(sizes.parts if counts else 0):
            some = counts[0][pl.ds(other * width + i * LANES, LANES)]
            every += some
            earlier_parts += jnp.where(other < part, some, 0)
        all_smem[at], before_smem[at] = every, earlier_parts
    if not counts:
        lanes.tally(all_smem, routes.expert, routes.real)
    lanes.tally(before_smem, routes.expert, earlier)
    each = [all_smem[at] for at in parts]
    tiles = [lax.div(count + (tile - 1), jnp.full_like(count, tile)) for count in each]
    firsts, end = [], jnp.int32(0)
    for at, num in zip(parts, tiles, strict=True):
        first, total = lanes.before(num, scan_smem)
        start_smem[at] = first + end
        firsts.append(first + end)
        end += total

    def place(token: Array, x: list[Array], own: list[Array]) -> None:
        route = token * k + jnp.minimum(lanes.lane(), k - 1)
        expert = lanes.gather(experts_ref, route)
        keep, expert = (lanes.lane() < k) & (expert < X), jnp.minimum(expert, X - 1)
        row = lanes.gather(start_smem, expert) * tile + lanes.gather(before_smem, expert)
        pairs = (route_ref, [route]), (weight_ref, [lanes.gather(weights_ref, route)])
        lanes.scatter([row], [keep], *pairs)
        for one in own:

            @pl.when(one < X)
            def _(one: Array = one) -> None:
                _write(out_ref, start_smem[one] * tile + before_smem[one], x, words)

        if sizes.own > 1:
            lanes.tally(before_smem, [expert], [keep])

    def go_on(token: Array, _: None) -> None:
        place(token, _read(x_ref, token, words), [experts_ref[token * k + j] for j in range(k)])
        return _

    place(token, x, own)
    if sizes.own > 1:
        lax.fori_loop(token + 1, jnp.minimum(token + sizes.own, sizes.tokens), go_on, None)

    @pl.when(block == 0)
    def _() -> None:
        count_ref[0] = end

        def tell(n: Array, _: None) -> None:
            ids = [lanes.lane() + i * LANES for i in range(len(parts))]
            rows = [jnp.minimum(count - n * tile, tile) for count in each]
            at, keep = [first + n for first in firsts], [n < num for num in tiles]
            lanes.scatter(at, keep, (expert_ref, ids), (rows_ref, rows))
            return _

        lax.fori_loop(0, jnp.max(functools.reduce(jnp.maximum, tiles)), tell, None)


def _read(ref: Ref, row: Array, words: int) -> list[Array]:
    """Reads a row of words, [128] at a time."""
    return [ref[pl.ds(row * words + start, LANES)] for start in _starts(words)]


def _write(ref: Ref, row: Array, x: list[Array], words: int) -> None:
    """Writes a row."""
    lanes.put(ref, row * words, _starts(words), x)


def _starts(words: int) -> list[int]:
    """Returns where parts of a row begin; the last one has some words of the one before it."""
    return [min(start, words - LANES) for start in range(0, words, LANES)]
