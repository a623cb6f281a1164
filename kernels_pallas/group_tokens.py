"""Tokens sorted by the experts that they are sent to, on Hopper (Mosaic GPU), for few tokens.

The tokens of an expert lie side by side and begin at a tile, of which the last ones may be partly
empty. A block of the grid finds the places of one token and copies it there; each counts the tokens
of all experts, which is quicker than to wait for another block.
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

MAX_ROUTES = 1 << 12  # tokens times experts of a token: each block reads all
MAX_EXPERTS = 4 * LANES
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


def refuses(x: Shaped, experts: Shaped, num_experts: int) -> str | None:
    """Says why x, [T, E], and experts, [T, k], are not served; None if they are."""
    if TOO_OLD is not None:
        return TOO_OLD
    if x.dtype not in (jnp.bfloat16, jnp.float16):
        return f"wants tokens in bfloat16 or float16, got {x.dtype}"
    if x.shape[1] % 2 or x.shape[1] < 2 * LANES:
        return f"wants tokens of an even count of at least {2 * LANES} numbers, got {x.shape[1]}"
    if experts.shape[1] > LANES:
        return f"wants at most {LANES} experts a token, got {experts.shape[1]}"
    if experts.size > MAX_ROUTES:
        return f"wants at most {MAX_ROUTES} routes, got {experts.shape[0]} x {experts.shape[1]}"
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
    tiles, depth = max_tiles(T * k, num_experts, tile), -(-num_experts // LANES)
    words = lax.bitcast_convert_type(x.reshape(T, E // 2, 2), jnp.int32).reshape(-1)
    out = [(tiles * tile * E // 2,), (tiles * tile,), (tiles * tile,), (tiles,), (tiles,), (1,)]
    scratch = [(depth * LANES,), (depth * LANES,), (depth * LANES,), (2 * LANES,)]
    body = functools.partial(_group, num_experts, T, k, tile)
    found = lanes.kernel(
        body,
        tuple(jax.ShapeDtypeStruct(shape, jnp.int32) for shape in out),
        (T,),
        tuple(plgpu.SMEM(shape, jnp.int32) for shape in scratch),
    )(words, experts.reshape(-1), lax.bitcast_convert_type(weights, jnp.int32).reshape(-1))
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


def _group(
    X: int, T: int, k: int, tile: int, token: Array, x_ref: Ref, experts_ref: Ref,
    weights_ref: Ref, out_ref: Ref, route_ref: Ref, weight_ref: Ref, expert_ref: Ref,
    rows_ref: Ref, count_ref: Ref, all_smem: Ref, before_smem: Ref, start_smem: Ref,
    scan_smem: Ref,
) -> None:  # fmt: skip
    pdl.begin()
    words = x_ref.shape[0] // T
    x = _read(x_ref, token, words)
    parts = [pl.ds(i * LANES, LANES) for i in range(all_smem.shape[0] // LANES)]
    for part in parts:
        all_smem[part] = before_smem[part] = lanes.full(0, jnp.int32)
    # All that is read of device memory is on its way at once.
    routes = [i * LANES + lanes.lane() for i in range(-(-T * k // LANES))]
    experts = [lanes.gather(experts_ref, jnp.minimum(r, T * k - 1)) for r in routes]
    own = [experts_ref[token * k + j] for j in range(k)]
    real = [(r < T * k) & (expert < X) for r, expert in zip(routes, experts, strict=True)]
    earlier = [a & (r < token * k) for r, a in zip(routes, real, strict=True)]
    lanes.tally(all_smem, experts, real)
    lanes.tally(before_smem, experts, earlier)
    counts = [all_smem[part] for part in parts]
    tiles = [lax.div(count + (tile - 1), jnp.full_like(count, tile)) for count in counts]
    firsts, end = [], jnp.int32(0)
    for part, num in zip(parts, tiles, strict=True):
        first, total = lanes.before(num, scan_smem)
        start_smem[part] = first + end
        firsts.append(first + end)
        end += total
    j = jnp.minimum(lanes.lane(), k - 1)
    expert = lanes.gather(experts_ref, token * k + j)
    known = jnp.minimum(expert, X - 1)
    row = lanes.gather(start_smem, known) * tile + lanes.gather(before_smem, known)
    pairs = (route_ref, [token * k + j]), (weight_ref, [lanes.gather(weights_ref, token * k + j)])
    lanes.scatter([row], [(lanes.lane() < k) & (expert < X)], *pairs)
    for expert in own:

        @pl.when(expert < X)
        def _(expert: Array = expert) -> None:
            _write(out_ref, start_smem[expert] * tile + before_smem[expert], x, words)

    @pl.when(token == 0)
    def _() -> None:
        count_ref[0] = end

        def tell(n: Array, _: None) -> None:
            ids = [lanes.lane() + i * LANES for i in range(len(parts))]
            rows = [jnp.minimum(count - n * tile, tile) for count in counts]
            at, keep = [first + n for first in firsts], [n < num for num in tiles]
            lanes.scatter(at, keep, (expert_ref, ids), (rows_ref, rows))
            return _

        lax.fori_loop(0, jnp.max(functools.reduce(jnp.maximum, tiles)), tell, None)


def scatter_rows(x: Array, rows: Array, num: int) -> Array:
    """Returns `num` rows, of which rows[t] are x[t]; x: [T, E], rows: [T, k], `num` for none.

    Others are anything. Each token is read once, where a gather reads it k times.

    Raises:
      ValueError: what `refuses` says of x.
    """
    if why := refuses(x, rows[:1], 0):
        raise ValueError(f"scatter_rows {why}")
    (T, E), k = x.shape, rows.shape[1]
    words = lax.bitcast_convert_type(x.reshape(T, E // 2, 2), jnp.int32).reshape(-1)
    out = jax.ShapeDtypeStruct((num * E // 2,), jnp.int32)
    body = functools.partial(_scatter, num, T, k)
    out = lanes.kernel(body, out, (T,))(words, rows.reshape(-1)).reshape(num, E // 2)
    return lax.bitcast_convert_type(out, x.dtype).reshape(num, E)


def _scatter(
    num: int, T: int, k: int, token: Array, x_ref: Ref, rows_ref: Ref, out_ref: Ref
) -> None:
    pdl.begin()
    words = x_ref.shape[0] // T
    x = _read(x_ref, token, words)
    for row in [rows_ref[token * k + j] for j in range(k)]:

        @pl.when(row < num)
        def _(row: Array = row) -> None:
            _write(out_ref, row, x, words)


def _read(ref: Ref, row: Array, words: int) -> list[Array]:
    """Reads a row of words, [128] at a time."""
    return [ref[pl.ds(row * words + start, LANES)] for start in _starts(words)]


def _write(ref: Ref, row: Array, x: list[Array], words: int) -> None:
    """Writes a row."""
    lanes.put(ref, row * words, _starts(words), x)


def _starts(words: int) -> list[int]:
    """Returns where parts of a row begin; the last one has some words of the one before it."""
    return [min(start, words - LANES) for start in range(0, words, LANES)]
