"""Problems for attention: of rows that decode, that verify drafts, of prompts, of latents.

All numbers are random, table entries that nothing may read are junk, and so is what lies in the
cache where no token is.
"""

from collections.abc import Callable
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrunner.kernels_pallas.attention.decode_attention import decode_attention
from jaxrunner.kernels_pallas.attention.latent_decode import ROWS, latent_decode
from jaxrunner.kernels_pallas.cases.case import Case
from jaxrunner.kernels_pallas.reference import quantize
from jaxrunner.types import Array


class Attention(NamedTuple):
    """Rows of `new` tokens behind `context` others. The sizes are Llama-3-8B's.

    A context of -new makes a row's length 0: prefill's tokens of such a row attend to nothing.
    """

    name: str
    new: tuple[int, ...]
    context: tuple[int, ...]
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    block_size: int = 64
    dtype: str = "bfloat16"
    window: int | None = None
    soft_cap: float | None = None
    sinks: bool = False
    kv_dtype: str | None = None  # of 8 bits, with scales
    query_len: int = 1  # places of a row's tokens in decode attention; `new` says how many it has
    columns: int = 0  # of the table of blocks at least, as `max_model_len` makes it

    @property
    def lens(self) -> np.ndarray:
        """Tokens of each row; none where it has no new one."""
        new = np.array(self.new, np.int32)
        return np.where(new > 0, new + np.array(self.context, np.int32), 0).astype(np.int32)

    def make(self, seed: int, *, decode: bool) -> tuple[Array, ...]:
        """Returns q, k, v, blocks, the starts of rows (of prefill alone) and their lengths.

        With `query_len` then how many tokens each row has, with `kv_dtype` the scales of k and v.
        """
        rng, key = np.random.default_rng(seed), jax.random.key(seed)
        lens, S, K, D = self.lens, self.block_size, self.kv_heads, self.head_dim
        used = -(-lens // S)
        N, T = int(used.sum()) + 3, len(self.new) * self.query_len
        T = T if decode else sum(self.new)
        order = rng.permutation(N)
        ends = np.cumsum(used)
        columns = max(int(used.max()) + 2, self.columns)
        blocks = rng.integers(-(2**31), 2**31 - 1, (len(lens), columns), np.int32)
        written = np.zeros((N, S), bool)
        for row, (count, end, length) in enumerate(zip(used, ends, lens, strict=True)):
            mine = order[end - count : end]
            blocks[row, :count] = mine
            written[mine] = np.arange(count * S).reshape(count, S) < length
        keys = jax.random.split(key, 3)
        shape = (N, K, S, D)
        kv = [jax.random.normal(k, shape, jnp.dtype(self.dtype)) for k in keys[:2]]
        kv = [jnp.where(written[:, None, :, None], x, jnp.nan) for x in kv]
        q = jax.random.normal(keys[2], (T, self.heads, D), jnp.dtype(self.dtype))
        if decode and self.query_len > 1:  # places without a token have anything
            there = np.arange(self.query_len)[None] < np.array(self.new)[:, None]
            q = jnp.where(there.reshape(T, 1, 1), q, jnp.nan)
        starts = np.concatenate([[0], np.cumsum(self.new)]).astype(np.int32)
        rows = (lens,) if decode else (starts, lens)
        rows += (np.array(self.new, np.int32),) if self.query_len > 1 else ()
        rows = [jnp.asarray(x) for x in rows]
        if self.kv_dtype is None:
            return q, *kv, jnp.asarray(blocks), *rows
        (k, k_scale), (v, v_scale) = (quantize(x, jnp.dtype(self.kv_dtype)) for x in kv)
        return q, k, v, jnp.asarray(blocks), *rows, k_scale, v_scale

    def case(self, kernel: Callable[..., Any]) -> Case:
        """Returns the problem for one of the two kernels."""
        decode, name = kernel is decode_attention, kernel.__name__
        new, context = np.array(self.new, np.float64), np.array(self.context, np.float64)
        sinks = np.linspace(-2, 3, self.heads).astype(np.float32) if self.sinks else None
        options = dict(scale=self.head_dim**-0.5, window=self.window, soft_cap=self.soft_cap)
        stored = jnp.dtype(self.kv_dtype or self.dtype).itemsize * self.head_dim
        size = 2 * self.kv_heads * (stored + (0 if self.kv_dtype is None else 4))
        flops = 4 * self.heads * self.head_dim * (new * np.maximum(context + new / 2, 0)).sum()
        amount = float(self.lens.sum()) * size if decode else float(flops)
        names = ("num_tokens",) if self.query_len > 1 else ()
        names += () if self.kv_dtype is None else ("k_scale", "v_scale")
        options |= dict(query_len=self.query_len) if self.query_len > 1 else {}
        run = functools.partial(_attend, kernel, names, **options, sinks=sinks)
        make = functools.partial(self.make, decode=decode)
        unit = "TB/s" if decode else "TFLOP/s"
        return Case(name, self.name, make, run, amount, unit, options | dict(sinks=sinks))


def _attend(
    kernel: Callable[..., Any], names: tuple[str, ...], *args: Array, **options: Any
) -> Any:
    """Calls a kernel, the last arguments by their names."""
    first = len(args) - len(names)
    return kernel(*args[:first], **dict(zip(names, args[first:], strict=True)), **options)


def latents(rows: Attention, heads: int = 16, rank: int = 512) -> Case:
    """Latent attention of one token of each of `rows`. The sizes are DeepSeek-V2-Lite's."""
    D, options = rank + 64, dict(scale=192**-0.5, rank=rank)
    rows = rows._replace(heads=heads, kv_heads=1, head_dim=D)

    def make(seed: int) -> tuple[Array, ...]:
        q, k, _, *rest = rows.make(seed, decode=True)
        return q, k[:, 0], *rest

    run, keys = functools.partial(latent_decode, **options), float(rows.lens.sum())
    # Of many heads products take longer than to read their keys.
    amount, unit = 2 * D * keys, "TB/s"
    if heads > ROWS:
        amount, unit = 2 * heads * (D + rank) * keys, "TFLOP/s"
    return Case("latent_decode", f"{rows.name}, {heads} heads", make, run, amount, unit, options)


EDGES = (1, 63, 64, 65, 0, 200, 2)  # lengths about the ends of blocks, and a row without tokens
DECODES = [
    Attention("edges", tuple(min(1, n) for n in EDGES), tuple(max(0, n - 1) for n in EDGES), 8, 2),
    Attention("split", (1,), (1087,)),
    Attention("skewed", (1,) * 40, (5000,) + (16,) * 39, 8, 2),
    Attention("two rows, window", (1, 1), (5000, 900), 8, 2, window=1024),
    Attention("blocks of 16", (1, 1), (99, 332), 8, 2, block_size=16),
    Attention("blocks of 256", (1, 1), (99, 776), 8, 2, block_size=256),
    Attention("no groups, heads of 64", (1, 1), (99, 332), 4, 4, 64),
    Attention("groups of 7", (1, 1, 1), (99, 332, 63), 14, 2),
    Attention("heads of 80", (1, 1), (99, 332), 4, 4, 80),
    Attention("heads of 96", (1, 1), (99, 332), 8, 2, 96),
    Attention("heads of 256", (1, 1), (99, 332), 8, 4, 256),
    Attention("float16", (1, 1), (99, 332), 8, 2, dtype="float16"),
    Attention("all else", (1,) * 3, (1087, 99, 30), 8, 2, window=77, soft_cap=9.0, sinks=True),
    Attention("fp8", (1,) * 3, (1087, 99, 30), 8, 2, kv_dtype="float8_e4m3fn"),
    Attention("int8", (1,) * 3, (1087, 99, 30), 8, 2, window=77, kv_dtype="int8"),
]
VERIFIES = [
    Attention("2 tokens a row", (2, 1, 0, 2), (0, 64, 5, 331), 8, 2, query_len=2),
    Attention("4 tokens a row", (4, 4, 1, 0, 3), (0, 61, 63, 9, 700), query_len=4),
    Attention("4 tokens a row, split", (4,), (1084,), query_len=4),
    Attention("4 tokens, skewed", (4, 2) * 20, (5000,) + (16,) * 39, 8, 2, query_len=4),
    Attention("4 tokens, two turns", (4, 2) * 8, (5000,) + (16,) * 15, query_len=4),
    Attention("4 tokens, two parts", (4, 3) * 8, (1084,) * 16, query_len=4),
    Attention("2 tokens, groups of 16", (2, 1), (700, 90), 32, 2, query_len=2),
    Attention("4 tokens, many parts", (4, 2), (9000, 5000), 8, 2, query_len=4),
    Attention("8 tokens, two parts", (8, 3) * 4, (180,) * 8, 16, 2, query_len=8),
    Attention("8 tokens a row", (8, 5, 0, 1), (0, 121, 0, 500), 16, 2, query_len=8),
    Attention("3 tokens, groups of 7", (3, 2, 1), (63, 300, 0), 14, 2, query_len=3),
    Attention("5 tokens, no groups", (5, 4), (99, 332), 4, 4, 64, query_len=5),
    Attention("4 tokens, blocks of 16", (4, 3), (99, 332), 8, 2, block_size=16, query_len=4),
    Attention("4 tokens, heads of 64", (4, 3), (599, 332), 8, 2, 64, query_len=4),
    Attention("4 tokens, heads of 80", (4, 3), (99, 332), 4, 4, 80, query_len=4),
    Attention("4 tokens, heads of 256", (4, 3), (99, 332), 8, 4, 256, query_len=4),
    Attention("4 tokens, float16", (4, 3), (99, 332), 8, 2, dtype="float16", query_len=4),
    Attention("4 tokens, all else", (4, 3, 4), (1084, 99, 30), 8, 2,
              window=77, soft_cap=9.0, sinks=True, query_len=4),
    Attention("4 tokens, narrow", (4, 3, 4), (1084, 126, 62), 8, 2, window=3, query_len=4),
    Attention("4 tokens, fp8", (4, 0, 1, 3), (1084, 0, 99, 30), 8, 2,
              kv_dtype="float8_e4m3fn", query_len=4),
    Attention("8 tokens, int8", (8, 7, 1), (1080, 99, 30), 16, 2, window=77, soft_cap=9.0,
              sinks=True, kv_dtype="int8", query_len=8),
]  # fmt: skip
# Rows of one token, which another kernel attends.
_ONES, _NONE = (1,) * 150, (-1,) * 150
PREFILLS = [
    Attention("edges", EDGES, (5, 0, 64, 7, 0, 129, 62), 8, 2),
    Attention("mixed", (*_ONES, 300, *_ONES, 30, 1), (*_NONE, 50, *_NONE, 0, -1), 8, 2),
    Attention("mixed, all", (300, *_ONES), (9, *_NONE), 8, 2, window=99, soft_cap=9.0, sinks=True),
    Attention("blocks of 16", (100, 30), (0, 77), 8, 2, block_size=16),
    Attention("blocks of 256", (300, 30), (0, 300), 8, 2, block_size=256),
    Attention("heads of 64", (100, 30), (0, 77), 4, 4, 64),
    Attention("heads of 80", (100, 30), (0, 77), 4, 4, 80),
    Attention("heads of 96", (100, 30), (0, 77), 8, 2, 96),
    Attention("heads of 256", (100, 30), (0, 77), 8, 4, 256),
    Attention("groups of 7", (100, 30), (0, 77), 14, 2),
    Attention("float16", (100, 30), (0, 77), 8, 2, dtype="float16"),
    Attention("all else", (300, 30), (0, 77), 8, 2, window=100, soft_cap=9.0, sinks=True),
    Attention("fp8", (300, 30), (0, 77), 8, 2, kv_dtype="float8_e4m3fn"),
    Attention("int8", (300, 30), (0, 77), 8, 2, kv_dtype="int8"),
]
LATENTS = [
    latents(DECODES[0]),
    latents(Attention("skewed, 2 tiles of heads", (1,) * 40, (5000,) + (16,) * 39), 128),
    latents(Attention("blocks of 16", (1, 1), (99, 332), block_size=16), 20),
    latents(Attention("float16", (1,), (1087,), block_size=256, dtype="float16"), 64, 256),
]
