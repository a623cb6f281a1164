"""The abstract inputs and outputs of an engine's programs, by their padded sizes."""

from dataclasses import replace
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jaxrunner import pytree
from jaxrunner.api.sampling_params import MAX_LOGPROB_IDS
from jaxrunner.parallel.mesh import TENSOR
from jaxrunner.program.bucket import (
    FEW_STOP_IDS,
    MAX_TARGETS,
    WIDE,
    AdmitSize,
    Bucket,
    CopySize,
    MultiStepBucket,
    PromptLogprobsSize,
    SampleSize,
)
from jaxrunner.program.program import Program
from jaxrunner.types import Admission, Copies, Logprobs, Plan, StepOutput


@functools.lru_cache(maxsize=1024)  # asked for in every step
def plan_spec(program: Program, size: Bucket | MultiStepBucket) -> Plan:
    """Returns the abstract plan of a size; W is the most blocks that its tokens can need."""
    T, B = size.num_tokens, size.num_rows
    dims = program.dims
    pairs = zip(dims["G"], program.cache_groups, strict=True)
    groups = tuple(of | dict(W=T // group.block_size + B) for of, group in pairs)
    return pytree.abstract(Plan, dims | dict(B=B, G=groups))


@functools.lru_cache(maxsize=64)
def admission_spec(program: Program, size: AdmitSize) -> tuple[Admission, dict[str, Any]]:
    """Returns the abstract admission of a size, and its rows of the slot tables."""
    A, W, wide = size
    dims = program.dims | dict(A=A, W=W, R=A)
    dims |= {} if wide else dict.fromkeys(WIDE, 0) | dict(X=FEW_STOP_IDS)
    rows = {
        t.name: pytree.abstract(t.params, dims | dict(t.dims) | dict.fromkeys(t.shared, 0))
        for t in program.tables
        if t.row is not None
    }
    return pytree.abstract(Admission, dims), rows


@functools.lru_cache(maxsize=8)
def copies_spec(program: Program, size: CopySize) -> tuple[Copies, ...]:
    """Returns abstract copies, by cache group."""
    dims = program.dims | dict(C=size.num_copies)
    return tuple(pytree.abstract(Copies, dims) for _ in program.cache_groups)


def admit_sizes(program: Program) -> tuple[AdmitSize, ...]:
    """Returns the sizes of admissions: a few requests, many, or some with long lists.

    On a CPU one size serves all: padding costs a launch less than one more program costs a start.
    """
    R = program.engine.max_num_seqs
    few, many = min(8, R), min(64, R)
    if jax.default_backend() == "cpu":
        return (AdmitSize(few, 8192, True),)
    return AdmitSize(few, 1024), AdmitSize(many, 8192), AdmitSize(few, 8192, True)


def logprob_widths(vocab_size: int) -> tuple[int, ...]:
    """Returns the columns of logprobs that programs have: a few sizes, up to all tokens."""
    return (*(C for C in (1, 20, MAX_LOGPROB_IDS) if C < vocab_size), vocab_size)


def prompt_logprobs_size(
    num_tokens: int, num_logprobs: int, *, lora: bool = False
) -> PromptLogprobsSize:
    """Returns the size of launches that compute prompt logprobs of a step with T tokens."""
    return PromptLogprobsSize(num_tokens, min(MAX_TARGETS, num_tokens), num_logprobs, lora)


@functools.lru_cache(maxsize=256)
def output_spec(
    program: Program, size: SampleSize, num_steps: int = 1, num_tokens: int = 0
) -> StepOutput:
    """Returns the abstract output of a step with this sampling, or of several in one launch.

    num_tokens: T, for heads that return an array for each token.
    """
    B, C, J = size.num_rows, size.num_logprobs, num_steps * (1 + size.num_drafts)
    dims = program.dims | dict(B=B, J=J, N=B * J, C=C, Z=int(C > 0))
    dims |= {"3+K": 3 + program.num_drafts, "drafts": program.num_drafts > 0}
    return replace(pytree.abstract(StepOutput, dims), heads=heads_spec(program, B, num_tokens))


def logits_spec(program: Program, num_rows: int, num_each: int) -> jax.ShapeDtypeStruct:
    """Returns the abstract logits of a step, [B, J, V], with their sharding on a mesh."""
    shape = num_rows, num_each, program.dims["V"]
    at = None
    if program.mesh is not None and program.num_shares > 1:
        at = NamedSharding(program.mesh, PartitionSpec(None, None, TENSOR))
    return jax.ShapeDtypeStruct(shape, jnp.dtype(program.engine.dtype), sharding=at)


def heads_spec(
    program: Program, num_rows: int, num_tokens: int = 0
) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the abstract arrays of a model's heads for so many rows and tokens."""
    dims = program.dims | dict(B=num_rows, T=num_tokens)
    return {
        head.name: jax.ShapeDtypeStruct(
            tuple(dims[axis] for axis in head.axes.split()), jnp.dtype(head.dtype)
        )
        for head in program.model.heads
    }


@functools.lru_cache(maxsize=256)
def prompt_logprobs_spec(program: Program, size: PromptLogprobsSize) -> tuple[Any, ...]:
    """Returns the abstract output of prompt logprobs: slots, positions, logprobs."""
    U, C = size.num_targets, size.num_logprobs
    one = jax.ShapeDtypeStruct((U,), jnp.int32)
    return one, one, pytree.abstract(Logprobs, program.dims | dict(N=U, C=C))
