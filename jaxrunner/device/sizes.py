"""The sizes that an engine's device functions are compiled for, given its buckets."""

from collections.abc import Sequence

from jaxrunner.program.bucket import Bucket, MultiStepBucket, SampleSize
from jaxrunner.program.program import Program
from jaxrunner.program.shapes import logprob_widths, prompt_logprobs_size


def columns(program: Program) -> list[int]:
    """Returns the columns of logprobs that programs with rare rules are compiled with."""
    return [0, *logprob_widths(program.config.vocab_size)]


def multi_steps(program: Program, buckets: Sequence[Bucket], samples: list) -> list:
    """Returns the sizes of several steps in one launch, with each kind of `samples`."""
    n = program.engine.num_decode_steps
    steps = [bucket for bucket in buckets if bucket.query_len and n > 1]
    return [
        MultiStepBucket(
            n,
            SampleSize(bucket.num_rows, all_rules, C, bucket.num_drafts),
            bucket.lora,
            bucket.short,
        )
        for bucket in steps
        for all_rules, C in samples
    ]


def rare_multi_steps(program: Program, buckets: Sequence[Bucket]) -> list:
    """Returns the sizes of several steps in one launch with rare rules."""
    # Without logprobs of all tokens, which would take too much memory for several steps.
    return multi_steps(program, buckets, [(True, C) for C in columns(program)[:-1]])


def draws(program: Program, buckets: Sequence[Bucket]) -> list:
    """Returns the sizes of the second phase of a step, sampling."""
    kinds = [(False, 0), *((True, C) for C in columns(program))]
    rows = sorted({(bucket.num_rows, bucket.num_drafts) for bucket in buckets})
    return [SampleSize(B, all_rules, C, K) for B, K in rows for all_rules, C in kinds]


def prompt_logprobs_sizes(program: Program, buckets: Sequence[Bucket]) -> set:
    """Returns the sizes of launches that compute prompt logprobs."""
    widths = columns(program)[1:]
    sizes = {(bucket.num_tokens, bucket.lora and bool(program.saved)) for bucket in buckets}
    return {prompt_logprobs_size(T, C, lora=lora) for T, lora in sizes for C in widths}
