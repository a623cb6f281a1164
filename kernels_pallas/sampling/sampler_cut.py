"""Finds what a row may draw: the token itself where few tokens are left, else where it is cut."""

from collections.abc import Callable
import functools
from typing import Any, NamedTuple

from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from jaxrunner.kernels_pallas import lanes
from jaxrunner.kernels_pallas.lanes import LANES
from jaxrunner.kernels_pallas.mosaic import Ref
from jaxrunner.kernels_pallas.sampling.sampler_row import (
    MAX_ID,
    Row,
    TuningConfig,
    first_best,
    mass_of,
    read_tiles,
    row_of,
)
from jaxrunner.sampling.gumbel import MIN_NOISE
from jaxrunner.types import Array

Read = Callable[[Array], tuple[list[Array], list[Array]]]  # (group) -> logits and ids of 128 tiles


class Outs(NamedTuple):
    """References to what is settled of each row, [N]."""

    best: Ref  # its largest logit
    token_id: Ref
    kept_mass: Ref
    floor: Ref  # +inf where `token_id` is the answer, else a score that the answer reaches
    cut: Ref  # the answer is above it, or at it and of an id up to `cut_id`
    cut_id: Ref


class Bracket(NamedTuple):
    """Two keys of logits: `low` is what is sought or below, `high` above."""

    low: Array
    low_num: Array  # tokens at `low` or above, and their mass
    low_mass: Array
    high: Array
    high_num: Array
    high_mass: Array

    def mass(self, num: Array) -> Array:
        """Returns the mass of the best `num` tokens; those between the keys are equal."""
        share = (num - self.high_num).astype(jnp.float32)
        share = share / (self.low_num - self.high_num).astype(jnp.float32)
        part = self.high_mass + share * (self.low_mass - self.high_mass)
        return jnp.where(num == self.low_num, self.low_mass, part)


def settle_scratch(num_chunks: int, config: TuningConfig) -> tuple[Any, ...]:
    """Returns the shared memory of `settle`."""
    Q = config.ranked
    return (
        plgpu.SMEM((2 * LANES,), jnp.int32),
        plgpu.SMEM((num_chunks * LANES,), jnp.int32),
        plgpu.SMEM((Q,), jnp.float32),
        plgpu.SMEM((Q,), jnp.int32),
        plgpu.SMEM((Q,), jnp.float32),
        plgpu.SMEM((config.cached, config.depth, LANES), jnp.float32),
    )


def settle(
    number: Array, x_ref: Ref, rules_ref: Ref, max_ref: Ref, mass_ref: Ref, *refs: Ref,
    vocab_size: int, config: TuningConfig,
) -> None:  # fmt: skip
    """Settles a row. max_ref and mass_ref: of `_scan`. Rows that are not finite get token 0."""
    row, outs = row_of(x_ref, rules_ref, number, vocab_size, config), Outs(*refs[:6])
    sums, hits, *ranked, cache = refs[6:]
    rules, C, lane = row.rules, row.chunks, lanes.lane()
    tiles = [max_ref[number, c, :] for c in range(C)]
    best = jnp.max(functools.reduce(jnp.maximum, tiles))
    outs.best[number], outs.token_id[number] = best, jnp.int32(0)
    outs.kept_mass[number], outs.floor[number] = jnp.float32(1.0), jnp.float32(jnp.inf)
    outs.cut[number], outs.cut_id[number] = jnp.float32(-jnp.inf), jnp.int32(MAX_ID)

    @pl.when((best > -jnp.inf) & (best < jnp.inf))
    def _() -> None:
        bound, mass = _bound(row, tiles, best, mass_ref)
        reach = [x >= bound for x in tiles]
        where, num = lanes.places(reach, sums)
        lanes.scatter(where, reach, (hits, [c * LANES + lane for c in range(C)]))

        def read(group: Array) -> tuple[list[Array], list[Array]]:
            hit = hits[pl.ds(group * LANES, LANES)]
            return read_tiles(row, jnp.where(group * LANES + lane < num, hit, C * LANES))

        logits, ids = read(jnp.int32(0))
        reach = [x >= bound for x in logits]
        where, left = lanes.places(reach, sums)
        few = (num <= LANES) & (left <= config.ranked)

        @pl.when(few)
        def _() -> None:
            values, tokens, _ = ranked
            for s in range(config.ranked // LANES):
                values[pl.ds(s * LANES, LANES)] = lanes.full(-jnp.inf, jnp.float32)
                tokens[pl.ds(s * LANES, LANES)] = lanes.full(MAX_ID, jnp.int32)
            lanes.scatter(where, reach, (values, logits), (tokens, ids))
            _rank(row, ranked, left, best, mass, outs)

        @pl.when(~few)
        def _() -> None:
            cuts = rules.truncated | rules.greedy
            outs.floor[number] = jnp.where(cuts, best + MIN_NOISE, -jnp.inf)

            @pl.when(cuts)
            def _() -> None:
                groups = (num + LANES - 1) // LANES
                _search(row, read, groups, cache, (bound, best, mass), outs)


def _bound(row: Row, tiles: list[Array], best: Array, mass_ref: Ref) -> tuple[Array, Array]:
    """Returns a logit that all kept tokens reach, and the mass of the row, 1 at its best.

    For a top k the k-th largest tile: k tokens are at least that. For a top p a logit with less
    than 1 - p below it, since a tile has no token above its largest.
    """
    rules, bottom = row.rules, lanes.order(jnp.float32(-jnp.inf))
    k, p, top = rules.k, rules.p, lanes.order(best)
    # Each of 128 threads has a tile as large as `least`.
    least = lanes.order(jnp.min(functools.reduce(jnp.maximum, tiles)))
    low = jnp.where(k == 1, top, jnp.where(k <= LANES, least, bottom))

    def tile_mass(c: int) -> Array:
        return mass_ref[row.number, c, :] * mass_of(tiles[c], best)

    def of_k() -> Array:
        def enough(x: Array) -> tuple[Array, Array]:
            num = jnp.sum(lanes.count([t >= x for t in tiles]))
            return num >= k, num == k

        return _bisect(low, top + 1, enough)

    def of_p(mass: Array) -> Array:
        spare = ((1 - p) * 0.999 - 2e-6) * mass  # less by what rounding may hide

        def enough(x: Array) -> tuple[Array, Array]:
            others = (row.config.depth - 1) * mass_of(x, best)
            below = [jnp.where(t < x, tile_mass(c), others) for c, t in enumerate(tiles)]
            below = jnp.sum(functools.reduce(jnp.add, below))
            return below <= spare, below >= 0.8 * spare

        return _bisect(bottom, top + 1, enough)

    mass = lax.cond(
        rules.truncated,
        lambda: jnp.sum(functools.reduce(jnp.add, map(tile_mass, range(len(tiles))))),
        lambda: best * 0.0,
    )
    bound = lax.cond(k > 0, of_k, lambda: of_p(mass))
    cut = best + rules.min_p
    # Top-p alone needs the mass of all that min-p left.
    with_cut = jnp.where(k > 0, jnp.maximum(bound, cut), cut)
    return jnp.where(rules.truncated & (rules.min_p > -jnp.inf), with_cut, bound), mass


def _bisect(low: Array, high: Array, enough: Callable[[Array], tuple[Array, Array]]) -> Array:
    """Returns the largest logit that is `enough`, or one that is and will do; keys bracket it."""

    def body(carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        low, high, _ = carry
        middle = _middle(low, high)
        right, done = enough(lanes.unorder(middle))
        done = jnp.where(right & done, 1, 0).astype(jnp.int32)
        return jnp.where(right, middle, low), jnp.where(right, high, middle), done

    def goes_on(carry: tuple[Array, Array, Array]) -> Array:
        low, high, done = carry
        return (_middle(low, high) != low) & (done == 0)

    return lanes.unorder(lax.while_loop(goes_on, body, (low, high, jnp.int32(0)))[0])


def _middle(low: Array, high: Array) -> Array:
    return (low >> 1) + (high >> 1) + (low & high & 1)


def _rank(row: Row, ranked: list[Ref], num: Array, best: Array, mass: Array, outs: Outs) -> None:
    """Ranks a few tokens, all that the row may keep, and draws one of those it keeps."""
    values, tokens, masses = ranked
    slices = [pl.ds(s * LANES, LANES) for s in range(row.config.ranked // LANES)]
    x, ids = [values[s] for s in slices], [tokens[s] for s in slices]
    each = [mass_of(v, best) for v in x]
    for s, m in zip(slices, each, strict=True):
        masses[s] = m

    def total(kept: list[Array]) -> Array:
        terms = [jnp.where(m, v, 0.0) for m, v in zip(kept, each, strict=True)]
        return jnp.sum(functools.reduce(jnp.add, terms))

    def four(j: Array, carry: tuple[list[Array], list[Array]]) -> tuple[list[Array], list[Array]]:
        rank, above = map(list, carry)
        for i in range(4):
            other, token, m = values[4 * j + i], tokens[4 * j + i], masses[4 * j + i]
            for s in range(len(x)):
                ahead = (other > x[s]) | ((other == x[s]) & (token < ids[s]))
                rank[s] = rank[s] + lanes.ones(ahead)
                above[s] = above[s] + jnp.where(ahead, m, 0.0)
        return rank, above

    zeros = [lanes.full(0, jnp.int32) for _ in x], [lanes.full(0.0, jnp.float32) for _ in x]
    rank, above = lax.fori_loop(0, (num + 3) // 4, four, zeros)
    rules, number = row.rules, row.number
    kept = [((r < rules.k) | (rules.k == 0)) & (v > -jnp.inf) for r, v in zip(rank, x, strict=True)]
    of_p = rules.p * jnp.where((rules.k > 0) | (rules.min_p > -jnp.inf), total(kept), mass)
    kept = [
        m & ((a < of_p) | (rules.p >= 1) | (r == 0))
        for m, a, r in zip(kept, above, rank, strict=True)
    ]
    noise = [jnp.where(rules.greedy, 0.0, lanes.gumbel(row.noise_key, i)) for i in ids]
    scores = [jnp.where(m, v + g, -jnp.inf) for m, v, g in zip(kept, x, noise, strict=True)]
    outs.token_id[number], score = first_best(scores, ids)

    @pl.when(rules.truncated)
    def _() -> None:
        outs.kept_mass[number] = jnp.minimum(total(kept) / mass, 1.0)

    @pl.when(~(rules.truncated | rules.greedy))
    def _() -> None:
        outs.floor[number] = score  # of the likeliest: what cannot come to it needs no noise


def _search(
    row: Row, read: Read, groups: Array, cache: Ref, known: tuple[Array, Array, Array], outs: Outs
) -> None:
    """Cuts a row by bisection on the number and mass of its tokens.

    read: the tiles that hold all that may be kept, 128 at a time; there are `groups`. known: what
    `_bound` found, and the best logit between.
    """
    (bound, best, mass), rules, number = known, row.rules, row.number
    k, p, near = rules.k, rules.p, jnp.minimum(groups, row.config.cached)

    def save(group: Array, done: Array) -> Array:
        for i, x in enumerate(read(group)[0]):
            cache[group, i] = x
        return done

    lax.fori_loop(0, near, save, jnp.int32(0))

    def measure(x: Array) -> tuple[Array, Array]:
        def add(logits: list[Array], carry: tuple[Array, Array]) -> tuple[Array, Array]:
            num, total = carry
            for v in logits:
                num = num + lanes.ones(v >= x)
                total = total + jnp.where(v >= x, mass_of(v, best), 0.0)
            return num, total

        def of_near(group: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
            return add([cache[group, i] for i in range(row.config.depth)], carry)

        def of_far(group: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
            return add(read(group)[0], carry)

        carry = lanes.full(0, jnp.int32), lanes.full(0.0, jnp.float32)
        carry = lax.fori_loop(0, near, of_near, carry)
        num, total = lax.fori_loop(near, groups, of_far, carry)
        return jnp.sum(num), jnp.sum(total)

    def narrow(
        bracket: Bracket,
        enough: Callable[[Array, Array], Array],
        done: Callable[[Bracket], Array],
    ) -> Bracket:
        def body(b: Bracket) -> Bracket:
            middle = _middle(b.low, b.high)
            num, total = measure(lanes.unorder(middle))
            right = enough(num, total)
            new = (middle, num, total)
            low = [jnp.where(right, x, y) for x, y in zip(new, b[:3], strict=True)]
            high = [jnp.where(right, y, x) for x, y in zip(new, b[3:], strict=True)]
            return Bracket(*low, *high)

        def goes_on(b: Bracket) -> Array:
            return (_middle(b.low, b.high) != b.low) & ~done(b)

        return lax.while_loop(goes_on, body, bracket)

    above = lanes.order(best) + 1, jnp.int32(0), jnp.float32(0.0)
    all_left = Bracket(lanes.order(bound), *measure(bound), *above)
    of_k = lax.cond(
        k > 0,
        lambda: narrow(all_left, lambda num, _: num >= k, lambda b: b.low_num == k),
        lambda: all_left,
    )
    limit = jnp.where(k > 0, jnp.minimum(k, of_k.low_num), of_k.low_num)
    whole = jnp.where(rules.min_p > -jnp.inf, all_left.low_mass, mass)
    goal = p * jnp.where(k > 0, of_k.mass(limit), whole)
    found = lax.cond(
        p < 1,
        lambda: narrow(
            of_k._replace(high=above[0], high_num=above[1], high_mass=above[2]),
            lambda _, total: total >= goal,
            lambda b: b.low_num - b.high_num == 1,
        ),
        lambda: of_k,
    )
    # Of equal tokens those are kept before which the mass is short of p.
    ties = found.low_num - found.high_num
    each = (found.low_mass - found.high_mass) / ties.astype(jnp.float32)
    wanted = jnp.minimum((goal - found.high_mass) / each, 1e6)
    rounded = wanted.astype(jnp.int32)
    rounded = rounded + lanes.ones(rounded.astype(jnp.float32) < wanted)
    some = jnp.where(p < 1, jnp.minimum(jnp.maximum(rounded, 1), ties), ties)
    kept = jnp.minimum(found.high_num + some, limit)
    outs.cut[number] = lanes.unorder(found.low)
    outs.cut_id[number] = _last_tie(row, read, groups, found, kept)

    @pl.when(rules.truncated)
    def _() -> None:
        outs.kept_mass[number] = jnp.minimum(found.mass(kept) / mass, 1.0)


def _last_tie(row: Row, read: Read, groups: Array, found: Bracket, kept: Array) -> Array:
    """Returns the last id to keep of the tokens at the low end of what `_search` found."""
    cut = lanes.unorder(found.low)

    def up_to(last: Array) -> Array:
        def add(group: Array, num: Array) -> Array:
            for x, i in zip(*read(group), strict=True):
                num = num + lanes.ones((x == cut) & (i <= last))
            return num

        return jnp.sum(lax.fori_loop(0, groups, add, lanes.full(0, jnp.int32)))

    def body(carry: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = carry
        middle = (low + high) >> 1
        enough = up_to(middle) >= kept - found.high_num
        return jnp.where(enough, low, middle), jnp.where(enough, middle, high)

    # Above `row.vocab_size` is no id: where all ties are kept there is no search.
    low = jnp.where(kept < found.low_num, -1, MAX_ID - 1)
    high = jnp.where(kept < found.low_num, row.vocab_size - 1, MAX_ID)
    return lax.while_loop(lambda c: c[1] - c[0] > 1, body, (low, high))[1]
