"""The device functions that are compiled: one vector in, one vector out, the state donated."""

from collections.abc import Callable
from dataclasses import replace
import functools
from typing import Any

import jax
import jax.numpy as jnp

from jaxrunner import pytree
from jaxrunner import step as device
from jaxrunner.device import multi_step as several
from jaxrunner.device import sizes, tables, xla_options
from jaxrunner.device.entry_point import (
    EntryPoint,
    abstract_state,
    abstract_tables,
    abstract_vector,
)
from jaxrunner.device.packing import pack_on_device, unpack
from jaxrunner.device.prompt_targets import find_targets
from jaxrunner.indexing import take
from jaxrunner.lora.saved_modules import places_of_rows
from jaxrunner.parallel.shards import on_shards
from jaxrunner.program.bucket import (
    COPIES,
    AdmitSize,
    Bucket,
    CopySize,
    MultiStepBucket,
    PromptLogprobsSize,
    SampleSize,
)
from jaxrunner.program.program import Program
from jaxrunner.program.shapes import (
    admission_spec,
    admit_sizes,
    copies_spec,
    heads_spec,
    logits_spec,
    plan_spec,
)
from jaxrunner.sampling.sampler import describe_prompt
from jaxrunner.types import Array, Batch, Plan, SamplingMetadata, State, Targets


def step(params: Any, state: State, vector: Array, *, program: Program, size: Bucket):
    """Runs a whole step without rare rules. Returns the state and the packed `StepOutput`."""
    plan = unpack(plan_spec(program, size), vector)
    usual = SampleSize(size.num_rows, num_drafts=size.num_drafts)
    state, output = device.step(params, state, plan, program=program, bucket=size, size=usual)
    return state, pack_on_device(output)


def multi_step(
    params: Any, state: State, vector: Array, *, program: Program, size: MultiStepBucket
):
    """Runs several decode steps. Returns the state and the packed `StepOutput`."""
    plan = unpack(plan_spec(program, size), vector)
    state, output = several.multi_step(params, state, plan, program=program, size=size)
    return state, pack_on_device(output)


def forward(params: Any, state: State, vector: Array, *, program: Program, size: Bucket):
    """Runs the first phase of a step: all but sampling.

    Returns the state; logits, [B, J, V]; the rows; hidden states, [T, E]; the targets of prompt
    logprobs; outputs of the heads; and (batch, extras) for `propose`, None without a speculator.
    """
    plan = unpack(plan_spec(program, size), vector)
    return forward_plan(params, state, plan, program=program, bucket=size)


def forward_plan(params: Any, state: State, plan: Plan, *, program: Program, bucket: Bucket):
    """Runs the first phase of a step, as `forward` does."""
    state, batch, rows, hidden, extras = device.forward(
        params, state, plan, program=program, bucket=bucket
    )
    logits = device.compute_logits(params, state, hidden, batch, program)
    targets = find_targets(state.requests, batch, rows)
    state, heads = device.run_heads(params, state, hidden, batch, rows, program=program)
    # `query_len` is static, so it cannot be an output.
    kept = None if program.model.speculator is None else (replace(batch, query_len=0), extras)
    return state, logits, rows, hidden, targets, heads, kept


def sample(
    logits: Array, state: State, rows: SamplingMetadata, mask: Array | None,
    heads: dict[str, Array],
    *, program: Program, size: SampleSize,
) -> tuple[State, Array]:  # fmt: skip
    """Runs the second phase, sampling. Returns the state and the packed `StepOutput`.

    state: without its KV caches.
    mask: a bit for each token that grammars allow, [B, J, ceil(V / 32)]; None without `all_rules`.
    """
    drawn = device.draw(logits, state, rows, mask, program=program, size=size)
    state, output = device.finish(state, rows, drawn, heads, program=program)
    return state, pack_on_device(output)


def propose(
    params: Any, state: State, batch: Batch, rows: SamplingMetadata, hidden: Array,
    extras: dict[str, Array], *, program: Program, size: Bucket,
) -> tuple[State, Array | None]:  # fmt: skip
    """Runs the third phase, with a speculator: returns the state and drafts, [B, K]."""
    batch = replace(batch, query_len=size.query_len)
    drafting = functools.partial(device.propose, program=program, num_drafts=size.num_drafts)
    return drafting(params, state, batch, rows, hidden, extras)


def prompt_logprobs(
    params: Any, state: State, hidden: Array, targets: Targets, first: Array,
    *, program: Program, size: PromptLogprobsSize,
) -> Array:  # fmt: skip
    """Computes logprobs of the prompt tokens `first` to `first + U` of the targets.

    Returns the packed slots, positions and `Logprobs`, [U] each.
    """
    at = first + jnp.arange(size.num_targets)
    targets = jax.tree.map(lambda x: take(x, at), targets)
    place = places_of_rows(params, state, targets.slot)
    logits = program.logits(params, take(hidden, targets.source), place)
    logprobs = describe_prompt(logits, targets, state.requests, state.tables, program, size)
    return pack_on_device((targets.slot, targets.positions, logprobs))


def admit(state: State, vector: Array, *, program: Program, size: AdmitSize) -> State:
    """Writes new requests into their slots. `state` is without its KV cache."""
    return tables.admit(state, *unpack(admission_spec(program, size), vector))


def copy(state: State, vector: Array, *, program: Program, size: CopySize) -> State:
    """Copies KV blocks."""
    copies = unpack(copies_spec(program, size), vector)
    return tables.copy_blocks(state, copies, program)


def _step_arguments(program: Program, params: Any, size: Bucket | MultiStepBucket) -> tuple:
    return params, abstract_state(program), abstract_vector(plan_spec(program, size))


def _step_output(program: Program) -> tuple:
    return abstract_state(program), 0


def _copy_arguments(program: Program, params: Any, size: CopySize) -> tuple:
    return abstract_state(program), abstract_vector(copies_spec(program, size))


def _admit_arguments(program: Program, params: Any, size: AdmitSize) -> tuple:
    return abstract_tables(program), abstract_vector(admission_spec(program, size))


def _sample_arguments(program: Program, params: Any, size: SampleSize) -> tuple:
    dims = program.dims | dict(B=size.num_rows, J=1 + size.num_drafts)
    B, J, V = (dims[axis] for axis in "BJV")
    mask = jax.ShapeDtypeStruct((B, J, -(-V // 32)), jnp.int32) if size.all_rules else None
    rows, heads = pytree.abstract(SamplingMetadata, dims), heads_spec(program, B)
    return logits_spec(program, B, J), abstract_tables(program), rows, mask, heads


def propose_arguments(
    program: Program, params: Any, size: Bucket, *,
    phase: Callable[..., tuple] = forward, arguments: Callable[..., tuple] = _step_arguments,
) -> tuple:  # fmt: skip
    """Returns the abstract arguments of `propose`.

    phase: the first phase, from whose outputs they follow. arguments: makes those of that phase.
    """
    args = arguments(program, params, size)
    run = on_shards(phase, program.mesh, args, _forward_output(program))
    out = jax.eval_shape(functools.partial(run, program=program, size=size), *args)
    _, _, rows, hidden, *_, kept = out
    return params, abstract_state(program), kept[0], rows, hidden, kept[1]


def _prompt_logprobs_arguments(program: Program, params: Any, size: PromptLogprobsSize) -> tuple:
    dims = program.dims | dict(T=size.num_tokens)
    hidden = jax.ShapeDtypeStruct((dims["T"], dims["E"]), jnp.dtype(program.engine.dtype))
    first = jax.ShapeDtypeStruct((), jnp.int32)
    return params, abstract_tables(program), hidden, pytree.abstract(Targets, dims), first


def _forward_output(program: Program) -> tuple:
    # Only the structure matters: shapes are placeholders.
    one = program.dims | {"B": 1, "B+1": 2, "J": 1, "T": 1, "query_len": 0}
    rows, targets = (pytree.abstract(cls, one) for cls in (SamplingMetadata, Targets))
    kept = None
    if (speculator := program.model.speculator) is not None:
        kept = pytree.abstract(Batch, one), dict.fromkeys(speculator.extras, 0)
    logits = logits_spec(program, 1, 1)
    hidden = jax.ShapeDtypeStruct((1, 1), jnp.float32)
    return abstract_state(program), logits, rows, hidden, targets, heads_spec(program, 1), kept


ENTRY_POINTS = {
    entry.name: entry
    for entry in (
        EntryPoint(
            "step",
            step,
            _step_arguments,
            _step_output,
            sizes=lambda program, buckets: buckets,
            options=xla_options.of_step,
            is_rehearsed=lambda size: size.query_len > 0,
        ),
        EntryPoint(
            "copy",
            copy,
            _copy_arguments,
            output=abstract_state,
            sizes=lambda program, buckets: (COPIES,),
            is_small=True,
        ),
        EntryPoint(
            "admit",
            admit,
            _admit_arguments,
            output=abstract_tables,
            sizes=lambda program, buckets: admit_sizes(program),
            is_small=True,
        ),
        EntryPoint(
            "multi_step",
            multi_step,
            _step_arguments,
            _step_output,
            sizes=lambda program, buckets: sizes.multi_steps(program, buckets, [(False, 0)]),
            rare_sizes=sizes.rare_multi_steps,
            options=xla_options.of_multi_step,
            is_rehearsed=lambda size: True,
        ),
        EntryPoint(
            "forward",
            forward,
            _step_arguments,
            output=_forward_output,
            rare_sizes=lambda program, buckets: buckets,
            options=xla_options.of_step,
            is_rehearsed=lambda size: size.query_len > 0,
        ),
        EntryPoint(
            "sample",
            sample,
            _sample_arguments,
            output=lambda program: (abstract_tables(program), 0),
            rare_sizes=sizes.draws,
        ),
        EntryPoint(
            "propose",
            propose,
            propose_arguments,
            _step_output,
            rare_sizes=lambda program, buckets: buckets if program.model.speculator else (),
            options=xla_options.of_step,
        ),
        EntryPoint(
            "prompt_logprobs",
            prompt_logprobs,
            _prompt_logprobs_arguments,
            output=lambda program: 0,
            rare_sizes=sizes.prompt_logprobs_sizes,
            donated=(),
        ),
    )
}
