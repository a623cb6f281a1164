"""A pipeline behind one interface: the stages of a config, and their states as one."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrunner.pytree import each, leaf, pytree, static
from jaxrunner.types import Array, Requests, SamplingMetadata, State


def stages_of(config: Any) -> tuple[Any, ...]:
    """Returns the configs of the stages that this process runs; none where there is no pipeline."""
    return getattr(config, "pipeline_stages", ())


def num_stages(config: Any) -> int:
    """Returns the stages of the whole pipeline; 1 where there is none."""
    return getattr(config, "num_stages", 1)


def num_slots(config: Any, engine: Any) -> int:
    """Returns the most requests at work, R: those of a step, and of as many other steps as there
    are other stages, which are under way meanwhile."""
    return engine.max_num_seqs * num_stages(config)


def held_caches(config: Any) -> list[int]:
    """Returns the indices into `cache_kinds` of caches that a config's programs have.

    Of layers with two caches, the first caches of all layers come before the second ones.
    """
    every, num = range(len(config.cache_kinds)), config.num_hidden_layers
    if (held := getattr(config, "pipeline_layers", None)) is None:
        return [*every]
    return [i for start in every[::num] for i in every[start : start + num][held]]


def rank_of(config: Any) -> int:
    """Returns the index of a config's stage in the pipeline; 0 without a pipeline."""
    return getattr(config, "rank", 0)


def own_part(config: Any, tree: Any) -> Any:
    """Returns a tree like the weights with None for weights that a config's stage does not read."""
    return config.own(tree) if stages_of(config) else tree


def is_last(config: Any) -> bool:
    """Whether a config's programs sample."""
    return getattr(config, "is_last_stage", True)


def is_spread(config: Any) -> bool:
    """Whether stages of a config's engine lie in several processes."""
    return getattr(config, "is_spread", False)


@pytree
class Outcome:
    """Tokens that the last stage sampled in a step, and drafts for the next step, if any."""

    token_ids: Array = leaf("B J", jnp.int32)
    num_sampled: Array | None = leaf("B", jnp.int32, when="drafts")
    drafts: Array | None = leaf("B K", jnp.int32, when="drafts")


@pytree
class Sampled:
    """Tokens that the last stage sampled in a step, on their way to stages that lack them."""

    rows: tuple[SamplingMetadata, ...] = each("stages")
    outcomes: tuple[Outcome, ...] = each("stages")  # none until they are told
    slots: tuple[int, ...] = static()  # of the rows; R where another request has the slot by now
    told: Any = static(default=None)  # where another process samples: what reads its tokens


@pytree
class PipelineState:
    """The states of the stages in one process, and tokens that are on their way between them."""

    requests: tuple[Requests, ...] = each("stages")
    kv: tuple[Any, ...] = each("stages")  # caches of each stage's layers
    tables: tuple[dict[str, Any], ...] = each("stages")
    sampled: tuple[Sampled, ...] = each("steps")  # oldest first; no slot is in two of them
    # The launch of the newest step's last stage while it is under way: a future of `Returned`.
    launch: Any = static(default=None)

    def settled(self) -> "PipelineState":
        """Returns the state behind the launch that is under way; raises what that raised."""
        if self.launch is None:
            return self
        returned, (*earlier, newest) = self.launch.result(), self.sampled
        newest = replace(newest, outcomes=returned.outcomes)
        return replace(self.put(-1, returned.part), sampled=(*earlier, newest), launch=None)

    def without_launch(self) -> "PipelineState":
        """Returns the state before the launch that is under way, which may have consumed it."""
        return self if self.launch is None else replace(self, sampled=(), launch=None)

    def part(self, i: int) -> State:
        """Returns the state of one stage; without caches where this one has none."""
        return State(self.requests[i], self.kv[i] if self.kv else (), self.tables[i])

    def put(self, i: int, part: State) -> "PipelineState":
        """Returns the pipeline's state with another state of one stage."""
        return replace(
            self,
            requests=_put(self.requests, i, part.requests),
            kv=_put(self.kv, i, part.kv) if self.kv else (),
            tables=_put(self.tables, i, part.tables),
        )

    def told(self, token_ids: Sequence[Sequence[int]]) -> "PipelineState":
        """Returns the state with the tokens, by row, of the oldest step that lacks them.

        Raises:
          RuntimeError: no step lacks tokens.
        """
        at = next((i for i, step in enumerate(self.sampled) if not step.outcomes), None)
        if at is None:
            raise RuntimeError("no step awaits tokens: call execute_model first")
        step = self.sampled[at]
        column: Any = np.zeros((len(step.slots), 1), np.int32)
        for i, row in enumerate(token_ids):
            column[i, : len(row)] = row  # none where it sampled none
        step = replace(step, outcomes=(Outcome(column, None, None),) * len(step.rows))
        return replace(self, sampled=(*self.sampled[:at], step, *self.sampled[at + 1 :]))


class Returned(NamedTuple):
    """What the launch of a step's last stage returns."""

    part: State
    packed: Array  # the output for the host
    outcomes: tuple[Outcome, ...]  # on the devices of each other stage


def joined(parts: list[State]) -> PipelineState:
    """Returns the states of stages as one."""
    return PipelineState(
        requests=tuple(part.requests for part in parts),
        kv=tuple(part.kv for part in parts),
        tables=tuple(part.tables for part in parts),
        sampled=(),
    )


def parts_of(state: State | PipelineState) -> list[State]:
    """Returns the states of stages, or the one there is."""
    if not isinstance(state, PipelineState):
        return [state]
    return [state.part(i) for i in range(len(state.requests))]


def with_part(state: Any, i: int, part: State) -> Any:
    """Returns a state with the state of stage i replaced."""
    return state.put(i, part) if isinstance(state, PipelineState) else part


def whole_state(config: Any, state: State | PipelineState) -> State:
    """Returns a pipeline's state as that of a whole model: requests of the last stage, all caches.

    Tables that steps write by layer are joined on the host.
    """
    if not isinstance(state, PipelineState):
        return state
    pairs = zip(stages_of(config), state.kv, strict=True)
    kv = {i: x for stage, of in pairs for i, x in zip(held_caches(stage), of, strict=True)}
    tables = state.tables[-1] | _by_layer(config, state)
    return State(state.requests[-1], tuple(kv[i] for i in sorted(kv)), tables)


def _by_layer(config: Any, state: PipelineState) -> dict[str, Any]:
    """Returns the tables with rows of layers, of each the rows of the stage that has it."""
    held, (*_, last) = [stage.pipeline_layers for stage in stages_of(config)], state.tables

    def rows(*parts: Array) -> np.ndarray:
        return np.concatenate([np.asarray(x)[of] for x, of in zip(parts, held, strict=True)])

    written = [table.name for table in config.family.tables if table.observe is not None]
    names = [name for name in written if name in last]
    return {name: jax.tree.map(rows, *(tables[name] for tables in state.tables)) for name in names}


def with_cache(config: Any, state: Any, i: int, cache: Any) -> Any:
    """Returns a state with one cache replaced, counted as in `whole_state`."""
    if not isinstance(state, PipelineState):
        return replace(state, kv=_put(state.kv, i, cache))
    held = [held_caches(stage) for stage in stages_of(config)]
    rank = next(rank for rank, of in enumerate(held) if i in of)
    layers = _put(state.kv[rank], held[rank].index(i), cache)
    return replace(state, kv=_put(state.kv, rank, layers))


def with_requests(state: Any, requests: Requests, tables: dict[str, Any]) -> Any:
    """Returns a state with other requests in all stages, and no tokens on their way."""
    if not isinstance(state, PipelineState):
        return replace(state, requests=requests, tables=tables)
    each = tuple(_like(requests, old) for old in state.requests)
    own = tuple(_like({name: tables[name] for name in old}, old) for old in state.tables)
    return replace(state, requests=each, tables=own, sampled=())


def _like(tree: Any, old: Any) -> Any:
    """Returns arrays on the devices of others."""
    return jax.tree.map(lambda x, old: jax.device_put(x, old.sharding), tree, old)


def _put(parts: tuple[Any, ...], i: int, part: Any) -> tuple[Any, ...]:
    i %= len(parts)
    return (*parts[:i], part, *parts[i + 1 :])
