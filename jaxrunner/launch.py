"""The device functions that are compiled: one vector in, one vector out, the state donated."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from jaxrunner import step as device
from jaxrunner.layout import (
    AdmitSize,
    Bucket,
    Program,
    admission_spec,
    admit_sizes,
    make_state,
    plan_spec,
)
from jaxrunner.programs import Key, Spec
from jaxrunner.transfer import packed_size, unpack
from jaxrunner.types import Array, State, StepOutput


def step(params, state: State, vector: Array, *, program: Program, size: Bucket):
    """Runs a whole step. Returns the state and the packed output, [B, J + 2]."""
    plan = unpack(plan_spec(program, size), vector)
    state, output = device.step(params, state, plan, program=program, bucket=size)
    return state, _pack(output)


def forward(params, state: State, vector: Array, *, program: Program, size: Bucket):
    """Runs the first phase of a step. Returns the state, the batch and the logits, [B, J, V]."""
    plan = unpack(plan_spec(program, size), vector)
    state, batch, hidden = device.forward(params, state, plan, program=program, bucket=size)
    return state, batch, device.score(params, hidden, batch, program)


def sample(logits, state: State, vector, batch, mask, *, program: Program, size: Bucket):
    """Runs the second phase: mask, [B, ceil(V / 32)], has a bit for each token allowed."""
    plan = unpack(plan_spec(program, size), vector)
    V = logits.shape[-1]
    bits = (mask[:, :, None] >> jnp.arange(32)[None, None]) & 1
    allowed = bits.reshape(mask.shape[0], -1)[:, None, :V] == 1
    logits = jnp.where(allowed, logits, -jnp.inf)
    sampled = device.draw(logits, state, plan, batch, program, size)
    state, output = device.finish(state, plan, batch, sampled)
    return state, _pack(output)


def admit(state: State, vector: Array, *, program: Program, size: AdmitSize) -> State:
    """Writes new requests into their slots."""
    return device.admit(state, *unpack(admission_spec(program, size), vector))


def _pack(output: StepOutput) -> Array:
    ends = [output.num_sampled[:, None], output.finished[:, None].astype(jnp.int32)]
    return jnp.concatenate([output.token_ids, *ends], axis=1)


FUNCTIONS = dict(step=step, forward=forward, sample=sample, admit=admit)


def abstract(tree: Any) -> Any:
    """Returns the shapes and dtypes of a tree of arrays."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


def program_spec(program: Program, params: Any, key: Key) -> Spec:
    """Says what a program is compiled from: the one source for warm-up and dispatch.

    `params` may be abstract.
    """
    state = jax.eval_shape(functools.partial(make_state, program))
    spec = admission_spec if key.name == "admit" else plan_spec
    vector = jax.ShapeDtypeStruct((packed_size(spec(program, key.size)),), jnp.int32)
    static = dict(program=program, size=key.size)
    args: tuple[Any, ...] = (params, state, vector)
    if key.name == "admit":
        args = state, vector
    elif key.name == "sample":
        _, batch, logits = jax.eval_shape(functools.partial(forward, **static), *args)
        words = -(-program.config.vocab_size // 32)
        mask = jax.ShapeDtypeStruct((key.size.num_rows, words), jnp.int32)
        args = logits, state, vector, batch, mask
    return Spec(FUNCTIONS[key.name], tuple(static.items()), args)


def program_keys(program: Program, buckets: tuple[Bucket, ...], *, two_phase: bool) -> list[Key]:
    """Returns every program that an engine can need."""
    names = ("step", "forward", "sample") if two_phase else ("step",)
    keys = [Key(name, bucket) for name in names for bucket in buckets]
    return keys + [Key("admit", size) for size in admit_sizes(program)]
