"""Prompt lookup finds what a search through all n-grams finds, whatever lies behind the tokens."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrunner.models.llama import llama
from jaxrunner.speculators.ngram import lookup, ngram
from tests.support import tiny
from tests.support.drafters import run as run_engine
from tests.support.drafters import with_ngrams

B, L, K = 64, 24, 4


def search(ids: list[int], num_drafts: int, min_n: int, max_n: int) -> list[int]:
    """Returns what followed the first of the longest n-grams, or nothing, as a slow search."""
    for n in range(max_n, min_n - 1, -1):
        for start in range(len(ids) - n):
            if ids[start : start + n] == ids[len(ids) - n :]:
                grown = list(ids)
                while len(grown) < len(ids) + num_drafts:
                    grown.append(grown[start + n + len(grown) - len(ids)])
                return grown[len(ids) :]
    return []


@functools.cache
def compiled(**sizes: int) -> Any:
    return jax.jit(functools.partial(lookup, **sizes))


def run(ids: np.ndarray, total_len: np.ndarray, **sizes: int) -> tuple[np.ndarray, np.ndarray]:
    drafts, found = compiled(**sizes)(jnp.asarray(ids), jnp.asarray(total_len))
    return np.asarray(drafts), np.asarray(found)


@pytest.mark.parametrize("vocab_size", [2, 3, 9])
@pytest.mark.parametrize(("min_n", "max_n"), [(1, 1), (1, 4), (2, 3), (3, 3), (5, 32)])
def test_lookup_finds_what_a_search_finds(vocab_size: int, min_n: int, max_n: int):
    rng, seen = np.random.default_rng(vocab_size), 0
    for _ in range(4):
        ids = rng.integers(vocab_size, size=(B, L), dtype=np.int32)
        ids[::2, L // 2 :] = ids[::2, : L // 2]  # so that long ones come again
        total_len = rng.integers(0, L + 1, size=B, dtype=np.int32)
        drafts, found = run(ids, total_len, num_drafts=K, min_n=min_n, max_n=max_n)
        for i in range(B):
            want = search(ids[i, : total_len[i]].tolist(), K, min_n, max_n)
            assert found[i] == bool(want)
            assert drafts[i].tolist() == (want or [-1] * K)
        seen += found.sum()
    assert seen > 0


@pytest.mark.parametrize(
    ("ids", "drafts"),
    [
        ([1, 2, 3, 4, 2, 3], [4, 2, 3, 4]),
        ([5, 1, 6, 5, 1, 7, 5, 1], [6, 5, 1, 7]),
        ([8, 5, 1, 6, 5, 1, 7, 8, 5, 1], [6, 5, 1, 7]),
        ([5, 1, 6, 8, 5, 1, 7, 8, 5, 1], [7, 8, 5, 1]),
        ([7, 7], [7, 7, 7, 7]),
        ([1, 2, 1, 2, 1], [2, 1, 2, 1]),
    ],
    ids=["one", "the first", "first and longest", "longer, though later", "itself", "a period"],
)
def test_the_longest_n_gram_counts_and_of_those_the_first(ids: list[int], drafts: list[int]):
    padded = np.full((1, L), 1, np.int32)
    padded[0, : len(ids)] = ids
    got, found = run(padded, np.array([len(ids)], np.int32), num_drafts=K, min_n=1, max_n=3)
    assert found.all() and got[0].tolist() == drafts


def test_tokens_behind_the_last_one_change_nothing():
    rng = np.random.default_rng(0)
    ids = rng.integers(3, size=(B, L), dtype=np.int32)
    total_len = rng.integers(0, L + 1, size=B, dtype=np.int32)
    other = np.where(np.arange(L) < total_len[:, None], ids, rng.integers(3, size=(B, L)))
    sizes = dict(num_drafts=K, min_n=1, max_n=4)
    for a, b in zip(run(ids, total_len, **sizes), run(other, total_len, **sizes), strict=True):
        np.testing.assert_array_equal(a, b)


def test_nothing_is_sorted_and_nothing_is_as_large_as_all_n_grams():
    long, max_n = 512, 5
    ids, total_len = jnp.zeros((B, long), jnp.int32), jnp.full(B, long, jnp.int32)
    f = functools.partial(lookup, num_drafts=K, min_n=1, max_n=max_n)
    program = jax.make_jaxpr(f)(ids, total_len).jaxpr
    sizes = [v.aval.size for eqn in program.eqns for v in eqn.outvars if hasattr(v.aval, "shape")]
    assert max(sizes) == B * long
    assert not {"sort", "scan", "while"} & {eqn.primitive.name for eqn in program.eqns}


def test_an_engine_s_tokens_stay_and_its_steps_are_fewer():
    rule = dict(temperature=0.0)
    want, plain_steps, _ = run_engine(llama, *tiny.model_and_params(), rule)
    got, steps, _ = run_engine(*with_ngrams(), rule)
    assert got == want and steps < plain_steps


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (dict(num_drafts=0), "num_drafts=0 is out of range: take an integer from 1 to 16"),
        (dict(num_drafts=1, max_n=33), "max_n=33 is out of range"),
        (dict(num_drafts=1, min_n=3, max_n=2), "min_n=3 exceeds max_n=2, no n-gram is as long"),
    ],
)
def test_sizes_that_mean_nothing_are_refused(sizes: dict[str, int], message: str):
    with pytest.raises(ValueError, match=message):
        ngram(**sizes)
