"""Several decode steps in one launch."""

from dataclasses import replace
import functools
from typing import Any

import jax
import jax.numpy as jnp

from jaxrunner.device.packing import pack_on_device, packed_size, unpack
from jaxrunner.indexing import put_blocks
from jaxrunner.parallel.mesh import DATA
from jaxrunner.program.bucket import MultiStepBucket
from jaxrunner.program.program import Program
from jaxrunner.program.shapes import output_spec
from jaxrunner.step import step
from jaxrunner.types import Array, Plan, State, StepOutput


def multi_step(params: Any, state: State, plan: Plan, *, program: Program, size: MultiStepBucket):
    """Runs up to `size.num_steps` decode steps, each with a token of each request and its drafts.

    The loop ends early once all requests have ended. On a GPU it is part of the launch
    (`xla_options.GRAPH`). Returns the state, and the outputs of all steps joined to one. A row
    keeps the tokens before its first step without a valid token.
    """
    blocks = put_blocks(state.requests.blocks, plan.blocks)
    state = replace(state, requests=replace(state.requests, blocks=blocks))
    plan = replace(plan, blocks=jax.tree.map(lambda x: x[:0], plan.blocks))
    one = functools.partial(step, params, program=program, bucket=size.bucket, size=size.sample)
    spec, J = output_spec(program, size.sample), 1 + size.sample.num_drafts

    def next_step(carry: tuple) -> tuple:
        num, state, outputs, _ = carry
        state, output = one(state, plan)
        num += 1
        packed = pack_on_device(output)  # one kernel writes it
        outputs = jax.lax.dynamic_update_index_in_dim(outputs, packed, num, 0)
        goes_on = ((output.num_sampled > 0) & ~output.finished).any()
        if program.num_ranks > 1:  # all ranks must run as many steps
            goes_on = jax.lax.psum(goes_on.astype(jnp.int32), DATA) > 0
        return num, state, outputs, goes_on

    # A kernel of its own: a CUDA graph reads a condition without one beside the step, not after it.
    def is_due(carry: tuple) -> Array:
        num, _, _, goes_on = carry
        return goes_on & (num < size.num_steps)

    # The first row is no step's. XLA would copy a number that is read both before it is counted and
    # after, and JAX asks of a signed index whether it is negative.
    outputs = jnp.zeros((1 + size.num_steps, packed_size(spec)), jnp.int32)
    start = jnp.uint32(0), state, outputs, True
    _, state, outputs, _ = jax.lax.while_loop(is_due, next_step, start)
    outputs = jax.vmap(functools.partial(unpack, spec))(outputs[1:])
    failed = outputs.no_choice | (outputs.not_finite & (program.engine.nan_policy != "ignore"))
    counts = jnp.where(jnp.cumsum(failed, 0) == 0, outputs.num_sampled, 0)
    logprobs = jax.tree.map(lambda x: x.reshape(*counts.shape, J, *x.shape[2:]), outputs.logprobs)
    join = functools.partial(_join_steps, counts)
    return state, StepOutput(
        token_ids=join(outputs.token_ids),
        num_sampled=counts.sum(0),
        finished=outputs.finished.any(0),
        not_finite=outputs.not_finite.any(0),
        no_choice=outputs.no_choice.any(0),
        drafts=None if outputs.drafts is None else outputs.drafts.sum(0),
        logprobs=jax.tree.map(lambda x: jax.lax.collapse(join(x), 0, 2), logprobs),
    )


def _join_steps(counts: Array, x: Array) -> Array:
    """Joins x, [steps, B, J, ...], of which the first `counts`, [steps, B], of each J are real.

    Returns [B, steps * J, ...], with the real entries of each row first.
    """
    num_steps, B, J = x.shape[:3]
    if J == 1:  # there are no gaps before the last real entry
        return x[:, :, 0].swapaxes(0, 1)
    j = jnp.arange(J)[None, None]
    at = (jnp.cumsum(counts, 0) - counts)[..., None] + j
    at = jnp.where(j < counts[..., None], at, num_steps * J)
    joined = jnp.zeros((B, num_steps * J, *x.shape[3:]), x.dtype)
    return joined.at[jnp.arange(B)[None, :, None], at].set(x, mode="drop")
