"""One row of logits in a sampling kernel: its rules, and how its logits are read.

A chunk is 128 * depth logits side by side. A tile is what one thread reads of it: `depth` logits
that are 128 apart, so that threads read side by side.
"""

from dataclasses import dataclass, replace
import functools
from typing import NamedTuple

from jax import lax
from jax.experimental import pallas as pl
import jax.numpy as jnp

from jaxrunner.kernels_pallas import lanes
from jaxrunner.kernels_pallas.attention.online_softmax import LOG2_E
from jaxrunner.kernels_pallas.lanes import LANES
from jaxrunner.kernels_pallas.mosaic import Ref
from jaxrunner.types import Array

MAX_ID = 2**31 - 1


@dataclass(frozen=True)
class TuningConfig:
    """Sizes of the passes. None may change a token, but `depth` the last bits of a mass."""

    depth: int = 32  # logits of a tile
    scan_chunks: int = 1  # chunks that a program of the first pass reads
    draw_chunks: int = 4  # chunks that a program of the last pass reads
    ranked: int = 256  # most tokens that are ranked one against another
    cached: int = 4  # groups of 128 tiles that a search keeps in shared memory, 16 KiB each

    def fit(self, vocab_size: int) -> "TuningConfig":
        """Returns these with no more logits a tile than make a chunk of a row."""
        return replace(self, depth=max(1, min(self.depth, vocab_size // LANES)))

    def num_chunks(self, vocab_size: int) -> int:
        """Returns the chunks of a row."""
        return -(-vocab_size // (LANES * self.depth))


class Rules(NamedTuple):
    """The sampling parameters of each row, [N]; scalars in a kernel."""

    greedy: Array
    truncated: Array  # whether min-p, top-k or top-p may take tokens from it
    temperature: Array
    min_p: Array  # its logarithm, -inf where it is off
    k: Array  # 1 where nothing truncates, 0 where it is off
    p: Array  # 1 where it is off
    high: Array  # of the Threefry key of its position
    low: Array


class Row(NamedTuple):
    """A row in a kernel."""

    x_ref: Ref  # all logits, [N * V]
    number: Array
    rules: Rules
    vocab_size: int
    config: TuningConfig

    @property
    def chunks(self) -> int:
        """How many chunks it has."""
        return self.config.num_chunks(self.vocab_size)

    @property
    def chunk_size(self) -> int:
        """How many logits a chunk has; a row has at least as many."""
        return LANES * self.config.depth

    @property
    def noise_key(self) -> tuple[Array, Array]:
        """The key of its noise."""
        return self.rules.high, self.rules.low


def pack(rules: Rules) -> Array:
    """Returns the rules as one array, [N, 8], int32: one launch makes it."""
    columns = [x.astype(jnp.int32) if x.dtype == jnp.bool else x for x in rules]
    return jnp.stack([lax.bitcast_convert_type(x, jnp.int32) for x in columns], axis=1)


def row_of(x_ref: Ref, rules_ref: Ref, number: Array, vocab_size: int, config: TuningConfig) -> Row:
    """Returns a row. rules_ref: of `pack`."""
    column = [rules_ref[number, i] for i in range(len(Rules._fields))]
    temperature, min_p, p = (lax.bitcast_convert_type(column[i], jnp.float32) for i in (2, 3, 5))
    high, low = (lax.bitcast_convert_type(column[i], jnp.uint32) for i in (6, 7))
    rules = Rules(column[0] > 0, column[1] > 0, temperature, min_p, column[4], p, high, low)
    return Row(x_ref, number, rules, vocab_size, config)


def read_chunk(row: Row, chunk: Array) -> tuple[list[Array], list[Array]]:
    """Reads the logits of a chunk, tempered, and their ids: `depth` of [128] each."""
    start = jnp.minimum(chunk * row.chunk_size, row.vocab_size - row.chunk_size)
    logits, ids = [], []
    for i in range(row.config.depth):
        at = start + i * LANES
        x = row.x_ref[pl.ds(row.number * row.vocab_size + at, LANES)]
        ids.append(at + lanes.lane())
        logits.append(_own(row, chunk, x, ids[-1]))
    return logits, ids


def read_tiles(row: Row, tiles: Array) -> tuple[list[Array], list[Array]]:
    """Reads a tile for each thread as `read_chunk` does; tiles: [128], C * 128 for none."""
    wanted = tiles < row.chunks * LANES
    tiles = jnp.where(wanted, tiles, 0)
    chunk, lane = tiles >> 7, tiles & (LANES - 1)
    start = jnp.minimum(chunk * row.chunk_size, row.vocab_size - row.chunk_size) + lane
    logits, ids = [], []
    for i in range(row.config.depth):
        ids.append(start + i * LANES)
        x = lanes.gather(row.x_ref, row.number * row.vocab_size + ids[-1])
        logits.append(jnp.where(wanted, _own(row, chunk, x, ids[-1]), -jnp.inf))
    return logits, ids


def _own(row: Row, chunk: Array, x: Array, ids: Array) -> Array:
    """Divides by the temperature, and drops what belongs to the chunk before.

    The last chunk of a row is as long as the others and reads again what another has.
    """
    x = x.astype(jnp.float32) / row.rules.temperature + 0.0  # -0 becomes 0: they tie
    return jnp.where(ids >= chunk * row.chunk_size, x, -jnp.inf)


def mass_of(x: Array, best: Array) -> Array:
    """Returns the mass of logits where that of `best` is 1."""
    return jnp.exp2((x - best) * LOG2_E)


def first_best(scores: list[Array], ids: list[Array]) -> tuple[Array, Array]:
    """Returns the first id among the best scores, and the score."""
    score = jnp.max(functools.reduce(jnp.maximum, scores))
    first = [jnp.where(s == score, i, MAX_ID) for s, i in zip(scores, ids, strict=True)]
    return jnp.min(functools.reduce(jnp.minimum, first)), score
