"""States over ragged batches, against loops over tokens in float64."""

from dataclasses import replace
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrunner.caches.cache_group import PoolSizes, cache_groups
from jaxrunner.caches.full import FullAttention
from jaxrunner.caches.state import RecurrentState, StateCache
from jaxrunner.ops.states import recurrence, short_conv
from jaxrunner.ops.states.delta_rule import DeltaRuleInputs, delta_rule
from jaxrunner.ops.states.state_space import StateSpaceInputs, state_space
from jaxrunner.pytree import host_value
from jaxrunner.types import Batch
from tests.support.states import batch_of

N, H, G, P, K, W = 6, 4, 2, 5, 3, 4  # blocks, heads, groups, rows, columns, taps and one more
LENGTHS = {4: 23, 0: 9, 2: 2}  # tokens of the request in each block
# Tokens of each block in each step: prompts and rows that decode, side by side.
STEPS: dict[str, list[dict[int, int]]] = {
    "whole prompts": [{4: 23, 0: 9, 2: 2}],
    "chunks": [{4: 7, 0: 4}, {0: 5, 4: 9}, {4: 5, 2: 2}, {4: 2}],
    "beside rows that decode": [{0: 1}, {4: 16, 0: 1}, {0: 7, 2: 1, 4: 1}, {2: 1, 4: 6}],
    "decoding": [{4: 22, 0: 8, 2: 1}, {4: 1, 0: 1, 2: 1}],
}


def empty(
    drafts: int, kind: Any = None, *, channels: int = 1, dtype: Any = jnp.float32, num: int = N,
    S: int = 2**30,
) -> StateCache:  # fmt: skip
    """Returns a cache of NaN, whose counts are of no use either."""
    nan = functools.partial(jnp.full, fill_value=jnp.nan)
    return StateCache(
        conv=nan((num, W - 1, channels)),
        recurrent=nan((num, H, P, K), dtype=dtype) if kind else None,
        count=jnp.full(num, 99) if drafts else None,
        drafted_conv=nan((num, drafts, channels)) if drafts else None,
        drafted=nan((num, drafts, WIDTHS[kind])) if drafts and kind else None,
        S=S,
    )


def inputs_of(kind: type, block: int) -> Any:
    """Returns what the tokens of a request bring."""
    T, rng = LENGTHS[block], np.random.default_rng(block)

    def normal(*shape: int) -> np.ndarray:
        return rng.normal(size=(T, *shape)).astype(np.float32)

    decay = -np.abs(normal(H))
    if kind is StateSpaceInputs:
        return host_value(kind, x=normal(H, P), decay=decay, b=normal(G, K), c=normal(G, K))
    q, k = normal(G, P), normal(G, P)
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    beta = 1 / (1 + np.exp(normal(H)))
    return host_value(kind, q=q, k=k, v=normal(H, K), decay=decay, beta=beta)


def expected(inputs: Any) -> tuple[np.ndarray, np.ndarray]:
    """Returns what each token makes, and the matrices at the end, in float64."""
    one = {name: x.astype(np.float64) for name, x in vars(inputs).items()}
    state, made = np.zeros((H, P, K)), []
    for t in range(len(one["decay"])):
        state = state * np.exp(one["decay"][t])[:, None, None]
        if isinstance(inputs, StateSpaceInputs):
            b, c = (one[name][t].repeat(H // G, 0) for name in "bc")
            state = state + np.einsum("hp,hk->hpk", one["x"][t], b)
            made.append(np.einsum("hpk,hk->hp", state, c))
            continue
        q, k = (one[name][t].repeat(H // G, 0) for name in "qk")
        moved = one["v"][t] - np.einsum("hpk,hp->hk", state, k)
        state = state + np.einsum("hp,hk->hpk", k, one["beta"][t][:, None] * moved)
        made.append(np.einsum("hpk,hp->hk", state, q))
    return np.stack(made), state


def side_by_side(of: dict[int, np.ndarray], rows: list[Any], T: int) -> jax.Array:
    """Returns the tokens of rows, one behind the other; padding is NaN, which nobody may read."""
    parts = [of[block][first : first + num] for block, first, num in rows]
    flat = np.concatenate(parts)
    padding = np.full((T - len(flat), *flat.shape[1:]), np.nan, np.float32)
    return jnp.asarray(np.concatenate([flat, padding]))


def run(steps: list[dict[int, int]], advance: Any, cache: StateCache) -> tuple[dict, StateCache]:
    """Runs steps, (batch, rows, T, cache) -> (out, cache). Returns what tokens made, and states."""
    done, made = dict.fromkeys(LENGTHS, 0), {block: [] for block in LENGTHS}
    for step in steps:
        rows = [(block, done[block], num) for block, num in step.items()]
        decodes = set(step.values()) == {1}
        T, B = (len(rows), len(rows)) if decodes else (40, 5)
        out, cache = advance(batch_of(rows, T, B, int(decodes)), rows, T, cache)
        at = 0
        for block, _, num in rows:
            made[block].append(np.asarray(out[at : at + num]))
            done[block], at = done[block] + num, at + num
    assert done == LENGTHS
    return {block: np.concatenate(parts) for block, parts in made.items()}, cache


def _matrices(cache: StateCache) -> np.ndarray:
    assert cache.recurrent is not None
    return np.asarray(cache.recurrent)


RULES = {StateSpaceInputs: state_space(H, P, K), DeltaRuleInputs: delta_rule(H, P, K)}
# Numbers of a token that matrices follow from: x, decays and b; k, v, decays and betas.
WIDTHS = {StateSpaceInputs: H * P + H + G * K, DeltaRuleInputs: G * P + H * K + 2 * H}


def stepper(kind: type) -> tuple[Any, Any, Any]:
    """Returns the inputs of each block, a rule in chunks of 4 tokens, and what runs its steps."""
    of = {block: inputs_of(kind, block) for block in LENGTHS}
    rule = RULES[kind]._replace(chunk_size=4)

    @jax.jit
    def advance(batch: Batch, inputs: Any, cache: StateCache) -> Any:
        return recurrence.recur(recurrence.PLAIN, batch, rule, inputs, cache, 0)

    def one(batch: Batch, rows: list[Any], T: int, cache: StateCache) -> Any:
        fields = {
            name: side_by_side({block: getattr(x, name) for block, x in of.items()}, rows, T)
            for name in vars(of[0])
        }
        return advance(batch, host_value(kind, **fields), cache)

    return of, rule, one


@pytest.mark.parametrize("drafts", [0, 2], ids=["", "beside drafts"])
@pytest.mark.parametrize("kind", RULES)
def test_states_depend_on_the_request_alone(kind, drafts):
    """Whatever the chunks, the batch, its padding, and what others left in the blocks."""
    of, _, one = stepper(kind)
    start = empty(drafts, kind)
    for steps in STEPS.values():
        made, cache = run(steps, one, start)
        for block, inputs in of.items():
            want, state = expected(inputs)
            np.testing.assert_allclose(made[block], want, atol=2e-5)
            if cache.count is None or cache.count[block] == LENGTHS[block]:
                np.testing.assert_allclose(_matrices(cache)[block], state, atol=2e-5)
        others = [block for block in range(N) if block not in LENGTHS]
        assert np.isnan(_matrices(cache)[np.array(others)]).all()


@pytest.mark.slow
@pytest.mark.parametrize("kind", RULES)
def test_states_are_those_of_eager_steps_of_half_the_bytes_and_of_a_trainer(kind):
    of, rule, one = stepper(kind)
    with jax.disable_jit():  # as with enforce_eager
        made, _ = run(STEPS["decoding"], one, empty(0, kind))
    np.testing.assert_allclose(made[4], expected(of[4])[0], atol=2e-5)
    # Half of the bytes: rounded after each chunk, computed in float32.
    short = empty(0, kind, dtype=jnp.bfloat16)
    made, cache = run(STEPS["beside rows that decode"], one, short)
    assert cache.recurrent is not None and cache.recurrent.dtype == jnp.bfloat16
    apart = max(np.abs(made[block] - expected(x)[0]).max() for block, x in of.items())
    assert 1e-4 < apart < 0.1
    # Without a cache, as a trainer runs it: sequences of equal lengths.
    both = jax.tree.map(lambda x: jnp.concatenate([x[:9], x[-9:]]), of[4])
    found, _ = recurrence.trained(2, rule, both, None, 0)
    for i in range(2):
        want, _ = expected(jax.tree.map(lambda x, i=i: np.asarray(x[9 * i :][:9]), both))
        np.testing.assert_allclose(found[9 * i :][:9], want, atol=2e-5)


@pytest.mark.parametrize("drafts", [0, 2], ids=["", "beside drafts"])
def test_convolutions_depend_on_the_request_alone(drafts):
    rng, C = np.random.default_rng(0), 7
    of = {b: rng.normal(size=(n, C)).astype(np.float32) for b, n in LENGTHS.items()}
    weight, bias = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((C, W), C))

    @jax.jit
    def advance(batch: Batch, x: jax.Array, cache: StateCache) -> Any:
        return short_conv.convolve(short_conv.PLAIN, batch, x, weight, bias, cache, 0)

    def one(batch: Batch, rows: list[Any], T: int, cache: StateCache) -> Any:
        return advance(batch, side_by_side(of, rows, T), cache)

    def want(x: np.ndarray) -> np.ndarray:
        before = np.concatenate([np.zeros((W - 1, C)), x])
        return sum(
            before[j : j + len(x)] * np.asarray(weight)[:, j] for j in range(W)
        ) + np.asarray(bias)

    for steps in STEPS.values():
        made, cache = run(steps, one, empty(drafts, channels=C))
        for block, x in of.items():
            np.testing.assert_allclose(made[block], want(x), atol=1e-5)
            counted = len(x) if cache.count is None else int(cache.count[block])
            last = cache.conv[block][-counted:]
            np.testing.assert_array_equal(last, x[max(0, counted - W + 1) : counted])
        assert np.isnan(cache.conv[np.array([1, 3, 5])]).all()
    found, _ = short_conv.trained(2, jnp.asarray(of[4][:18]), weight, bias, None, 0)
    np.testing.assert_allclose(found[9:], want(of[4][9:18]), atol=1e-5)


# Tokens of the request in block 4 that steps verify, from a position on, and how many are wrong.
VERIFIED = [
    (0, 9, 0),
    (9, 3, 2),
    (10, 3, 0),
    (13, 3, 1),
    (15, 1, 0),
    (16, 2, 1),
    (17, 3, 2),
    (18, 5, 0),
]


@pytest.mark.parametrize("size", [12, 1], ids=["two blocks", "a block a token"])
@pytest.mark.parametrize("kind", RULES)
def test_the_next_step_goes_on_from_any_token_that_was_verified(kind, size):
    """What a wrong token brings is lost with it; other requests go on from ends of blocks."""
    rng, inputs, rule = np.random.default_rng(0), inputs_of(kind, 4), RULES[kind]
    x = rng.normal(size=(23, 7)).astype(np.float32)
    weight = jnp.asarray(rng.normal(size=(7, W)), jnp.float32)
    made, convolved, T, blocks = [], [], 12, np.arange(24)[::-1] if size == 1 else [4, 2]

    @jax.jit
    def run(batch: Batch, x: jax.Array, given: Any, cache: StateCache) -> Any:
        y, cache = short_conv.convolve(short_conv.PLAIN, batch, x, weight, None, cache, 0)
        return y, *recurrence.recur(recurrence.PLAIN, batch, rule, given, cache, 0)

    def step(first: int, num: int, wrong: int, cache: StateCache) -> Any:
        batch = replace(batch_of([(4, first, num)], T, 5), blocks=(jnp.array([blocks] * 5),))

        def tokens(of: np.ndarray) -> jax.Array:
            part = of[first : first + num].copy()
            part[num - wrong :] = -part[num - wrong :] * 0.3 - 0.1
            return jnp.asarray(np.concatenate([part, np.full((T - num, *of.shape[1:]), np.nan)]))

        given = host_value(kind, **{name: tokens(of) for name, of in vars(inputs).items()})
        y, out, cache = run(batch, tokens(x), given, cache)
        return np.asarray(y[: num - wrong]), np.asarray(out[: num - wrong]), cache

    cache = empty(2, kind, channels=7, num=24, S=size)
    for verified in VERIFIED:
        y, out, cache = step(*verified, cache)
        made.append(out)
        convolved.append(y)
    want, _ = expected(inputs)
    padded = np.concatenate([np.zeros((W - 1, 7)), x])
    sums = np.stack([padded[j : j + 23] * np.asarray(weight)[:, j] for j in range(W)]).sum(0)
    np.testing.assert_allclose(np.concatenate(made), want, atol=2e-5)
    np.testing.assert_allclose(np.concatenate(convolved), sums, atol=1e-5)
    for first in range(10, 19) if size == 1 else (12,):
        y, out, _ = step(first, 2, 0, cache)
        np.testing.assert_allclose(out, want[first:][:2], atol=2e-5)
        np.testing.assert_allclose(y, sums[first:][:2], atol=1e-5)


def test_a_state_is_one_block_of_a_request():
    """Whatever the size of the pool of layers that attend."""
    kind = RecurrentState(taps=3, channels=8, matrices=(2, 3, 4), dtype="bfloat16")
    sizes = PoolSizes(16, 1000, 4096, 12, 256)
    full, states = cache_groups([FullAttention(), kind, kind], sizes)
    assert (full.num_blocks, states.num_blocks, states.layers) == (1000, 13, (1, 2))
    assert states.max_blocks(4096, 256) == states.table_len(4096) == 1
    assert kind.dims["state"] == jnp.bfloat16 and not kind.has_prefixes
