"""Draws tokens from logits without a sort, in three passes over as few logits as possible.

1. `_scan` reads all logits once and leaves the largest logit of each tile of 32.
2. `settle` finds the k-th largest tile: no token of the top k is in a tile below it, so a few
   tiles hold all that may be drawn, and their tokens are ranked one against another. Rows that
   keep more than that get a cut, by bisection.
3. `_draw` reads the logits of those rows, and of rows that nothing truncates, and adds noise
   where it can still win: most is at most `MAX_USUAL`, and what is rare is known for a chunk.

Work is cut by the vocabulary alone and sums have a fixed order, so a row gets the same token in
any batch. In place of atomics, what threads have found is put side by side at prefix sums.
"""

import functools
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from jaxrunner.kernels_pallas import lanes
from jaxrunner.kernels_pallas.lanes import LANES
from jaxrunner.kernels_pallas.mosaic import Ref, Shaped
from jaxrunner.kernels_pallas.sampling.sampler_cut import settle, settle_scratch
from jaxrunner.kernels_pallas.sampling.sampler_row import (
    MAX_ID,
    Row,
    Rules,
    TuningConfig,
    first_best,
    mass_of,
    pack,
    read_chunk,
    row_of,
)
from jaxrunner.sampling.gumbel import GROUP, GROUP_BITS, MAX_USUAL
from jaxrunner.sampling.seed import TARGET
from jaxrunner.types import Array

DEFAULT = TuningConfig()
MAX_CHUNKS = 72  # `settle` holds a register of each; the 262,208 tokens of Gemma 3 are 65


class SamplerOutput(NamedTuple):
    """The sampled token of each row, and its flags, [N]."""

    token_ids: Array  # 0 where a row is not finite or has no choice
    kept_mass: Array  # share of the probability that truncation left; 1 for greedy rows
    not_finite: Array  # a logit is NaN, or one divided by the temperature +inf
    no_choice: Array  # all are -inf; `sampler.sample` calls that not finite in the model's own


def refuses(logits: Shaped, config: TuningConfig) -> str | None:
    """Says why logits, [N, V], are not served."""
    if logits.dtype not in (jnp.float32, jnp.bfloat16):
        return f"logits are {logits.dtype}: float32 or bfloat16 is wanted"
    N, V = logits.shape
    if N * max(V, LANES) >= 2**31:
        return f"{N} x {V} logits are too many for 32-bit indices: fewer than 2**31 are wanted"
    if (C := config.fit(V).num_chunks(V)) > MAX_CHUNKS:
        return f"{V} tokens are {C} chunks, wanted at most {MAX_CHUNKS}: raise {config.depth=}"
    if config.ranked % LANES:
        return f"ranked={config.ranked}: a multiple of {LANES} is wanted"
    return None


def sample_tokens(
    logits: Array, seed_words: Array, positions: Array, greedy: Array, temperature: Array,
    min_p: Array, top_k: Array, top_p: Array, *, config: TuningConfig = DEFAULT,
) -> SamplerOutput:  # fmt: skip
    """Draws a token for each row of logits, [N, V], as `sampler.sample` does for the usual rules.

    seed_words: [N, 2]; the rest [N], as in the rules' tables: a temperature of 0 counts as 1,
    min_p is a logarithm and -inf is off, top_k 0 and top_p 1 are off. A token differs from the
    plain path's only where a top-p cut falls within the rounding of a sum of masses, about 1e-6.

    Raises:
      ValueError: `refuses` says why.
    """
    if why := refuses(logits, config):
        raise ValueError(why)
    (N, V), short = logits.shape, LANES - logits.shape[1]
    if short > 0:
        logits, V = jnp.pad(logits, ((0, 0), (0, short)), constant_values=-jnp.inf), LANES
    truncated = ~greedy & ((top_k > 0) | (top_p < 1) | (min_p > -jnp.inf))
    high, low = _noise_keys(seed_words, positions)
    rules = Rules(
        greedy=greedy,
        truncated=truncated,
        temperature=jnp.where(temperature > 0, temperature, 1.0),
        min_p=min_p,
        k=jnp.where(truncated, top_k, 1),
        p=jnp.where(truncated, jnp.minimum(top_p, 1.0), 1.0),
        high=high,
        low=low,
    )
    return _run(logits.reshape(-1), pack(rules), (N, V), config.fit(V))


def _run(
    logits: Array, rules: Array, shape: tuple[int, int], config: TuningConfig
) -> SamplerOutput:
    """Runs the passes on logits, [N * V], and `pack`ed rules."""
    (N, V), static = shape, dict(vocab_size=shape[1], config=config)
    C = config.num_chunks(V)
    S, P = -(-C // config.scan_chunks), -(-C // config.draw_chunks)
    tile, row, part = (N, C, LANES), (N,), (N, P)
    scan = lanes.kernel(
        functools.partial(_scan, **static), _shapes((tile, "f4"), (tile, "f4")), (N, S)
    )
    tile_max, tile_mass = scan(logits, rules)
    settled = _shapes(*((row, t) for t in ("f4", "i4", "f4", "f4", "f4", "i4")))
    settle_rows = lanes.kernel(
        functools.partial(settle, **static), settled, (N,), settle_scratch(C, config)
    )
    best, token_ids, kept, floor, *cut = settle_rows(logits, rules, tile_max, tile_mass)
    drawn, draw = _shapes((part, "f4"), (part, "i4")), functools.partial(_draw, **static)
    draw_rows = lanes.kernel(draw, drawn, (N, P), _draw_scratch(config))
    scores, ids = draw_rows(logits, rules, tile_max, floor, *cut)
    ids = jnp.where(scores == scores.max(1, keepdims=True), ids, MAX_ID).min(1)
    no_choice = best == -jnp.inf
    token_ids = jnp.where(floor == jnp.inf, token_ids, ids)
    return SamplerOutput(token_ids, kept, ~jnp.isfinite(best) & ~no_choice, no_choice)


def _shapes(*of: tuple[tuple[int, ...], str]) -> tuple[jax.ShapeDtypeStruct, ...]:
    return tuple(jax.ShapeDtypeStruct(shape, jnp.dtype(kind)) for shape, kind in of)


def _noise_keys(words: Array, positions: Array) -> tuple[Array, Array]:
    """Returns the Threefry keys, two words of [N], that `seed.noise` draws from."""

    def one(words: Array, position: Array) -> tuple[Array, Array]:
        key = jax.random.fold_in(jax.random.wrap_key_data(words), position)
        data = jax.random.key_data(jax.random.fold_in(key, TARGET))
        return data[0], data[1]

    return jax.vmap(one)(words, positions)


def _scan(
    number: Array, part: Array, x_ref: Ref, rules_ref: Ref, max_ref: Ref, mass_ref: Ref,
    *, vocab_size: int, config: TuningConfig,
) -> None:  # fmt: skip
    """Writes the largest logit of each tile, [N, C, 128], and the mass of rows that truncate.

    A tile's mass is 1 at its own largest.
    """
    row = row_of(x_ref, rules_ref, number, vocab_size, config)

    def chunk(c: Array) -> None:
        logits = read_chunk(row, c)[0]
        best = functools.reduce(jnp.maximum, logits)
        max_ref[number, c, :] = best

        @pl.when(row.rules.truncated)
        def _() -> None:
            base = jnp.where(best > -jnp.inf, best, 0.0)
            mass_ref[number, c, :] = functools.reduce(jnp.add, [mass_of(x, base) for x in logits])

    for i in range(config.scan_chunks):
        c = part * config.scan_chunks + i
        pl.when(c < row.chunks)(functools.partial(chunk, c))


def _draw_scratch(config: TuningConfig) -> tuple[Any, ...]:
    size = config.depth * LANES
    sums, values = plgpu.SMEM((2 * LANES,), jnp.int32), plgpu.SMEM((size,), jnp.float32)
    return sums, values, plgpu.SMEM((size,), jnp.int32)


def _draw(
    number: Array, part: Array, x_ref: Ref, rules_ref: Ref, max_ref: Ref, floor_ref: Ref,
    cut_ref: Ref, cut_id_ref: Ref, score_ref: Ref, id_ref: Ref, sums: Ref, values: Ref,
    tokens: Ref, *, vocab_size: int, config: TuningConfig,
) -> None:  # fmt: skip
    """Writes the best score of a few chunks of a row, [N, P], and the first token that has it.

    Tokens count that are above the cut, or at it up to an id, and may come to the floor.
    """
    row = row_of(x_ref, rules_ref, number, vocab_size, config)
    floor, cut, cut_id = floor_ref[number], cut_ref[number], cut_id_ref[number]
    score_ref[number, part], id_ref[number, part] = jnp.float32(-jnp.inf), jnp.int32(MAX_ID)
    lane = lanes.lane()

    def chunk(
        c: Array, known: tuple[Array, list[tuple[Array, Array]]], carry: tuple[Array, Array]
    ) -> tuple[Array, Array]:
        most, rare = known
        logits, ids = read_chunk(row, c)
        wins = [
            ((x > cut) | ((x == cut) & (i <= cut_id))) & (x + most >= floor)
            for x, i in zip(logits, ids, strict=True)
        ]
        where, num = lanes.places(wins, sums)
        lanes.scatter(where, wins, (values, logits), (tokens, ids))

        def some(g: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
            best, best_id = carry
            x, i = values[pl.ds(g * LANES, LANES)], tokens[pl.ds(g * LANES, LANES)]
            real = g * LANES + lane < num
            noise = lanes.usual_noise(row.noise_key, i)
            for token_id, its_noise in rare:
                noise = jnp.where(i == token_id, its_noise, noise)
            score = x + jnp.where(row.rules.greedy, 0.0, noise)
            score = jnp.where(real, score, -jnp.inf)
            better = (score > best) | (real & (score == best) & (i < best_id))
            return jnp.where(better, score, best), jnp.where(better, i, best_id)

        return lax.fori_loop(0, (num + LANES - 1) // LANES, some, carry)

    @pl.when(floor < jnp.inf)
    def _() -> None:
        def body(c: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
            known = _rare_noise(row, c)
            reach = jnp.max(max_ref[number, c, :] + known[0]) >= floor
            return lax.cond(reach, lambda carry: chunk(c, known, carry), lambda carry: carry, carry)

        empty = lanes.full(-jnp.inf, jnp.float32), lanes.full(MAX_ID, jnp.int32)
        last = jnp.minimum((part + 1) * config.draw_chunks, row.chunks)
        best, best_id = lax.fori_loop(part * config.draw_chunks, last, body, empty)
        id_ref[number, part], score_ref[number, part] = first_best([best], [best_id])


def _rare_noise(row: Row, chunk: Array) -> tuple[Array, list[tuple[Array, Array]]]:
    """Returns the most noise that a token of a chunk has, and the rare token of each of its groups.

    In all lanes alike.
    """
    first, size = (chunk * row.chunk_size) >> GROUP_BITS, row.chunk_size
    groups = range(1 if GROUP % size == 0 else size // GROUP + 2)
    rare = [lanes.rare_noise(row.noise_key, lanes.full(first + i, jnp.int32)) for i in groups]
    most = functools.reduce(jnp.maximum, [noise for _, noise in rare])
    return jnp.maximum(most, MAX_USUAL), rare
