"""Problems for the kernels that carry matrices of requests on by chunks."""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxrunner.kernels_pallas.cases.case import Case
from jaxrunner.kernels_pallas.cases.state_case import DELTA_RULE, STATE_SPACE
from jaxrunner.kernels_pallas.states.delta_chunks import Chunks, delta_chunks
from jaxrunner.kernels_pallas.states.state_chunks import CHUNK, Rows, Tokens, state_chunks
from jaxrunner.types import Array


class Prompts(NamedTuple):
    """Rows of `num` tokens each. What a row is to overwrite is NaN, and so is what nobody reads."""

    name: str
    axis: int
    num: tuple[int, ...]
    heads: int
    groups: int
    keys: int
    values: int
    dtype: str = "float32"
    alike: bool = False  # keys that all but agree, decays near 1 and betas near 1

    @property
    def chunks(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The first token and the number of tokens of each chunk, and each row's first chunk."""
        num = np.array(self.num, np.int32)
        starts, counts = np.cumsum(num) - num, -(-num // CHUNK)
        nth = [np.arange(0, n, CHUNK, dtype=np.int32) for n in num]
        first = np.concatenate([s + at for s, at in zip(starts, nth, strict=True)])
        there = np.concatenate([np.minimum(n - at, CHUNK) for n, at in zip(num, nth, strict=True)])
        return first, there, np.cumsum(counts) - counts

    def make(self, seed: int) -> tuple[Array, ...]:
        """Returns states, the fields of `Rows`, and what tokens bring: value, key, query, decay and
        beta, by token, which of a state space is 0."""
        rng, B, H = np.random.default_rng(seed), len(self.num), self.heads
        num, matrix = np.array(self.num, np.int32), (self.keys, self.values)
        start, T = np.cumsum(num) - num, int(num.sum()) + 5
        shape = (2 * B, H, *(matrix[::-1] if self.axis else matrix))
        states = rng.standard_normal(shape)
        states[B:][num > 0] = np.nan
        source = np.where(np.arange(B) % 3 == 2, 2 * B, np.arange(B))  # every third row is new
        rows = source, np.arange(B, 2 * B), start, num, self.chunks[2]
        groups = (T + CHUNK, self.groups, self.keys)
        value, key, query = map(rng.standard_normal, ((T + CHUNK, H, self.values), groups, groups))
        decay, beta = -0.3 * np.abs(rng.standard_normal((T, H))), rng.uniform(0, 1, (T, H))
        if self.alike:
            key[:], decay, beta = key[:1] + key / 100, decay / 1000, 1 - beta / 1000
        if self.axis == DELTA_RULE:
            key, query = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (key, query))
        else:
            beta = 0 * beta
        for x in (value, key, query):
            x[int(num.sum()) :] = np.nan
        floats = (jnp.asarray(x, jnp.float32) for x in (value, key, query, decay, beta))
        return (
            jnp.asarray(states, jnp.dtype(self.dtype)),
            *(jnp.asarray(x, jnp.int32) for x in rows), *floats,
        )  # fmt: skip

    def run(self, states: Array, *given: Array, **options: Any) -> tuple[Array, Array]:
        """Runs the kernels. Returns what tokens read, and the states."""
        rows, (value, key, query, decay, beta) = Rows(*given[:5]), given[5:]
        first, there, _ = self.chunks
        at = first[:, None] + np.arange(CHUNK)
        token = np.where(np.arange(CHUNK) < there[:, None], at, len(decay))

        def by_chunk(x: Array) -> Array:
            return x.at[token].get(mode="fill", fill_value=0).swapaxes(1, 2)

        total, out = by_chunk(decay).cumsum(2), jnp.zeros(value.shape, jnp.float32)[:-CHUNK]
        tokens = Tokens(value, key, query, total)
        if self.axis == DELTA_RULE:
            chunks = Chunks(jnp.asarray(first), jnp.asarray(there))
            value, moved = delta_chunks(chunks, value, key, total, by_chunk(beta), **options)
            tokens = tokens._replace(value=value, moved=moved)
        states, out = state_chunks(states, rows, tokens, out, axis=self.axis, **options)
        return out, states

    def case(self) -> Case:
        """Returns the problem; its operations are those of a chunk's products, in float32."""
        C, keys, values, T = CHUNK, self.keys, self.values, sum(self.num)
        amount = 2 * self.heads * T * (C * keys + C * values + 2 * keys * values)
        if self.axis == DELTA_RULE:  # keys of a chunk, its triangle, and what moves
            amount += 2 * self.heads * T * (C * keys + C * (keys + values) / 2 + keys * values)
        rule = "state space" if self.axis else "delta rule"
        name = f"{rule}, {self.name}, {self.heads} x {keys} x {values}, {self.dtype}"
        options = dict(axis=self.axis)
        return Case("state_chunks", name, self.make, self.run, float(amount), "TFLOP/s", options)


PROMPTS: tuple[Case, ...] = (
    Prompts("edges", STATE_SPACE, (70, 0, 64, 5), 2, 1, 128, 64).case(),
    Prompts("keys of 64", STATE_SPACE, (33, 150), 4, 2, 64, 128).case(),
    Prompts("edges", STATE_SPACE, (130, 1), 2, 2, 128, 64, dtype="bfloat16").case(),
    Prompts("edges", DELTA_RULE, (70, 0, 64, 5), 2, 1, 128, 128).case(),
    Prompts("alike", DELTA_RULE, (150, 30), 2, 2, 128, 128, alike=True).case(),
    Prompts("edges", DELTA_RULE, (130, 1), 2, 1, 128, 128, dtype="bfloat16").case(),
)
LONG_PROMPTS: tuple[Case, ...] = (
    Prompts("2 of Granite 4 H", STATE_SPACE, (4096,) * 2, 48, 1, 128, 64).case(),
    Prompts("2 of Qwen3.5", DELTA_RULE, (4096,) * 2, 32, 16, 128, 128).case(),
    Prompts("8 of Qwen3.5", DELTA_RULE, (1024,) * 8, 32, 16, 128, 128).case(),
)
