"""Joins a model and its drafter to one model, with the interface of any other."""

from typing import Any, cast

import jax

from jaxrunner.config import ModelConfig
from jaxrunner.model import Model, Ops, Source
from jaxrunner.speculators.chain import chain
from jaxrunner.speculators.draft_logits import draft_logits
from jaxrunner.speculators.drafter import Drafted, DraftedConfig, Drafter, DrafterConfig
from jaxrunner.types import Array, Inputs


def with_drafter(
    model: Model,
    config: ModelConfig,
    family: Drafter,
    drafter: DrafterConfig,
    num_drafts: int,
    *,
    draft_sample_method: str = "coupled",
) -> tuple[Model, ModelConfig]:
    """Returns a model that drafts, whose params are `Drafted`.

    draft_sample_method: "coupled" samples drafts with the noise of the model's own draw, for
        exact verification; "probabilistic" with independent noise, and keeps their logits for
        standard and block verification; "greedy" takes the likeliest token.
    """
    own = draft_sample_method == "probabilistic"
    tables = (draft_logits(num_drafts),) if own else ()
    drafted = Model(
        read=model.read, params=Drafted, embed=_embed, layers=_layers, logits=_logits,
        sources=_sources, tables=model.tables, heads=model.heads,
        own_logits=_own_logits if model.own_logits else None,
        speculator=chain(family, drafter.extras, num_drafts, tables),
    )  # fmt: skip
    return drafted, cast(
        ModelConfig, DraftedConfig(model, config, family, drafter, num_drafts, draft_sample_method)
    )


def _embed(config: DraftedConfig, params: Drafted, inputs: Inputs) -> Array:
    return config.model.embed(config.target, params.target, inputs)


def _layers(
    config: DraftedConfig, params: Drafted, x: Array, kv: tuple[Any, ...], inputs: Inputs, ops: Ops,
    **which: Any,
) -> tuple[Array, tuple[Any, ...], dict[str, Array]]:  # fmt: skip
    n = len(config.target.cache_kinds)
    layers = config.model.layers
    hidden, own, extras = layers(config.target, params.target, x, kv[:n], inputs, ops, **which)
    return hidden, (*own, *kv[n:]), extras


def _logits(config: DraftedConfig, params: Drafted, hidden: Array) -> Array:
    return config.model.logits(config.target, params.target, hidden)


def _own_logits(config: DraftedConfig, params: Drafted, hidden: Array) -> Array:
    assert config.model.own_logits is not None
    return config.model.own_logits(config.target, params.target, hidden)


def _sources(config: DraftedConfig) -> Drafted:
    """Returns the sources of both; tensors of the drafter have its name before theirs."""

    def named(source: Source) -> Source:
        return source._replace(names=tuple(f"drafter.{name}" for name in source.names))

    own = config.family.sources(config.drafter)
    own = jax.tree.map(named, own, is_leaf=lambda x: isinstance(x, Source))
    return Drafted(config.model.sources(config.target), own)
