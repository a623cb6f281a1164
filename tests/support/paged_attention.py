"""Problems of paged attention, a float64 oracle of it, and the reference in both its forms."""

from dataclasses import replace
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrunner import step
from jaxrunner.kernels_pallas import reference
from jaxrunner.ops import cpu_attention
from jaxrunner.program.bucket import Bucket
from jaxrunner.pytree import zeros
from jaxrunner.types import Plan, Requests, Writes

S, K, G, D, R, L = 4, 2, 3, 8, 6, 40
M = L // S
CASES = {  # computed tokens, and new ones, of each row
    "one token each": ([0, 1, 3, 4, 7, 38], [1] * 6),
    "prefill": ([0, 0], [17, 20]),
    "mixed, with cached prefixes": ([39, 8, 0, 5], [1, 19, 33, 1]),
    "block edges": ([3, 4, 5, 15], [1, 4, 3, 17]),
    "with empty rows": ([0, 5, 0, 9], [0, 3, 0, 1]),
}
prepare = jax.jit(step.prepare_inputs, static_argnums=(2, 3))  # else each operation is compiled


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


class Problem:
    """Requests with some keys in the cache and some tokens to compute, and what must come out."""

    def __init__(self, case: str, dtype: str):
        rng = np.random.default_rng(0)
        self.computed, self.counts = (np.array(x) for x in CASES[case])
        B, self.uniform = len(self.counts), case == "one token each"
        T = B if self.uniform else int(sum(self.counts)) + 3
        N = R * M + 1  # one block is nobody's
        self.tables = rng.permutation(N)[: R * M].reshape(R, M)
        self.slots = rng.permutation(R)[:B]
        bucket = Bucket(T, B, int(self.uniform))
        self.batch, _ = prepare(self.requests(), self.plan(), bucket, ((N, S),))

        def draw(*shape):
            return rng.normal(size=shape).astype(jnp.dtype(dtype))

        self.q, self.k, self.v = draw(T, K * G, D), draw(T, K, D), draw(T, K, D)
        self.history = draw(B, 2, L, K, D)
        self.cache = np.full((2, N, K, S, D), np.nan, jnp.dtype(dtype))
        for b in range(B):
            for p in range(self.computed[b]):
                self.cache[:, *self.cell(b, p)] = self.history[b, :, p]

    def cell(self, b: int, position: int):
        """Where the cache holds a position of row b, in [N, K, S]."""
        return self.tables[self.slots[b], position // S], slice(None), position % S

    def requests(self) -> Requests:
        def of_slot(values):
            of_all = np.zeros(R, np.int32)
            of_all[self.slots] = values
            return jnp.asarray(of_all)

        return replace(
            zeros(Requests, dict(R=R, L=L, X=1, M=M, G=1)),
            num_computed=of_slot(self.computed),
            total_len=of_slot(self.computed + self.counts),
            blocks=(jnp.asarray(self.tables, jnp.int32),),
        )

    def plan(self) -> Plan:
        none = Writes(*(jnp.zeros(0, jnp.int32),) * 3)
        slots, counts = (jnp.asarray(x, jnp.int32) for x in (self.slots, self.counts))
        return Plan(slots, counts, (none,))

    def rows(self):
        """Yields each row that computes, its tokens and their positions."""
        start = 0
        for b, count in enumerate(self.counts):
            if count:
                yield b, slice(start, start + count), self.computed[b] + np.arange(count)
            start += 1 if self.uniform else count

    def want(self, b: int, tokens: slice, positions, window):
        old = self.history[b, :, : self.computed[b]].astype(np.float64)
        keys, values = (
            np.concatenate([old[i], new[tokens].astype(np.float64)])
            for i, new in enumerate((self.k, self.v))
        )
        return oracle(self.q[tokens].astype(np.float64), keys, values, positions, window)


at_once = jax.jit(reference.paged_attention, static_argnames="spec")
small = functools.partial(cpu_attention.paged_attention, tile=8, chunk=3 * S)
by_tiles = jax.jit(small, static_argnames="spec")
BOTH = pytest.mark.parametrize("attention", [at_once, by_tiles], ids=["at once", "by tiles"])
