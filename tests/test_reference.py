"""The reference kernels against a float64 oracle that knows no tiles, chunks or tables."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxrunner.kernels_pallas import reference
from jaxrunner.model import AttentionSpec
from jaxrunner.types import LayerCache
from tests.support.paged_attention import BOTH, CASES, D, G, K, Problem, oracle


@BOTH
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("window", "dtype"), [(None, "float32"), (1, "float32"), (5, "bfloat16")])
def test_paged_attention_equals_its_oracle(case, window, dtype, attention):
    problem = Problem(case, dtype)
    spec = AttentionSpec(0, window, D**-0.5)
    k, v = map(jnp.asarray, problem.cache)
    cache = LayerCache(k, v, None, None)
    inputs = map(jnp.asarray, (problem.q, problem.k, problem.v))
    out, after = attention(problem.batch, *inputs, cache, spec=spec)
    out = np.asarray(out, np.float64)
    assert not np.isnan(out).any()
    expected = problem.cache.copy()
    for b, tokens, positions in problem.rows():
        want = problem.want(b, tokens, positions, window)
        error = np.abs(out[tokens] - want).max() / np.abs(want).max()
        assert error < (1e-5 if dtype == "float32" else 2e-2)
        for t, p in enumerate(positions, tokens.start):
            expected[:, *problem.cell(b, p)] = problem.k[t], problem.v[t]
    # Every other cell holds what it held.
    np.testing.assert_array_equal(np.asarray(after.k, np.float32), expected[0].astype(np.float32))
    np.testing.assert_array_equal(np.asarray(after.v, np.float32), expected[1].astype(np.float32))


@pytest.mark.parametrize("window", [None, 3])
def test_dense_attention_equals_its_oracle(window):
    rng = np.random.default_rng(1)
    q, k, v = (jnp.asarray(rng.normal(size=(14, h, D)), jnp.float32) for h in (K * G, K, K))
    spec = AttentionSpec(0, window, D**-0.5)
    out, cache = reference.dense_attention(2, q, k, v, None, spec)
    assert cache is None
    for rows in (slice(0, 7), slice(7, 14)):
        q_, k_, v_ = (np.asarray(x[rows], np.float64) for x in (q, k, v))
        want = oracle(q_, k_, v_, range(7), window)
        np.testing.assert_allclose(out[rows], want, atol=1e-5)
