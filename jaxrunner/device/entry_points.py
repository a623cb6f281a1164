"""The device functions that are compiled: one vector in, one vector out, the state donated."""

from dataclasses import replace
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrunner import pytree
from jaxrunner import step as device
from jaxrunner.device.lowering import Spec
from jaxrunner.device.packing import pack_on_device, packed_size, unpack
from jaxrunner.device.program_key import Key
from jaxrunner.program import (
    COPIES,
    AdmitSize,
    Bucket,
    CopySize,
    Program,
    SampleSize,
    ScoreSize,
    Steps,
    admission_spec,
    admit_sizes,
    copies_spec,
    logprob_widths,
    make_state,
    plan_spec,
    score_size,
)
from jaxrunner.sampling import RULES
from jaxrunner.sampling.sampler import describe_prompt
from jaxrunner.types import Array, Rows, State, Targets


class Work(NamedTuple):
    """A step that is about to be launched."""

    req_ids: tuple[str, ...]  # in row order
    bucket: Bucket | Steps
    plan: np.ndarray  # packed
    size: SampleSize
    num_targets: int  # prompt tokens to score, at most
    target_columns: int


def step(params, state: State, vector: Array, *, program: Program, size: Bucket):
    """Runs a whole step of the usual requests. Returns the state and the packed `StepOutput`."""
    plan, usual = unpack(plan_spec(program, size), vector), SampleSize(size.num_rows)
    state, output = device.step(params, state, plan, program=program, bucket=size, size=usual)
    return state, pack_on_device(output)


def steps(params, state: State, vector: Array, *, program: Program, size: Steps):
    """Runs several decode steps. Returns the state and the packed `StepOutput`."""
    plan = unpack(plan_spec(program, size), vector)
    state, output = device.steps(params, state, plan, program=program, size=size)
    return state, pack_on_device(output)


def forward(params, state: State, vector: Array, *, program: Program, size: Bucket):
    """Runs the first phase of a step: all but the sampling.

    Returns the state, the logits, [B, J, V], the rows, hidden, [T, E], and prompt tokens to score.
    """
    plan = unpack(plan_spec(program, size), vector)
    state, batch, rows, hidden = device.forward(params, state, plan, program=program, bucket=size)
    logits = device.score(params, hidden, batch, program)
    return state, logits, rows, hidden, device.find_targets(state.requests, batch, rows)


def sample(logits, state: State, rows: Rows, mask, *, program: Program, size: SampleSize):
    """Runs the second phase. `state` is without its KV cache; mask is None where not `rich`.

    Returns the state and the packed `StepOutput`. mask: [B, J, ceil(V / 32)], a bit for each
    token allowed.
    """
    drawn = device.draw(logits, state, rows, mask, program=program, size=size)
    state, output = device.finish(state, rows, drawn)
    return state, pack_on_device(output)


def score(params, state: State, hidden, targets: Targets, first, *, program, size: ScoreSize):
    """Describes the prompt tokens `first` to `first + U` of the targets.

    Returns the packed slots, positions and `Logprobs`, [U] each.
    """
    at = first + jnp.arange(size.num_targets)
    targets = jax.tree.map(lambda x: device.take(x, at), targets)
    logits = program.model.logits(program.config, params, device.take(hidden, targets.source))
    logits = logits.astype(jnp.float32)
    logprobs = describe_prompt(logits, targets, state.requests, state.sampling, program, size)
    return pack_on_device((targets.slot, targets.positions, logprobs))


def admit(state: State, vector: Array, *, program: Program, size: AdmitSize) -> State:
    """Writes new requests into their slots. `state` is without its KV cache."""
    return device.admit(state, *unpack(admission_spec(program, size), vector))


def copy(state: State, vector: Array, *, program: Program, size: CopySize) -> State:
    """Copies KV blocks."""
    copies = unpack(copies_spec(program, size), vector)
    return device.copy_blocks(state, copies, program)


FUNCTIONS = dict(
    copy=copy, step=step, steps=steps, forward=forward, sample=sample, score=score, admit=admit
)  # fmt: skip


# XLA's default, and loops: the device looks by itself whether another step is due.
IN_GRAPHS = "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,DYNAMIC_SLICE_FUSION,WHILE"
LOOP = (("xla_gpu_enable_command_buffer", IN_GRAPHS),)
# A graph is updated before it is launched, which takes 2 ms of the first token's time; kernels of a
# prefill are long enough to be launched one by one.
NO_GRAPH = (("xla_gpu_graph_min_graph_size", "1000000"),)
# Of products of so many tokens cuBLAS has the fastest, and Triton's need not be compiled and timed.
MANY, NO_TRITON = 128, (("xla_gpu_enable_triton_gemm", "False"),)
# Products are timed, and not compared with each other, which takes longer.
TIMED = (("xla_gpu_autotune_level", "2"),)


def abstract(tree: Any) -> Any:
    """Returns the shapes and dtypes of a tree of arrays."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


def program_spec(program: Program, params: Any, key: Key) -> Spec:
    """Says what a program is compiled from: the one source for warm-up and dispatch.

    `params` may be abstract.
    """
    state = jax.eval_shape(functools.partial(make_state, program))
    tables = replace(state, kv=())
    size, static = key.size, dict(program=program, size=key.size)

    def vector(spec: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((packed_size(spec),), jnp.int32)

    args: tuple[Any, ...]
    if key.name == "admit":
        args = tables, vector(admission_spec(program, size))
    elif key.name == "copy":
        args = state, vector(copies_spec(program, size))
    elif key.name == "sample":
        dims = program.dims | dict(B=size.num_rows)
        B, J, V = (dims[axis] for axis in "BJV")
        logits = jax.ShapeDtypeStruct((B, J, V), jnp.dtype(program.engine.dtype))
        mask = jax.ShapeDtypeStruct((B, J, -(-V // 32)), jnp.int32) if size.rich else None
        args = logits, tables, pytree.abstract(Rows, dims), mask
    elif key.name == "score":
        dims = program.dims | dict(T=size.num_tokens)
        hidden = jax.ShapeDtypeStruct((dims["T"], dims["E"]), jnp.dtype(program.engine.dtype))
        first = jax.ShapeDtypeStruct((), jnp.int32)
        args = params, tables, hidden, pytree.abstract(Targets, dims), first
    else:
        args = params, state, vector(plan_spec(program, size))
    donated = () if key.name == "score" else ("state",)
    one = program.dims | dict(B=1, T=1)  # of `out` the structure counts, not the shapes
    rows, targets = (pytree.abstract(cls, one) for cls in (Rows, Targets))
    out = dict(
        admit=tables, copy=state, step=(state, 0), steps=(state, 0), sample=(tables, 0), score=0,
        forward=(state, 0, rows, 0, targets),
    )  # fmt: skip
    function, options = FUNCTIONS[key.name], _options(key)
    return Spec(function, tuple(static.items()), args, out[key.name], donated, options)


def _options(key: Key) -> tuple[tuple[str, str], ...]:
    """Returns XLA's options for a program."""
    match key:
        case Key("steps", Steps() as size):
            options, tokens = LOOP, size.num_rows
        case Key("step" | "forward", Bucket() as size):
            options, tokens = () if size.query_len else NO_GRAPH, size.num_tokens
        case _:
            return ()
    return TIMED + options + (NO_TRITON if tokens >= MANY else ())


def step_key(bucket: Bucket, num_steps: int) -> Key:
    """Names the program of usual requests, of one step or of several in one launch."""
    if num_steps == 1:
        return Key("step", bucket)
    return Key("steps", Steps(num_steps, SampleSize(bucket.num_rows)))


def usual_spec(program: Program, params: Any, key: Key) -> Spec:
    """Returns the `program_spec` of a program with the usual rules, which cannot be pickled."""
    return program_spec(program._replace(rules=RULES), params, key)


def program_keys(program: Program, buckets: tuple[Bucket, ...], *, rich: bool) -> list[Key]:
    """Returns the programs that an engine can need; with `rich`, those of rare parameters too."""
    keys = [Key("step", bucket) for bucket in buckets] + [Key("copy", COPIES)]
    keys += [Key("admit", size) for size in admit_sizes(program)]
    widths = logprob_widths(program.config.vocab_size) if rich else ()
    rare = [(True, C) for C in (0, *widths) if rich]
    if (n := program.engine.num_decode_steps) > 1:
        decodes = [bucket.num_rows for bucket in buckets if bucket.query_len == 1]
        # Those of all tokens are too many to be kept for several steps.
        samples = [SampleSize(B, *size) for B in decodes for size in [(False, 0), *rare[:-1]]]
        keys += [Key("steps", Steps(n, sample)) for sample in samples]
    if not rich:
        return keys
    rows = sorted({bucket.num_rows for bucket in buckets})
    keys += [Key("forward", bucket) for bucket in buckets]
    keys += [Key("sample", SampleSize(B, *size)) for B in rows for size in [(False, 0), *rare]]
    scores = {score_size(bucket.num_tokens, C) for bucket in buckets for C in widths}
    return keys + [Key("score", size) for size in scores]
