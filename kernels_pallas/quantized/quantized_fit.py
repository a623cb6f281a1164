"""How products with weights of few bits are shared out to tiles, by their shape and tokens."""

from dataclasses import replace
from typing import Any, NamedTuple

import jax.numpy as jnp

from jaxrunner.kernels_pallas.mosaic import Shaped
from jaxrunner.kernels_pallas.products.matmul import ROWS
from jaxrunner.kernels_pallas.quantized import quantized_tile
from jaxrunner.kernels_pallas.quantized.quantized_tile import TERMS, TuningConfig
from jaxrunner.kernels_pallas.registers import OWN_REGISTERS
from jaxrunner.types import Array

MIN_TOKENS, MAX_TOKENS = 64, 256  # fewer do not fill what `wgmma` computes at a time
MAX_PAIRS = 128  # tokens as pairs: registers hold the sums of no more
# Below this part of the multiprocessors `quantized_matmul`, whose tiles are as small as 8 rows,
# makes up for widening each weight several times.
FEWEST = 3


class Rule(NamedTuple):
    """Sizes for steps of some tokens. Those that leave least idle run; of equals the first."""

    tokens: int  # at most
    whole: tuple[TuningConfig, ...]
    parts: tuple[TuningConfig, ...]  # of sums that another kernel adds up


# Two warpgroups have 232 registers a thread, four have 112. Sums multiplied with scales want twice
# those of the sums: with two warpgroups up to 128 tokens fit, with four 64; and with two and 64
# tokens two sums at once, which steps of 256 terms have by groups of 128. More tokens take
# weights multiplied with scales, in steps of 64 terms, of which shared memory has room for several.
# Left out, as their registers spill with 8 bits: two groups by two turns, and four turns of 14,336
# terms. So do those of four groups, which then have 96, where none have registers of their own.
LARGEST = (
    TuningConfig(groups=4, exact=True)
    if OWN_REGISTERS
    else TuningConfig(groups=2, terms=256, exact=True)
)
RULES = (
    Rule(
        64,
        (
            LARGEST,
            TuningConfig(groups=2, terms=256, exact=True),
            TuningConfig(groups=2, exact=True),
            TuningConfig(groups=1, turns=2, terms=256, exact=True),
            TuningConfig(groups=1, turns=2, exact=True),
        ),
        (
            TuningConfig(groups=2, parts=4, terms=256, exact=True),
            TuningConfig(groups=2, parts=4, exact=True),
            TuningConfig(groups=1, turns=2, parts=2, terms=256, exact=True),
            TuningConfig(groups=1, turns=2, parts=2, exact=True),
        ),
    ),
    Rule(
        128,
        (TuningConfig(groups=2), TuningConfig(groups=1, turns=2)),
        (
            TuningConfig(groups=2, parts=4, exact=True),
            TuningConfig(groups=1, turns=2, parts=2, exact=True),
        ),
    ),
    Rule(
        256,
        (TuningConfig(groups=2, terms=64), TuningConfig(groups=1, turns=2, terms=64)),
        (
            TuningConfig(groups=2, parts=4, terms=64),
            TuningConfig(groups=1, turns=2, parts=2, terms=64),
        ),
    ),
)


def fit(
    x: Shaped, weight: Shaped, scale: Shaped, code: str, *, in_parts: bool = False,
    activation: str | None = None, words: bool = False,
) -> TuningConfig | str:  # fmt: skip
    """Returns the sizes for x, [T, E], or pairs, [2, T, E], weight, [F, E / packed], and scale,
    [F / run, G].

    Or why tiles do not serve them, in words.
    """
    T, most = x.shape[-2], MAX_TOKENS if x.ndim == 2 else MAX_PAIRS
    if not MIN_TOKENS <= T <= most:
        return f"is ahead for {MIN_TOKENS} to {most} tokens, got {T}"
    rule = next(rule for rule in RULES if T <= rule.tokens)
    # A scale of a whole sum is multiplied with it in any case. Larger steps are for several sums.
    group, sizes = x.shape[-1] // scale.shape[1], rule.parts if in_parts else rule.whole
    found = [
        replace(c, exact=c.exact and scale.shape[1] > 1)
        for c in sizes
        if c.terms <= TERMS or c.terms >= 2 * group or c is LARGEST
    ]
    rest = activation, words
    reasons = [quantized_tile.refuses(x, weight, scale, code, c, *rest) for c in found]
    served = [c for c, reason in zip(found, reasons, strict=True) if reason is None]
    if not served:
        return str(reasons[-1])
    F, num_ctas = weight.shape[0], served[0].num_ctas
    best = min(served, key=lambda c: _longest(T, F, c))
    blocks = _blocks(T, F, best)
    if blocks * FEWEST < num_ctas:
        return f"wants work for {num_ctas // FEWEST} multiprocessors, got {blocks} tiles"
    return best


def _blocks(T: int, F: int, c: TuningConfig) -> int:
    """Returns the tiles that blocks of the grid compute."""
    return F // (ROWS * c.groups) * c.parts * -(-T // c.tokens)


def _longest(T: int, F: int, c: TuningConfig) -> float:
    """Returns what the busiest multiprocessor computes: rows, by its share of a sum, by tokens."""
    rounds = -(-_blocks(T, F, c) // (c.num_ctas // c.cluster * c.cluster))
    return rounds * c.groups * min(T, c.tokens) / c.parts


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
    return quantized_tile.quantized_tile(x, weight, scale, x_scale, **of_both, **how)
