"""The device functions of a pipeline's stages, in place of those that run a whole model."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
import functools
from typing import Any

import jax
import jax.numpy as jnp

from jaxrunner import pytree
from jaxrunner import step as device
from jaxrunner.device import entry_points, tables, xla_options
from jaxrunner.device.entry_point import (
    EntryPoint,
    abstract_state,
    abstract_tables,
    abstract_vector,
)
from jaxrunner.device.entry_points import ENTRY_POINTS
from jaxrunner.device.packing import pack_on_device, unpack
from jaxrunner.indexing import take
from jaxrunner.parallel.stages import Outcome, is_last, num_stages, rank_of
from jaxrunner.program.bucket import AdmitSize, Bucket, SampleSize
from jaxrunner.program.program import Program
from jaxrunner.program.shapes import admission_spec, plan_spec
from jaxrunner.speculators.speculator import write_drafts
from jaxrunner.types import Array, SamplingMetadata, State, StepOutput


def stage(params: Any, state: State, vector: Array, *x: Array, program: Program, size: Bucket):
    """Runs the layers of a stage that is not the last. x: [T, E], of the stage before, if any.

    Returns the state, x for the next stage, and the rows that `receive` takes.
    """
    plan = unpack(plan_spec(program, size), vector)
    state, _, rows, hidden, _ = device.forward(
        params, state, plan, program=_given(program, *x), bucket=size
    )
    return state, hidden, rows


def receive(
    state: State, rows: SamplingMetadata, outcome: Outcome, slot: Array,
    *, program: Program, size: SampleSize,
) -> State:  # fmt: skip
    """Writes what the last stage sampled, and its drafts. `state` is without its KV cache.

    slot: of the rows, R where another request has it by now.
    """
    rows, requests, stood = replace(rows, slot=slot), state.requests, None
    if outcome.num_sampled is not None:  # whatever rule the drafts stood by
        stood = jnp.maximum(outcome.num_sampled - 1, 0)
    requests, *_ = device.advance(requests, rows, outcome.token_ids, stood)
    if outcome.drafts is not None:
        requests = write_drafts(requests, rows, outcome.drafts)
    return replace(state, requests=requests)


def step(
    params: Any, state: State, vector: Array, x: Array, *, program: Program, size: Bucket
):  # fmt: skip
    """Runs the last stage of a step of the usual requests, behind x, [T, E].

    Returns the state, the packed `StepOutput` and what the other stages write down.
    """
    plan = unpack(plan_spec(program, size), vector)
    usual = SampleSize(size.num_rows, num_drafts=size.num_drafts)
    state, output = device.step(
        params, state, plan, program=_given(program, x), bucket=size, size=usual
    )
    return state, pack_on_device(output), _outcome(state, plan.slot, output, size.num_drafts)


def forward(params: Any, state: State, vector: Array, x: Array, *, program: Program, size: Bucket):
    """Runs the first phase of the last stage, behind x, [T, E]; returns what `forward` does."""
    plan = unpack(plan_spec(program, size), vector)
    return entry_points.forward_plan(
        params, state, plan, program=_given(program, x), bucket=size
    )  # fmt: skip


def sample(
    logits: Array, state: State, rows: SamplingMetadata, mask: Array | None,
    heads: dict[str, Array],
    *, program: Program, size: SampleSize,
) -> tuple[State, Array, Outcome]:  # fmt: skip
    """Runs the second phase of the last stage; returns what the others write down too, but for
    drafts, which `propose` makes next."""
    drawn = device.draw(logits, state, rows, mask, program=program, size=size)
    state, output = device.finish(state, rows, drawn, heads, program=program)
    num_sampled = output.num_sampled if size.num_drafts else None
    return state, pack_on_device(output), Outcome(output.token_ids, num_sampled, None)


def _outcome(state: State, slot: Array, output: StepOutput, num_drafts: int) -> Outcome:
    """Returns what a step sampled, and the drafts that lie behind it in the requests."""
    if not num_drafts:
        return Outcome(output.token_ids, None, None)
    at = take(state.requests.total_len, slot)[:, None] + jnp.arange(num_drafts)[None]
    drafts = take(state.requests.token_ids, (slot[:, None], at))
    return Outcome(output.token_ids, output.num_sampled, drafts)


def admit(state: State, vector: Array, *, program: Program, size: AdmitSize) -> State:
    """Writes new requests into their slots, and nothing of what the last stage samples by."""
    admission, rows = unpack(admission_spec(program, size), vector)
    held = {name: row for name, row in rows.items() if name in state.tables}
    return tables.admit(state, admission, held)


def entry_points_of(program: Program) -> Mapping[str, EntryPoint]:
    """Returns the device functions that a program's engine runs, by their names."""
    if num_stages(program.config) == 1:
        return ENTRY_POINTS
    return LAST if is_last(program.config) else BEFORE


def _given(program: Program, *x: Array) -> Program:
    """Returns a program whose layers begin with what the stage before gave."""
    if not x:
        return program
    return replace(program, model=program.model._replace(embed=lambda *_: x[0]))


def _stage_arguments(program: Program, params: Any, size: Bucket) -> tuple:
    own = params, abstract_state(program), abstract_vector(plan_spec(program, size))
    x = jax.ShapeDtypeStruct((size.num_tokens, program.dims["E"]), jnp.dtype(program.engine.dtype))
    return own if rank_of(program.config) == 0 else (*own, x)


def _receive_arguments(program: Program, params: Any, size: SampleSize) -> tuple:
    B = size.num_rows
    rows = pytree.abstract(SamplingMetadata, program.dims | dict(B=B))
    slot = jax.ShapeDtypeStruct((B,), jnp.int32)
    return abstract_tables(program), rows, _abstract_outcome(B, size.num_drafts), slot


def _abstract_outcome(num_rows: int, num_drafts: int) -> Outcome:
    dims = dict(B=num_rows, J=1 + num_drafts, K=num_drafts, drafts=num_drafts > 0)
    return pytree.abstract(Outcome, dims)


def _told(program: Program) -> Outcome:
    return _abstract_outcome(1, program.num_drafts)  # the structure counts


def _rows(program: Program) -> SamplingMetadata:
    return pytree.abstract(SamplingMetadata, program.dims | dict(B=1))  # the structure counts


def _batches(program: Program, buckets: Sequence[Bucket]) -> list[SampleSize]:
    sizes = sorted({(bucket.num_rows, bucket.num_drafts) for bucket in buckets})
    return [SampleSize(B, num_drafts=K) for B, K in sizes]


BEFORE = {
    "stage": EntryPoint(
        "stage",
        stage,
        _stage_arguments,
        output=lambda program: (abstract_state(program), 0, _rows(program)),
        sizes=lambda program, buckets: buckets,
        options=xla_options.of_step,
    ),
    "receive": EntryPoint(
        "receive",
        receive,
        _receive_arguments,
        output=abstract_tables,
        sizes=_batches,
        is_small=True,
    ),
    "admit": ENTRY_POINTS["admit"]._replace(function=admit),
    "copy": ENTRY_POINTS["copy"],
}
LAST = {name: ENTRY_POINTS[name] for name in ("admit", "copy", "prompt_logprobs")} | {
    "step": ENTRY_POINTS["step"]._replace(
        function=step,
        arguments=_stage_arguments,
        output=lambda program: (abstract_state(program), 0, _told(program)),
    ),
    "forward": ENTRY_POINTS["forward"]._replace(function=forward, arguments=_stage_arguments),
    "sample": ENTRY_POINTS["sample"]._replace(
        function=sample,
        output=lambda program: (abstract_tables(program), 0, replace(_told(program), drafts=None)),
    ),
    "propose": ENTRY_POINTS["propose"]._replace(
        arguments=functools.partial(
            entry_points.propose_arguments, phase=forward, arguments=_stage_arguments
        )
    ),
}
