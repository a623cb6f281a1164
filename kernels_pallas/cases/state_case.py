"""Problems for the kernel that carries matrices of requests on."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrunner.kernels_pallas.cases.case import Case
from jaxrunner.kernels_pallas.states.state_step import Rows, Tokens, TuningConfig, state_step
from jaxrunner.types import Array

STATE_SPACE, DELTA_RULE = 1, 0  # the axis that is summed up


class States(NamedTuple):
    """Rows of `num` tokens each. What a row is to overwrite is NaN, unless it goes on from it."""

    name: str
    axis: int
    num: tuple[int, ...]
    heads: int
    groups: int
    rows: int
    columns: int
    dtype: str = "float32"
    drafts: int = 0  # K, that a row may verify and replay
    places: int = 1  # P, that a row may leave its state in
    query_len: int = 0  # places of a row's tokens; 0 for tokens side by side, and some padding
    new: int = 3  # every so many rows are new
    shared: bool = False  # of a TuningConfig

    @property
    def num_fields(self) -> int:
        """Fields of `Tokens` that there are."""
        return 4 if self.axis else 5

    @property
    def replays(self) -> tuple[int, ...]:
        """Tokens of the step before that each row replays."""
        return tuple((b + 2) % (self.drafts + 1) for b in range(len(self.num)))

    def make(self, seed: int) -> tuple[Array, ...]:
        """Returns states, the fields of `Rows`, and those of both `Tokens` that there are."""
        rng = np.random.default_rng(seed)
        num, P = np.array(self.num, np.int32), self.places
        B, Q = len(num), self.query_len
        N = B * (P + 1) + 2
        places = rng.permutation(N)[: B * (P + 1)].reshape(B, P + 1).astype(np.int32)
        # Every other row goes on from a state that it writes over.
        source = np.where(np.arange(B) % 2, places[:, P], places[:, 0])
        is_new = (num == 0) | (np.arange(B) % self.new == self.new - 1)
        source = np.where(is_new, N, source)
        places = places[:, :P]
        places[::2, 1:] = N
        spoilt = np.setdiff1d(places[num > 0], [*source, N])
        matrix = self.rows, self.columns
        dtype, shape = jnp.dtype(self.dtype), (N, self.heads, *matrix)
        states = jax.random.normal(jax.random.key(seed), shape, dtype)
        states = states.at[jnp.asarray(spoilt, jnp.int32)].set(jnp.nan)
        start = np.arange(B) * Q if Q else np.cumsum(num) - num
        waiting = np.where(is_new, 0, self.replays)
        tokens = self._tokens(rng, B * Q if Q else int(num.sum()) + 3)
        if self.drafts:
            value, key, _, *others = self._tokens(rng, B * self.drafts)
            tokens += value, key, *others
        rows = (jnp.asarray(x, jnp.int32) for x in (source, places, start, num, waiting))
        return states, *rows, *(jnp.asarray(x, jnp.float32) for x in tokens)

    def _tokens(self, rng: np.random.Generator, T: int) -> tuple[np.ndarray, ...]:
        """Returns the fields of `Tokens` that there are."""
        matrix, H = (self.rows, self.columns), self.heads
        shapes = (T, H, matrix[1 - self.axis]), *[(T, self.groups, matrix[self.axis])] * 2
        value, key, query = map(rng.standard_normal, shapes)
        keep = rng.uniform(0.5, 1, (T, H))
        if self.axis != DELTA_RULE:
            return value, key, query, keep
        key /= np.linalg.norm(key, axis=-1, keepdims=True)
        return value, key, query, keep, rng.uniform(0, 1, (T, H))

    def run(self, states: Array, *more: Array, **options: Any) -> tuple[Array, Array]:
        """Runs the kernel. Returns what tokens read, and the states."""
        config = TuningConfig(shared=self.shared)
        sizes = dict[str, Any](axis=self.axis, query_len=self.query_len, config=config)
        rows, end = Rows(*more[:5]), 5 + self.num_fields
        if self.drafts:
            value, key, *others = more[end:]
            sizes |= dict(waiting=Tokens(value, key, None, *others))
        states, out = state_step(states, rows, Tokens(*more[5:end]), **sizes, **options)
        return out, states

    def case(self) -> Case:
        """Returns the problem; its bytes are those of states that are read and written."""
        matrix = self.heads * self.rows * self.columns * jnp.dtype(self.dtype).itemsize
        amount = 2 * matrix * sum(n > 0 for n in self.num)
        rule = "state space" if self.axis else "delta rule"
        sizes = f"{self.heads} x {self.rows} x {self.columns}"
        drafts = f", {self.drafts} drafts" * (self.drafts > 0)
        name = f"{rule}, {self.name}, {sizes}, {self.dtype}{drafts}"
        options = dict(axis=self.axis, fields=self.num_fields)
        return Case("state_step", name, self.make, self.run, float(amount), "TB/s", options)


def _decoding(model: States, B: int, dtype: str = "float32", tokens: int = 1) -> Case:
    """Returns the problem of B rows of a model, each with as many tokens, of which none is new."""
    return model._replace(
        name=f"{B} of {model.name}", num=(tokens,) * B, dtype=dtype, drafts=tokens - 1,
        query_len=tokens, new=B + 1,
    ).case()  # fmt: skip


_EDGES = 1, 0, 1, 1, 1
_HALF = dict[str, Any](dtype="bfloat16")
STATES: tuple[Case, ...] = (
    States("edges", STATE_SPACE, _EDGES, 6, 2, 64, 128, query_len=1).case(),
    States("whole parts", STATE_SPACE, (1,) * 12, 48, 1, 64, 128, query_len=1).case(),
    States("long runs", STATE_SPACE, (1,) * 3, 4, 4, 16, 256, query_len=1).case(),
    States("short runs", STATE_SPACE, (1, 1), 2, 1, 80, 32, query_len=1).case(),
    States("edges", STATE_SPACE, _EDGES, 4, 2, 32, 128, query_len=1, **_HALF).case(),
    States("drafts", STATE_SPACE, (4, 1, 0, 3), 4, 1, 64, 128, drafts=3, query_len=4).case(),
    States("drafts", STATE_SPACE, (3, 2), 2, 1, 64, 64, drafts=2, query_len=3, **_HALF).case(),
    States("side by side", STATE_SPACE, (2, 0, 1, 2), 4, 1, 16, 128, drafts=2, places=2).case(),
    States("edges", DELTA_RULE, _EDGES, 4, 2, 128, 128, query_len=1).case(),
    States("whole parts", DELTA_RULE, (1,) * 9, 32, 16, 128, 64, query_len=1).case(),
    States("three parts", DELTA_RULE, (1, 1), 3, 1, 64, 96, query_len=1).case(),
    States("edges", DELTA_RULE, _EDGES, 4, 2, 128, 128, query_len=1, **_HALF).case(),
    States("drafts", DELTA_RULE, (4, 1, 0, 3), 4, 2, 128, 64, drafts=3, query_len=4).case(),
    States("drafts", DELTA_RULE, (2, 1, 2), 2, 1, 64, 64, drafts=1, query_len=2, **_HALF).case(),
    States("side by side", DELTA_RULE, (2, 0, 1, 2), 4, 2, 32, 64, drafts=2, places=3).case(),
    States("shared", DELTA_RULE, _EDGES, 4, 2, 128, 128, query_len=1, shared=True).case(),
    States("shared", DELTA_RULE, (3, 2), 2, 1, 64, 64, drafts=2, shared=True, **_HALF).case(),
)
_MODELS = (
    States("Granite 4 H", STATE_SPACE, (), 48, 1, 64, 128),
    States("Nemotron-H", STATE_SPACE, (), 128, 8, 64, 128),
    States("Qwen3.5", DELTA_RULE, (), 32, 16, 128, 128),
)
MODELS: tuple[Case, ...] = tuple(
    case
    for model in _MODELS
    for case in (
        *(_decoding(model, B) for B in (1, 8, 64, 256)),
        _decoding(model, 64, "bfloat16"),
        _decoding(model, 64, tokens=4),
    )
)
