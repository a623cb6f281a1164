"""Kernels that carry states on by chunks, in Pallas' interpreter; `gpu` tests run them there."""

from dataclasses import replace
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrunner.caches.state import StateCache
from jaxrunner.kernels_pallas.cases.case import Case
from jaxrunner.kernels_pallas.cases.chunk_case import PROMPTS
from jaxrunner.kernels_pallas.states import delta_chunks, state_chunks
from jaxrunner.kernels_pallas.states.halves import Halves
from jaxrunner.kernels_pallas.states.state_chunks import CHUNK, Tokens
from jaxrunner.operation import Chosen
from jaxrunner.ops.states import recurrence
from jaxrunner.ops.states import state_chunks as chunk_ops
from jaxrunner.ops.states.delta_rule import DeltaRuleInputs, delta_rule
from jaxrunner.ops.states.state_space import StateSpaceInputs, state_space
from jaxrunner.pytree import host_value
from jaxrunner.types import Array
from tests.support import oracles, state_oracles
from tests.support.lowering import lowers
from tests.support.states import batch_of, interpreted, sized

RULES = {StateSpaceInputs: state_space(2, 64, 64), DeltaRuleInputs: delta_rule(2, 128, 128)}


def plain_product(a: Halves, b: Halves) -> Array:
    """What matrix units do, of whose products with registers the interpreter knows nothing."""
    whole = [
        sum(jnp.asarray(x if isinstance(x, jax.Array) else x[...], jnp.float32) for x in pair)
        for pair in (a, b)
    ]
    return jnp.dot(*whole, precision="highest")


@pytest.fixture(autouse=True)
def matrix_units(monkeypatch: pytest.MonkeyPatch):
    if jax.default_backend() == "cpu":
        for module in (state_chunks, delta_chunks):
            monkeypatch.setattr(module, "product", plain_product)


@lowers
@pytest.mark.parametrize("case", PROMPTS, ids=lambda case: case.name)
def test_interpreted_kernels_equal_the_oracle(case: Case):
    args = case.make(7)
    want = state_oracles.state_chunks(*args, **case.options)
    got = jax.jit(functools.partial(case.run, interpret=interpreted()))(*args)
    for mine, right in zip(got, want, strict=True):
        short = "bfloat16" in (str(mine.dtype), str(args[0].dtype))
        mine = oracles.wide(mine)
        assert np.isfinite(mine).all()  # what a place had before is not read
        assert np.linalg.norm(mine - right) < (1e-3 if short else 2e-5) * np.linalg.norm(right)


def inputs_of(kind: type, T: int, real: int) -> Any:
    """Returns what tokens bring; padding is NaN, which nobody may read."""
    rng, (H, P, K) = np.random.default_rng(T), RULES[kind].matrices

    def normal(*shape: int) -> Any:
        x = rng.normal(size=(T, *shape)).astype(np.float32)
        x[real:] = np.nan
        return x

    decay = -np.abs(normal(H)) / 4
    if kind is StateSpaceInputs:
        return host_value(kind, x=normal(H, P), decay=decay, b=normal(1, K), c=normal(1, K))
    k, beta = normal(1, P), 1 / (1 + np.exp(normal(H)))
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    return host_value(kind, q=normal(1, P), k=k, v=normal(H, K), decay=decay, beta=beta)


@lowers
@pytest.mark.parametrize("drafts", [0, 2])
@pytest.mark.parametrize("kind", RULES)
def test_states_of_prompts_equal_plain_jax(kind: type, drafts: int):
    """A row that goes on, one that is new, one that decodes, one whose drafts of before wait."""
    rule, given = RULES[kind], [(4, 9, 70), (0, 0, 5), (3, 13, 1), (2, 30, 33)]
    (H, P, K), N, S = rule.matrices, 7, 1000
    T, real = 128, sum(num for *_, num in given)
    batch, rng = batch_of(given, T, 6), np.random.default_rng(0)
    states = rng.normal(size=(N, H, P, K)).astype(np.float32)
    states[[0, 5]] = np.nan
    inputs = inputs_of(kind, T, real)
    cache = StateCache(jnp.zeros((N, 1, 1)), jnp.asarray(states), None, None, None, S)
    if drafts:
        width = {StateSpaceInputs: H * P + H + K, DeltaRuleInputs: P + H * K + 2 * H}[kind]
        drafted = rng.normal(size=(N, drafts, width)).astype(np.float32) / 8
        count = np.array([99, 99, 28, 13, 9, 99, 99])  # block 2 has two tokens to take in
        kept = dict(drafted_conv=jnp.zeros((N, drafts, 1)), drafted=jnp.asarray(drafted))
        cache = replace(cache, count=jnp.asarray(count), **kept)
    kernel = functools.partial(chunk_ops.long_rows, interpret=interpreted())
    long, told = (chunk_ops.KERNEL._replace(run=kernel), *recurrence.PLAIN.long), list[Chosen]()

    def run(candidates: recurrence.Candidates) -> Any:
        return jax.jit(
            lambda batch, inputs, cache: recurrence.recur(
                candidates, batch, rule, inputs, cache, 0, note=told.append
            )
        )(batch, inputs, cache)

    (got, after), (want, expected) = (
        run(recurrence.PLAIN._replace(long=long, padding=CHUNK)),
        run(recurrence.PLAIN),
    )
    names = [one.name for one in told if one.operation == "recur by chunks"]
    assert names == ["state_chunks", "plain JAX"]
    jax.tree.map(agree, (got, after), (want, expected))
    assert np.isfinite(got).all() and not np.asarray(got)[real:].any()


def agree(got: Array, want: Array) -> None:
    """Raises unless two arrays, NaN in the same places, agree by 16 bits of their numbers."""
    np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
    apart = np.linalg.norm(np.nan_to_num(np.asarray(got) - np.asarray(want)))
    assert apart <= 2e-5 * np.linalg.norm(np.nan_to_num(want))


def problem(**changes: Any) -> Any:
    """Returns shapes of a state space of 4 heads, some of them changed."""
    states = changes.pop("states", sized(9, 4, 64, 128))
    vectors = sized(100, changes.pop("groups", 2), changes.pop("keys", 128))
    tokens = Tokens(sized(100, 4, 64), vectors, vectors, sized(5, 4, CHUNK))
    return states, tokens._replace(**changes)


@lowers
@pytest.mark.parametrize(
    ("args", "words"),
    [
        (problem(states=sized(9, 4, 64, 128, dtype="float16")), "wants states in float32 or bf"),
        (problem(states=sized(9, 4, 64, 96)), "keys of 64 or 128 numbers .* got 96, 64"),
        (problem(states=sized(9, 4, 32, 128)), "values of a multiple of 64, got 128, 32"),
        (problem(groups=3), "wants heads that are a multiple of the groups, got 4 for 3"),
        (problem(value=sized(100, 4, 32)), r"wants value in float32, \[100, 4, 64\]"),
        (problem(total=sized(5, 4, 32)), r"wants total in float32, \[5, 4, 64\]"),
        (problem(moved=sized(100, 4, 64)), r"wants moved in float32, \[100, 4, 128\]"),
    ],
)
def test_the_kernel_refuses_in_words(args: Any, words: str):
    states, tokens = args
    one, out = sized(3, dtype="int32"), sized(36, 4, 64)
    rows = state_chunks.Rows(one, one, one, one, one)
    run = functools.partial(state_chunks.state_chunks, axis=1)
    with pytest.raises(ValueError, match=f"state_chunks .*{words}"):
        jax.eval_shape(run, states, rows, tokens, out)


@lowers
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (dict(value=sized(100, 4, 64)), "wants keys and values of 128 numbers, got 128 and 64"),
        (
            dict(key=sized(100, 3, 128)),
            "wants heads that are a multiple of the groups, got 4 for 3",
        ),
        (dict(beta=sized(5, 4, 64, dtype="bfloat16")), r"wants beta in float32, \[5, 4, 64\]"),
    ],
)
def test_solving_refuses_in_words(changes: dict[str, Any], words: str):
    given = dict(value=sized(100, 4, 128), key=sized(100, 2, 128))
    given |= dict(total=sized(5, 4, 64), beta=sized(5, 4, 64)) | changes
    chunks = delta_chunks.Chunks(*[sized(5, dtype="int32")] * 2)
    with pytest.raises(ValueError, match=f"delta_chunks .*{words}"):
        jax.eval_shape(delta_chunks.delta_chunks, chunks, *given.values())


@pytest.mark.skipif(jax.__version_info__ >= (0, 11), reason="of an older JAX")
def test_an_older_jax_is_refused():
    states, tokens = problem()
    assert "wants JAX 0.11 or later" in str(state_chunks.refuses(states, tokens, axis=1))
    given = sized(100, 4, 128), sized(100, 2, 128), *[sized(5, 4, 64)] * 2
    assert "wants JAX 0.11 or later" in str(delta_chunks.refuses(*given))


def test_other_rules_are_refused():
    rule = RULES[StateSpaceInputs]
    other = rule._replace(step=lambda state, _: (state, state))
    refuses = functools.partial(chunk_ops.KERNEL.refuses, rows=None, inputs=None, waiting=None)
    assert refuses(other, states=None, out=None) == (
        "wants the rule of a state space or a gated delta net"
    )
    told = refuses(rule._replace(chunk_size=32), states=None, out=None)
    assert told == "wants chunks of 64 tokens, got 32"
