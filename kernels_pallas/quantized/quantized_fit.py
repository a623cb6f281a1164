"""How `quantized_tile` shares a product out to tiles, by its shape and tokens."""

from dataclasses import dataclass, replace
from typing import NamedTuple

import jax.numpy as jnp

from jaxrunner.kernels_pallas import mosaic
from jaxrunner.kernels_pallas.mosaic import Shaped
from jaxrunner.kernels_pallas.products.gated_mlp import SMEM_BYTES
from jaxrunner.kernels_pallas.products.matmul import ROWS, refuses_activation
from jaxrunner.kernels_pallas.quantized import widen, widen_tile
from jaxrunner.kernels_pallas.quantized.quantized_matmul import refuses_numbers
from jaxrunner.kernels_pallas.quantized.quantized_sums import PIECE, Form

MIN_TOKENS, MAX_TOKENS = 64, 256  # fewer do not fill what `wgmma` computes at a time
MAX_PAIRS = 128  # tokens as pairs: registers hold the sums of no more
# Below this part of the multiprocessors `quantized_matmul`, whose tiles are as small as 8 rows,
# makes up for widening each weight several times.
FEWEST = 3
AT_ONCE = 64  # tokens of which two warpgroups' registers hold two sums, beside their total
TERMS = 128  # of pairs, that tensor cores sum up before these sums are multiplied with scales


@dataclass(frozen=True)
class TuningConfig:
    """How the work is shared out."""

    groups: int = 2  # of warpgroups that have rows of their own, 64 each
    turns: int = 1  # warpgroups that have the same rows, and steps by turns
    parts: int = 1  # of a sum
    tokens: int = MAX_TOKENS  # of a block, at most
    cluster: int = 2  # blocks that share their tokens
    shared: bool = False  # two blocks share a warpgroup's rows, each for half of the tokens
    terms: int = 128  # of a step
    stages: int = 16  # steps that are in shared memory, fewer where they do not fit
    num_ctas: int = 132  # at most: an H200's
    exact: bool = False  # scales are multiplied with sums

    @property
    def own(self) -> int:
        """Warpgroups' rows from a block of a cluster to the next."""
        return self.groups - self.shared

    @property
    def height(self) -> int:
        """Rows of a cluster."""
        return ROWS * (self.cluster * self.own + self.shared)


DEFAULT = TuningConfig()


class Shares(NamedTuple):
    """The compile-time parameters of the kernel: what blocks and warpgroups have of a product."""

    form: Form  # of a part
    chunks: int  # of tokens
    tiles: int  # of rows, one of a cluster
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
    def weight_bytes(self) -> int:
        """Bytes of a step's weights."""
        return self.rows * self.c.terms // self.packed

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
    fit = share_out(x.shape, weight.shape[0], scale.shape, code, c, activation, words)
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


def share_out(
    x: tuple[int, ...], F: int, scale: tuple[int, ...], code: str, c: TuningConfig,
    activation: str | None, words: bool,
) -> Shares | str:  # fmt: skip
    """Shares the work out, or says why it cannot."""
    T, E = x[-2:]
    # Of one token the copies read eight: what is not there is 0.
    tokens, group, packed = max(8, min(T, c.tokens)), E // scale[1], widen.PACKED[code]
    if (T > 1 and T % tokens) or tokens % (8 * c.cluster):
        return f"wants tokens in multiples of {8 * c.cluster}, {tokens} at a time, got {T}"
    if c.shared and (c.cluster != 2 or c.turns > 1):
        return f"wants clusters of two, and no turns, where blocks share rows, got {c}"
    if c.turns > 1 and c.groups > 1:
        return f"wants one warpgroup's rows where others take steps by turns, got {c}"
    if E % (c.terms * c.parts) or F % c.height:
        return (
            f"wants sums of a multiple of {c.terms * c.parts} terms and outputs of "
            f"{c.height}, got {E} and {F}"
        )
    if E % scale[1] or F % scale[0] or group % PIECE or (group % c.terms and c.terms % group):
        return f"wants scales of runs that divide {c.terms} or that it divides, got {group}"
    tiles, chunks = F // c.height, -(-T // tokens)
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
    items = tiles * c.parts * chunks
    two = c.groups * c.turns <= 2 and tokens <= AT_ONCE and form.sums % 2 == 0
    form = form._replace(stages=stages, at_once=2 if two else 1)
    clusters = min(items, c.num_ctas // c.cluster)
    return Shares(form, chunks, tiles, clusters, items, c, activation)


class Rule(NamedTuple):
    """Sizes for steps of some tokens. Those that leave least idle run; of equals the first."""

    tokens: int  # at most
    whole: tuple[TuningConfig, ...]
    parts: tuple[TuningConfig, ...]  # of sums that another kernel adds up


# Two warpgroups have 255 registers a thread, three 168, four 127. Sums multiplied with scales want
# twice those of the sums: with two warpgroups up to 128 tokens fit, with four 64; and with two and
# 64 tokens two sums at once, which steps of 256 terms have by groups of 128. More tokens take
# weights multiplied with scales, in steps of 64 terms, of which shared memory has room for several.
LARGEST = TuningConfig(groups=4, exact=True)
RULES = (
    Rule(
        64,
        (
            LARGEST,
            # In place of 112 blocks with four warpgroups' rows 128 have three, and half of one with
            # a peer.
            replace(LARGEST, shared=True),
            TuningConfig(groups=3, exact=True),
            TuningConfig(groups=2, terms=256, exact=True),
            TuningConfig(groups=2, exact=True),
            TuningConfig(groups=1, turns=2, terms=256, exact=True),
            TuningConfig(groups=1, turns=2, exact=True),
        ),
        (
            TuningConfig(groups=2, parts=4, terms=256, exact=True),
            TuningConfig(groups=2, parts=4, exact=True),
            TuningConfig(groups=3, parts=4, terms=256, exact=True),
            TuningConfig(groups=3, parts=4, exact=True),
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
        if c.terms <= TERMS or c.terms >= 2 * group
    ]
    rest = activation, words
    reasons = [refuses(x, weight, scale, code, c, *rest) for c in found]
    served = [c for c, reason in zip(found, reasons, strict=True) if reason is None]
    if not served:
        return str(reasons[-1])
    F, num_ctas = weight.shape[0], served[0].num_ctas
    best = min(served, key=lambda c: _longest(T, F, c))
    blocks = _blocks(T, F, best)
    if blocks * FEWEST < num_ctas:
        return f"wants work for {num_ctas // FEWEST} multiprocessors, got {blocks} tiles"
    return best


def refuses_parts(
    x: Shaped, weight: Shaped, scale: Shaped, code: str, *, words: bool = False
) -> str | None:
    """Says why a product whose parts the next kernel may add up is not faster in parts, or None.

    x, weight and scale: as `fit` takes them.
    """
    found = [fit(x, weight, scale, code, in_parts=cut, words=words) for cut in (False, True)]
    whole, parts = found
    if isinstance(whole, str) or isinstance(parts, str):
        return next(reason for reason in found if isinstance(reason, str))
    size = x.shape[-2], weight.shape[0]
    if _longest(*size, parts) >= _longest(*size, whole):
        return f"leaves as much to the busiest multiprocessor in {parts.parts} parts"
    return None


def _blocks(T: int, F: int, c: TuningConfig) -> int:
    """Returns the tiles that blocks of the grid compute."""
    return F // c.height * c.cluster * c.parts * -(-T // c.tokens)


def _longest(T: int, F: int, c: TuningConfig) -> float:
    """Returns what the busiest multiprocessor computes: rows, by its share of a sum, by tokens."""
    rounds = -(-_blocks(T, F, c) // (c.num_ctas // c.cluster * c.cluster))
    return rounds * (c.groups - c.shared / 2) * min(T, c.tokens) / c.parts
