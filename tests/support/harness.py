"""Requests as lm-eval, EleutherAI's evaluation harness, makes them, and a small engine."""

from typing import Any

from lm_eval.api.instance import Instance

MAX_LENGTH = 80
SIZES: dict[str, Any] = dict(
    dtype="float32", max_num_seqs=4, max_num_batched_tokens=64, token_buckets=(64,),
    decode_buckets=(4,), block_size=16, num_blocks=64, warm_up=False, use_tqdm=False,
)  # fmt: skip


def requests(kind, *arguments):
    several = [a if isinstance(a, tuple) else (a,) for a in arguments]
    return [Instance(kind, {}, each, 0) for each in several]


def score(lm, *pairs):
    return lm.loglikelihood(requests("loglikelihood", *pairs), disable_tqdm=True)


def roll(lm, *texts):
    return lm.loglikelihood_rolling(requests("loglikelihood_rolling", *texts), disable_tqdm=True)


def generate(lm, *prompts, **kwargs):
    kwargs = dict(until=[], max_gen_toks=12) | kwargs
    return lm.generate_until(
        requests("generate_until", *((p, kwargs) for p in prompts)), disable_tqdm=True
    )
