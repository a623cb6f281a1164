"""A smaller model of the same vocabulary as a drafter. arXiv:2211.17192, arXiv:2302.01318."""

from dataclasses import dataclass, field
from typing import Any

import jax

from jaxrunner.caches.cache_group import CacheKind
from jaxrunner.config import ModelConfig
from jaxrunner.model import Model, Ops
from jaxrunner.parallel.mesh import mesh_of
from jaxrunner.speculators.drafter import Drafter, Target
from jaxrunner.types import Array, Inputs


@dataclass(frozen=True)
class DraftModelConfig:
    """Any model of ours, for the tokens of another."""

    model: Model = field(repr=False)
    config: ModelConfig
    extras: tuple[str, ...] = ()

    @property
    def architecture(self) -> str:
        """Its name in messages."""
        return self.config.architecture

    @property
    def cache_kinds(self) -> tuple[CacheKind, ...]:
        """The cache kind of each of its layers."""
        return self.config.cache_kinds

    @property
    def mesh(self) -> jax.sharding.Mesh | None:
        """The devices that it is for; None for one."""
        return mesh_of(self.config)

    @property
    def dims(self) -> dict[str, Any]:
        """Axis sizes and flags for `pytree`."""
        return self.config.dims


def draft_model(model: Model) -> Drafter:
    """Returns the drafter that a model is."""
    return Drafter(
        "draft_model", model.params, sources, embed, feature, layers, logits, is_shifted=False
    )


def sources(config: DraftModelConfig) -> Any:
    """Returns where each weight lies in the checkpoint."""
    return config.model.sources(config.config)


def embed(config: DraftModelConfig, params: Any, inputs: Inputs, target: Target) -> Array:
    """Returns the embeddings of tokens, [T, E]."""
    return config.model.embed(config.config, params, inputs)


def feature(
    config: DraftModelConfig, params: Any, hidden: Array, extras: dict[str, Array]
) -> Array:
    """Returns what is there to be passed on: it is not read."""
    return hidden


def layers(
    config: DraftModelConfig, params: Any, x: Array, feature: Array, kv: tuple[Any, ...],
    inputs: Inputs, ops: Ops,
) -> tuple[Array, Array, tuple[Any, ...]]:  # fmt: skip
    """Runs all layers on x, [T, E]."""
    hidden, kv, _ = config.model.layers(config.config, params, x, kv, inputs, ops)
    return hidden, feature, kv


def logits(config: DraftModelConfig, params: Any, hidden: Array, target: Target) -> Array:
    """Scores every token by its own head, [..., V]."""
    return config.model.logits(config.config, params, hidden)
