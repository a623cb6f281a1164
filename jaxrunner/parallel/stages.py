"""A pipeline as the rest sees it: which stages a config has, and their state as one."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from jaxrunner.pytree import each, leaf, pytree, static
from jaxrunner.types import Array, Requests, SamplingMetadata, State


def stages_of(config: Any) -> tuple[Any, ...]:
    """Returns the configs of the stages that this process runs; none where there is no pipeline."""
    return getattr(config, "pipeline_stages", ())


def num_stages(config: Any) -> int:
    """Returns the stages of the whole pipeline; 1 where there is none."""
    return getattr(config, "num_stages", 1)


def held_layers(config: Any) -> slice:
    """Returns the layers whose weights and caches a config's programs have: of a stage, or all."""
    return getattr(config, "pipeline_layers", slice(None))


def rank_of(config: Any) -> int:
    """Returns the place of a config's stage in the pipeline; 0 where there is none."""
    return getattr(config, "rank", 0)


def own_part(config: Any, tree: Any) -> Any:
    """Returns what a tree like the weights says of those of a config's stage; None for others."""
    return config.own(tree) if stages_of(config) else tree


def is_last(config: Any) -> bool:
    """Whether a config's programs sample."""
    return getattr(config, "is_last_stage", True)


@pytree
class Sampled:
    """What the last stage sampled in a step, for stages that have not written it down yet."""

    rows: tuple[SamplingMetadata, ...] = each("stages")
    token_ids: tuple[Array | np.ndarray, ...] = leaf(
        "B 1", each="stages"
    )  # none until they are told
    slots: tuple[int, ...] = static()  # of the rows; R where another request has the slot by now


@pytree
class PipelineState:
    """The states of the stages in one process, and tokens that are on their way between them."""

    requests: tuple[Requests, ...] = each("stages")
    kv: tuple[Any, ...] = each("stages")  # caches of each stage's layers
    tables: tuple[dict[str, Any], ...] = each("stages")
    sampled: tuple[Sampled, ...] = each("steps")  # oldest first; no slot is in two of them

    def part(self, i: int) -> State:
        """Returns the state of one stage; without caches where this one has none."""
        return State(self.requests[i], self.kv[i] if self.kv else (), self.tables[i])

    def put(self, i: int, part: State) -> "PipelineState":
        """Returns the same with another state of one stage."""
        return replace(
            self,
            requests=_put(self.requests, i, part.requests),
            kv=_put(self.kv, i, part.kv) if self.kv else (),
            tables=_put(self.tables, i, part.tables),
        )

    def told(self, token_ids: Sequence[Sequence[int]]) -> "PipelineState":
        """Returns the same, with the tokens of the oldest step that has none yet, by row.

        Raises:
          RuntimeError: each step has its tokens.
        """
        at = next((i for i, step in enumerate(self.sampled) if not step.token_ids), None)
        if at is None:
            raise RuntimeError("no step awaits tokens: call execute_model first")
        step = self.sampled[at]
        column = np.zeros((len(step.slots), 1), np.int32)
        for i, row in enumerate(token_ids):
            column[i, : len(row)] = row  # none where it sampled none
        step = replace(step, token_ids=(column,) * len(step.rows))
        return replace(self, sampled=(*self.sampled[:at], step, *self.sampled[at + 1 :]))


def joined(parts: list[State]) -> PipelineState:
    """Returns the states of stages as one."""
    return PipelineState(
        requests=tuple(part.requests for part in parts),
        kv=tuple(part.kv for part in parts),
        tables=tuple(part.tables for part in parts),
        sampled=(),
    )


def _put(parts: tuple[Any, ...], i: int, part: Any) -> tuple[Any, ...]:
    i %= len(parts)
    return (*parts[:i], part, *parts[i + 1 :])
