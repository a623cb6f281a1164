"""The reference kernels against a float64 oracle that knows no tiles, chunks or tables."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrunner import step
from jaxrunner.kernels_pallas import reference
from jaxrunner.layout import Bucket
from jaxrunner.model import AttentionSpec
from jaxrunner.pytree import zeros
from jaxrunner.types import LayerCache, Plan, Requests, Writes

S, K, G, D, R, L = 4, 2, 3, 8, 6, 40
M = L // S
CASES = {  # computed tokens, and new ones, of each row
    "one token each": ([0, 1, 3, 4, 7, 38], [1] * 6),
    "prefill": ([0, 0], [17, 20]),
    "mixed, with cached prefixes": ([39, 8, 0, 5], [1, 19, 33, 1]),
    "block edges": ([3, 4, 5, 15], [1, 4, 3, 17]),
    "with empty rows": ([0, 5, 0, 9], [0, 3, 0, 1]),
}


def oracle(q, keys, values, positions, window):
    """Softmax attention of one row in float64: q [T, H, D] over keys and values [P, K, D]."""
    out = np.zeros(q.shape)
    for t, position in enumerate(positions):
        first = 0 if window is None else max(0, position - window + 1)
        for h in range(q.shape[1]):
            k, v = keys[first : position + 1, h // G], values[first : position + 1, h // G]
            scores = k @ q[t, h] * D**-0.5
            weights = np.exp(scores - scores.max())
            out[t, h] = weights @ v / weights.sum()
    return out


@pytest.mark.parametrize("poison", [0.0, np.nan], ids=["zeros", "junk"])
@pytest.mark.parametrize("window", [None, 1, 5])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_paged_attention_equals_its_oracle(case, window, poison, dtype):
    rng = np.random.default_rng(0)
    computed, counts = (np.array(x) for x in CASES[case])
    B, T = len(counts), int(sum(counts)) + 3
    uniform = case == "one token each"
    N = R * M + 1
    tables = rng.permutation(N)[: R * M].reshape(R, M)  # blocks of no request keep their junk
    slots = rng.permutation(R)[:B]

    def of_slot(values):
        return jnp.zeros(R, jnp.int32).at[slots].set(jnp.asarray(values, jnp.int32))

    dims = dict(R=R, L=L, X=1, M=M, G=1, N=N, K=K, S=S, D=D, kv=dtype)
    requests = replace(
        zeros(Requests, dims), num_computed=of_slot(computed), total_len=of_slot(computed + counts),
        blocks=(jnp.asarray(tables, jnp.int32),),
    )  # fmt: skip
    none = Writes(*(jnp.zeros(0, jnp.int32),) * 3)
    plan = Plan(jnp.asarray(slots, jnp.int32), jnp.asarray(counts, jnp.int32), (none,))
    bucket = Bucket(B if uniform else T, B, int(uniform))
    batch = step.prepare_inputs(requests, plan, bucket, (N, S), 0)

    def draw(*shape):
        return jnp.asarray(rng.normal(size=shape), dtype)

    T = bucket.num_tokens
    q, k, v = draw(T, K * G, D), draw(T, K, D), draw(T, K, D)
    history = draw(B, L, 2, K, D)
    cache = LayerCache(*(jnp.full((N, K, S, D), poison, dtype),) * 2)
    for b in range(B):
        for p in range(computed[b]):
            at = (tables[slots[b], p // S], slice(None), p % S)
            cache = LayerCache(k=cache.k.at[at].set(history[b, p, 0]),
                               v=cache.v.at[at].set(history[b, p, 1]))  # fmt: skip
    spec = AttentionSpec(0, window, D**-0.5)
    attention = jax.jit(reference.paged_attention, static_argnames="spec")
    out, after = attention(batch, q, k, v, cache, spec=spec)

    start, f64 = 0, lambda x: np.asarray(x, np.float64)
    written = np.isnan(np.asarray(cache.k, np.float32)) | (np.asarray(cache.k, np.float32) == 0)
    for b in range(B):
        tokens = slice(start, start + counts[b])
        keys, values = (
            np.concatenate([f64(history[b, : computed[b], i]), f64(new[tokens])])
            for i, new in enumerate((k, v))
        )
        positions = computed[b] + np.arange(counts[b])
        want = oracle(f64(q[tokens]), keys, values, positions, window)
        scale = max(np.abs(want).max(), 1e-9) if counts[b] else 1
        error = np.abs(f64(out[tokens]) - want).max() / scale if counts[b] else 0
        assert error < (1e-5 if dtype == "float32" else 2e-2)
        for p in positions:
            cell = np.asarray(after.k[tables[slots[b], p // S], :, p % S])
            np.testing.assert_array_equal(cell, np.asarray(k[start + p - computed[b]]))
            written[tables[slots[b], p // S], :, p % S] = False
        start += 1 if uniform else counts[b]
    same = np.asarray(after.k) == np.asarray(cache.k)
    assert (same | np.isnan(np.asarray(cache.k, np.float32)))[written].all()
    assert not np.isnan(np.asarray(out, np.float32)).any()


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
