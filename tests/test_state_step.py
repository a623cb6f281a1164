"""The kernel for states of rows that decode makes what plain JAX does, or refuses in words."""

from dataclasses import replace
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrunner import pytree
from jaxrunner.bench.presets import PRESETS
from jaxrunner.caches.state import StateCache
from jaxrunner.device.operations import operations
from jaxrunner.device.program_key import Key
from jaxrunner.hf_config import Settings
from jaxrunner.kernels_pallas.cases.case import Case
from jaxrunner.kernels_pallas.cases.state_case import DELTA_RULE, STATE_SPACE, STATES
from jaxrunner.kernels_pallas.states.state_step import Rows, Tokens, refuses, state_step
from jaxrunner.models.registry import read_model
from jaxrunner.operation import Chosen
from jaxrunner.ops import backends
from jaxrunner.ops.states import recurrence, state_steps
from jaxrunner.ops.states.delta_rule import DeltaRuleInputs, delta_rule
from jaxrunner.ops.states.state_rows import StateRows
from jaxrunner.ops.states.state_space import StateSpaceInputs, state_space
from jaxrunner.program.bucket import Bucket
from jaxrunner.program.program import Program
from jaxrunner.pytree import host_value
from jaxrunner.sampling import RULES
from tests.support import oracles, state_oracles, tiny
from tests.support.lowering import cuda, lowers
from tests.support.states import batch_of, interpreted, sized

H, G, P, K = 4, 2, 32, 64
OF = {StateSpaceInputs: state_space(H, P, K), DeltaRuleInputs: delta_rule(H, P, K)}
# K, places of a row, and rows of (block, first position, tokens).
BATCHES: dict[str, tuple[int, int, list[tuple[int, int, int]]]] = {
    "decoding": (0, 1, [(4, 7, 1), (0, 0, 1), (3, 13, 1), (2, 30, 1)]),
    "drafts": (2, 3, [(4, 7, 3), (0, 0, 2), (3, 11, 3), (2, 30, 1)]),
    "beside prompts": (0, 0, [(4, 7, 1), (0, 0, 5), (3, 13, 1), (2, 0, 1)]),
    "drafts beside prompts": (2, 0, [(4, 7, 2), (0, 4, 5), (3, 11, 3), (2, 0, 1)]),
}
WAITING = {4: 2, 3: 1, 2: 0, 0: 2}  # tokens of each block that are to be replayed


QUICK = [case for case in STATES if "whole parts" not in case.name]


@lowers
@pytest.mark.parametrize("case", QUICK, ids=lambda case: case.name)
def test_interpreted_kernels_equal_the_oracle(case: Case):
    args = case.make(7)
    want = state_oracles.state_step(*args, **case.options)
    got = jax.jit(functools.partial(case.run, interpret=interpreted()))(*args)
    for mine, right in zip(got, want, strict=True):
        mine, bound = oracles.wide(mine), 1e-6 if mine.dtype == jnp.float32 else 1e-3
        assert np.isfinite(mine).all()  # what a place had before is not read
        assert np.linalg.norm(mine - right) < bound * np.linalg.norm(right)


def inputs_of(kind: type, T: int, real: np.ndarray) -> Any:
    """Returns what tokens bring; padding is NaN, which nobody may read."""
    rng = np.random.default_rng(T)

    def normal(*shape: int) -> Any:
        x = rng.normal(size=(T, *shape)).astype(np.float32)
        x[~real] = np.nan
        return x

    decay = -np.abs(normal(H))
    if kind is StateSpaceInputs:
        return host_value(kind, x=normal(H, P), decay=decay, b=normal(G, K), c=normal(G, K))
    k, beta = normal(G, P), 1 / (1 + np.exp(normal(H)))
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    return host_value(kind, q=normal(G, P), k=k, v=normal(H, K), decay=decay, beta=beta)


@lowers
@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize("kind", OF)
def test_states_of_batches_equal_plain_jax(kind: type, name: str):
    """New rows in blocks of NaN, rows without tokens, longer ones, and what begins a block."""
    drafts, Q, given = BATCHES[name]
    N, S, B, T = 7, 13, 6, 6 * Q or 16
    batch = batch_of(given, T, B, Q)
    blocks = jnp.repeat(batch.blocks[0], 3, axis=1).at[2, 1].set(5)  # another one from token 13 on
    batch = replace(batch, blocks=(blocks,))
    rng, width = np.random.default_rng(0), (H * P + H + G * K, G * P + H * K + 2 * H)
    states = rng.normal(size=(N, H, P, K)).astype(np.float32)
    states[[5, *(block for block, first, _ in given if first == 0)]] = np.nan
    drafted = rng.normal(size=(N, drafts, width[kind is DeltaRuleInputs])).astype(np.float32) / 8
    count = np.full(N, 99)
    for block, first, _ in given:
        count[block] = first - WAITING[block]
        drafted[block, WAITING[block] :] = np.nan
    inputs = inputs_of(kind, T, np.asarray(batch.row) < B)
    cache = StateCache(jnp.zeros((N, 1, 1)), jnp.asarray(states), None, None, None, S)
    if drafts:
        kept = dict(drafted_conv=jnp.zeros((N, drafts, 1)), drafted=jnp.asarray(drafted))
        cache = replace(cache, count=jnp.asarray(count), **kept)
    kernel = functools.partial(state_steps.step_rows, interpret=interpreted())
    short = state_steps.KERNEL._replace(run=kernel), *recurrence.PLAIN.short
    candidates, told = recurrence.PLAIN._replace(short=short), list[Chosen]()

    def run(candidates: Any) -> Any:
        return jax.jit(
            lambda batch, inputs, cache: recurrence.recur(
                candidates, batch, OF[kind], inputs, cache, 0, note=told.append
            )
        )(batch, inputs, cache)

    (got, after), (want, expected) = run(candidates), run(recurrence.PLAIN)
    names = [one.name for one in told if one.operation == "recur"]
    assert names == ["state_step", "plain JAX"]
    np.testing.assert_allclose(got, want, atol=2e-5)
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=2e-5), after, expected)
    assert np.isfinite(got).all() and not np.asarray(got)[np.asarray(batch.row) == B].any()


def problem(rows: int = 64, columns: int = 128, groups: int = 2, **changes: Any) -> Any:
    """Returns shapes of 3 rows of a state space of 4 heads, some of them changed."""
    one, vectors = sized(3, dtype="int32"), sized(3, groups, changes.pop("key", columns))
    states = changes.pop("states", sized(9, 4, rows, columns))
    tokens = Tokens(sized(3, 4, rows), vectors, vectors, sized(3, 4))
    return states, Rows(one, sized(3, 1, dtype="int32"), one, one, one), tokens._replace(**changes)


@pytest.mark.parametrize(
    ("args", "query_len", "words"),
    [
        (problem(states=sized(9, 4, 64, 128, dtype="float16")), 1, "wants states in float32 or bf"),
        (problem(value=sized(3, 4, 32)), 1, r"wants value in float32, \[3, 4, 64\]"),
        (problem(beta=sized(3, 4, dtype="bfloat16")), 1, r"wants beta in float32, \[3, 4\]"),
        (problem(key=64), 1, "wants keys of 128 for groups of 4 heads"),
        (problem(groups=3), 1, r"groups of 4 heads, got \[3, 3, 128\]"),
        (problem(), 2, "wants query_len=2 places of 3 rows, got 3 tokens"),
        (problem(rows=5), 1, r"parts of at most 8192, got \[5, 128\]"),
        (problem(columns=2048), 1, r"parts of at most 8192, got \[64, 2048\]"),
    ],
)
@lowers
def test_the_kernel_refuses_in_words(args: Any, query_len: int, words: str):
    run = functools.partial(state_step, axis=STATE_SPACE, query_len=query_len)
    with pytest.raises(ValueError, match=f"state_step .*{words}"):
        jax.eval_shape(run, *args)


def test_sizes_of_models_are_served():
    for rows, columns in ((64, 128), (64, 256), (128, 128)):
        for dtype in ("float32", "bfloat16"):
            states = sized(9, 4, rows, columns, dtype=dtype)
            for axis in (STATE_SPACE, DELTA_RULE):
                sizes = (rows, columns) if axis else (columns, rows)
                args = problem(*sizes)
                assert refuses(states, *args[1:], axis=axis, query_len=1) is None


def test_other_rules_are_refused():
    rule = OF[StateSpaceInputs]._replace(step=lambda state, _: (state, state))
    one: Any = sized(3, dtype="int32")
    rows = StateRows(one, one, one, sized(3, 1, dtype="int32"), one, (9, 0, 13))
    inputs = inputs_of(StateSpaceInputs, 3, np.ones(3, bool))
    told = state_steps.KERNEL.refuses(rule, rows, inputs, None, sized(9, H, P, K), 1)
    assert told == "wants the rule of a state space or a gated delta net"


@lowers
def test_a_program_tells_what_carries_states_on():
    """In steps that decode, that verify drafts, and beside prompts."""
    layers = dict(num_hidden_layers=2, layer_types=["mamba", "attention"], num_local_experts=0)
    model, config = read_model(Settings(PRESETS["granite4_h_tiny"].config | layers))
    engine = tiny.engine_config(block_size=64, dtype="bfloat16", kv_dtype="bfloat16")
    params = pytree.abstract(model.params, config.dims | dict(param=jnp.dtype("bfloat16")))
    program = Program(model, config, engine, backends.fused, RULES)

    def told(bucket: Bucket) -> dict[str, str]:
        with cuda():
            found = operations(program, params, Key("step", bucket))
        return {one.operation: one.name for one in found}

    assert told(Bucket(8, 8, 1))["recur"] == told(Bucket(64, 5))["recur"] == "state_step"
    assert told(Bucket(64, 5))["recur by chunks"] == "state_chunks"
    assert told(Bucket(8, 8, 1))["convolve"] == "conv_step"
