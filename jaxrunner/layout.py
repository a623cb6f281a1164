"""The static half of an engine, and the shapes of everything that follows from it."""

from collections.abc import Callable
import functools
from typing import Any, NamedTuple

import jax.numpy as jnp

from jaxrunner import pytree
from jaxrunner.config import EngineConfig, ModelConfig
from jaxrunner.model import Model
from jaxrunner.sampling.rule import Rule
from jaxrunner.types import Admission, LayerCache, Plan, Requests, State

MAX_STOP_IDS = 32  # of a request: its own, and the model's EOS


class Program(NamedTuple):
    """What is compiled into every program of an engine."""

    model: Model
    config: ModelConfig
    engine: EngineConfig
    attention: Callable[..., Any]  # (batch, q, k, v, cache, spec) -> (out [T, H, D], cache)
    rules: tuple[Rule, ...] = ()
    num_drafts: int = 0

    @property
    def dims(self) -> dict[str, Any]:
        """Axis sizes, dtypes and flags, for `pytree`."""
        e = self.engine
        return self.config.dims | dict(
            R=e.max_num_seqs, L=e.max_model_len, X=MAX_STOP_IDS, J=1 + self.num_drafts,
            N=e.num_blocks, S=e.block_size, M=e.max_blocks, key=2,
            kv=jnp.dtype(e.kv_dtype), param=jnp.dtype(e.dtype),
        )  # fmt: skip


class Bucket(NamedTuple):
    """The padded size of a step, and which of its parts are compiled in."""

    num_tokens: int  # T
    num_rows: int  # B
    query_len: int = 0  # tokens of every row, 0 if rows differ
    greedy: bool = False  # every row takes its likeliest token, no rule applies


class AdmitSize(NamedTuple):
    """The padded size of an admission."""

    num_rows: int  # A
    num_writes: int  # W


def make_state(program: Program) -> State:
    """Returns the state of an engine without requests."""
    dims = program.dims
    return State(
        requests=pytree.zeros(Requests, dims),
        sampling=tuple(pytree.zeros(rule.params, dims) for rule in program.rules),
        kv=tuple(pytree.zeros(LayerCache, dims) for _ in range(dims["Y"])),
    )


@functools.lru_cache(maxsize=1024)  # asked for in every step
def plan_spec(program: Program, bucket: Bucket) -> Plan:
    """Returns the abstract plan of a bucket; its W holds any blocks that T tokens can need."""
    T, B = bucket.num_tokens, bucket.num_rows
    dims = dict(B=B, W=T // program.engine.block_size + B)
    return pytree.abstract(Plan, program.dims | dims)


@functools.lru_cache(maxsize=64)
def admission_spec(program: Program, size: AdmitSize) -> tuple[Admission, tuple[Any, ...]]:
    """Returns the abstract admission of a size, and its rows of sampling parameters."""
    A, W = size
    dims = program.dims | dict(A=A, W=W, R=A)
    rows = tuple(pytree.abstract(rule.params, dims) for rule in program.rules)
    return pytree.abstract(Admission, dims), rows


def admit_sizes(program: Program) -> tuple[AdmitSize, AdmitSize]:
    """Returns the sizes of admissions: a few requests, or many."""
    R = program.engine.max_num_seqs
    return AdmitSize(min(8, R), 1024), AdmitSize(min(64, R), 8192)
