"""Gumbel noise: exact far into its tail, at the size of real vocabularies, in kernels alike."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrunner.kernels_pallas import lanes
from jaxrunner.sampling.gumbel import GROUP, MAX_USUAL, MIN_NOISE, gumbel, rare, usual
from jaxrunner.sampling.seed import TARGET, noise

V, DRAWS, TAIL = 131_072, 1_500, 5e-8  # TAIL: of each token but one


@functools.cache
def drawn() -> tuple[np.ndarray, ...]:
    """Returns of each draw the best noise, its id, its number, and the id with one likely token."""
    logits = np.full(V, np.log(TAIL), np.float32)
    logits[V // 3] = np.log1p(-TAIL * (V - 1))
    one = functools.partial(noise, stream=TARGET, shape=(V,))
    run, words = jax.jit(jax.vmap(one, (None, 0))), jnp.asarray([0, 5], jnp.uint32)
    batches = jnp.arange(DRAWS).reshape(-1, 50)
    run = run.lower(words, batches[0]).compile(dict[str, Any](xla_backend_optimization_level=3))
    out = []
    for positions in batches:
        x = np.asarray(run(words, positions))
        best = x.max(1)
        out.append((best, x.argmax(1), (x == best[:, None]).sum(1), (x + logits).argmax(1)))
    return tuple(map(np.concatenate, zip(*out, strict=True)))


def excess(seen: np.ndarray, expected: np.ndarray) -> float:
    """Returns how far chi-square is above its mean, in standard deviations."""
    freedom = len(seen) - 1
    return (((seen - expected) ** 2 / expected).sum() - freedom) / np.sqrt(2 * freedom)


def test_unlikely_tokens_are_drawn_as_often_as_they_should():
    *_, token_ids = drawn()
    expected = TAIL * (V - 1) * DRAWS  # 9.8; of 23 bits 0.9
    assert abs((token_ids != V // 3).sum() - expected) < 2.5 * np.sqrt(expected)


def test_the_best_noise_of_a_vocabulary_follows_its_law():
    best, *_ = drawn()
    edges = np.log(V) - np.log(-np.log([0.1, 0.3, 0.5, 0.7, 0.9, 0.97, 0.985]))  # the last 16.08
    seen = np.histogram(best, [-np.inf, *edges, np.inf])[0]
    assert excess(seen, DRAWS * np.diff([0, 0.1, 0.3, 0.5, 0.7, 0.9, 0.97, 0.985, 1])) < 4


def test_equal_logits_prefer_no_token():
    _, token_ids, num_best, _ = drawn()
    assert (num_best > 1).sum() <= 1  # once in 2**16 draws
    seen = np.bincount(token_ids * 64 // V, minlength=64)
    assert excess(seen, np.full(64, DRAWS / 64)) < 4
    halves = np.bincount(token_ids % 2, minlength=2)
    assert excess(halves, np.full(2, DRAWS / 2)) < 8


def test_noise_is_what_the_definition_says_for_all_bits():
    """In float64, at both ends, where two formulas meet, and between."""
    near = [2**24, 2**31, 0, 2**32 - 5000]
    bits = np.concatenate([np.arange(5000) + start for start in near] + [np.arange(0, 2**32, 9973)])
    bits = np.unique(bits).astype(np.uint32)
    share = (bits.astype(np.float64) + 0.5) / 2**32
    got = np.asarray(usual(jnp.asarray(bits)), np.float64)
    np.testing.assert_allclose(got, -np.log(2.0**-23 - np.log1p(-share)), atol=1e-5)
    assert (np.diff(got) <= 0).all() and MIN_NOISE < got.min() and got.max() < MAX_USUAL
    token_ids, most = map(np.asarray, rare(*(jnp.asarray(x) for x in (0 * bits, bits, bits[::-1]))))
    some = bits < 2**21  # one group in 2**11
    np.testing.assert_array_equal(token_ids, np.where(some, bits % GROUP, -1.0))
    np.testing.assert_allclose(most[some], 23 * np.log(2) - np.log(share[::-1][some]), rtol=1e-6)
    assert (most[~some] == -np.inf).all() and most[some].min() >= 15.94


@pytest.mark.parametrize("seed", range(3))
def test_kernels_have_the_noise_of_plain_jax_bit_for_bit(seed: int):
    """All but the logarithm, which a kernel takes from the same library as XLA."""
    tokens = 150_001
    key = jax.random.fold_in(jax.random.key(seed), 7)
    ids = jnp.arange(tokens)
    got = jax.jit(lambda words: lanes.gumbel((words[0], words[1]), ids))(jax.random.key_data(key))
    want = jax.jit(functools.partial(gumbel, num_tokens=tokens))(key)
    np.testing.assert_array_equal(got, want)


def test_rare_tokens_are_where_kernels_find_them():
    """Without a hash of each token: one group in 2**11 has one."""
    keys = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(3), jnp.arange(2**12))
    words = jax.random.key_data(keys)
    find = jax.vmap(lambda words: lanes.rare_noise((words[0], words[1]), jnp.arange(2)))
    token_ids, most = map(np.asarray, jax.jit(find)(words))
    found = np.argwhere(token_ids >= 0)
    assert 0 < len(found) < 16  # 4 are expected
    run = jax.jit(functools.partial(gumbel, num_tokens=2 * GROUP))
    for i, group in found:
        x, token_id = np.asarray(run(keys[i])), token_ids[i, group]
        assert token_id // GROUP == group and x[token_id] == most[i, group] > MAX_USUAL - 0.01
        assert (np.delete(x, token_ids[i][token_ids[i] >= 0]) < MAX_USUAL).all()
        mine = lanes.gumbel((words[i, 0], words[i, 1]), jnp.arange(2 * GROUP))
        np.testing.assert_array_equal(mine, x)
