"""Buckets: the padded sizes that step programs are compiled for, and the choice of one."""

from collections.abc import Callable, Sequence
from typing import Any

from jaxrunner.config import EngineConfig
from jaxrunner.program.bucket import Bucket
from jaxrunner.speculators.speculator import Speculator

# Decode sizes on a GPU. By the step times of an H200, if batches of up to 256 requests are equally
# frequent, sizes from 8 on cost 3% more than the best six, powers of two 10% more. Size 1 is for
# single requests, which are common.
GPU_SIZES = (1, 8, 32, 64, 128, 192, 256, 384, 512, 768, 1024)

# On a CPU the time of a step grows with its padded tokens, and each program takes long to compile:
# few sizes, and small ones. More than 8 requests at once share its cores for little gain.
CPU_SIZES: dict[str, Any] = dict(
    max_num_seqs=8, max_num_batched_tokens=1024, decode_buckets=(1, 8, 64, 256),
    token_buckets=(32, 256, 1024, 4096),
)  # fmt: skip
# Fixed cost of a step, in tokens: a first step of 32, 256 or 1,024 tokens of SmolLM2-135M's shape
# takes 160, 690 or 2,900 CPU ms.
CPU_STEP_COST = 48

# Most tokens of an adaptive step; with many requests each has fewer drafts. From 512 tokens on, the
# time of a step of an 8B model on an H200 grows in proportion to its tokens.
MOST_VERIFIED = 512


def step_buckets(
    config: EngineConfig,
    speculator: Speculator | None = None,
    gains_short: Callable[[Bucket], bool] = lambda bucket: False,
) -> tuple[Bucket, ...]:
    """Returns the buckets of an engine, smallest first.

    Rows of a uniform bucket have 1 + K tokens each, for K drafts; a ragged bucket has rows of any
    length, and follows a uniform one of the same size. Every batch within `max_num_seqs` and
    `max_num_batched_tokens` fits a bucket. With adaptive drafts only uniform buckets verify drafts,
    fewer for each request in those of many rows. Steps with adapters have buckets of their own, and
    so have steps of short requests where these are faster by it, which precede those of others.

    gains_short: whether steps of a uniform bucket are.
    """
    R, T = config.max_num_seqs, config.max_num_batched_tokens
    rows = config.decode_buckets or powers(1, R)
    sizes = config.token_buckets or powers(min(16, T), T)
    K = 0 if speculator is None else speculator.num_drafts
    adaptive = speculator is not None and speculator.adaptive
    if adaptive:
        all_rows = _up_to(R, rows)
        verified = [(r, min(K, MOST_VERIFIED // r - 1, T // r - 1)) for r in all_rows]
        uniform = [*((r, 0) for r in all_rows), *((r, k) for r, k in verified if k > 0)]
    else:
        uniform = [(r, K) for r in _up_to(min(R, T // (1 + K)), rows) if r]
    buckets = [Bucket(r * (1 + k), r, 1 + k, k) for r, k in uniform]
    short = [bucket._replace(short=True) for bucket in buckets if gains_short(bucket)]
    buckets += [Bucket(s, min(s, R), 0, 0 if adaptive else K) for s in _up_to(T, sizes)]
    if config.enable_lora:
        buckets += [bucket._replace(lora=True) for bucket in buckets]
    return tuple(sorted(short + buckets, key=lambda b: (b.num_tokens, b.query_len == 0)))


def choose(
    buckets: Sequence[Bucket],
    counts: Sequence[int],
    is_pending: Callable[[Bucket], bool] = lambda bucket: False,
    *,
    several: bool = False,
    num_drafts: int = 0,
    lora: bool = False,
    others: Sequence[Sequence[int]] = (),
    ragged: bool = False,
    short: bool = False,
) -> Bucket:
    """Returns the first bucket that holds rows of `counts` tokens, preferably a compiled one.

    is_pending: whether a bucket's program is still being compiled.
    several: whether the launch has several steps, which only uniform buckets run.
    num_drafts: the least drafts that the step proposes for each row.
    lora: whether a request of the step has an adapter.
    others: counts of the other data ranks, which run in the same bucket.
    ragged: whether a ragged bucket is wanted.
    short: whether no request has more than `SHORT_LEN` tokens, nor needs a rare program.

    Raises:
      ValueError: no bucket holds them.
    """
    every = counts, *others
    tokens, rows, most = (
        max(map(sum, every)),
        max(map(len, every)),
        max(map(max, filter(None, every))),
    )
    fits = [
        b
        for b in buckets
        if b.num_tokens >= tokens
        and b.num_rows >= rows
        and (b.query_len >= most and not ragged if b.query_len else not several)
        and b.short <= short
        and b.num_drafts >= num_drafts
        and b.lora == lora
    ]
    if not fits:
        raise ValueError(
            f"a step of {rows} requests and {tokens} tokens fits no bucket, the largest is "
            f"{buckets[-1]}: raise max_num_batched_tokens or max_num_seqs"
        )
    return next((b for b in fits if not is_pending(b)), fits[0])


def _up_to(last: int, sizes: Sequence[int]) -> list[int]:
    """Returns the sizes below `last`, then `last`."""
    return [size for size in sizes if size < last] + [last]


def powers(first: int, last: int) -> list[int]:
    """Returns `first` times powers of two below `last`, then `last`."""
    sizes = [first]
    while sizes[-1] < last:
        sizes.append(min(2 * sizes[-1], last))
    return sizes
