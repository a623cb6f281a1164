"""A model and its drafter as one model, which the rest knows no difference of."""

from typing import Any, cast

import jax

from jaxrunner.config import ModelConfig
from jaxrunner.model import Model, Ops, Source
from jaxrunner.speculators.chain import chain
from jaxrunner.speculators.drafter import Drafted, DraftedConfig, Drafter, DrafterConfig
from jaxrunner.types import Array, Inputs


def with_drafter(
    model: Model,
    config: ModelConfig,
    family: Drafter,
    drafter: DrafterConfig,
    num_drafts: int,
    *,
    is_coupled: bool = True,
) -> tuple[Model, ModelConfig]:
    """Returns a model that drafts, whose params are `Drafted`.

    is_coupled: whether drafts are drawn as the model would draw them, with its noise; else they are
        the likeliest tokens.
    """
    drafted = Model(
        read=model.read, params=Drafted, embed=_embed, layers=_layers, logits=_logits,
        sources=_sources, tables=model.tables, heads=model.heads,
        speculator=chain(family, drafter.extras, num_drafts),
    )  # fmt: skip
    return drafted, cast(
        ModelConfig, DraftedConfig(model, config, family, drafter, num_drafts, is_coupled)
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


def _sources(config: DraftedConfig) -> Drafted:
    """Returns the sources of both; tensors of the drafter have its name before theirs."""

    def named(source: Source) -> Source:
        return source._replace(names=tuple(f"drafter.{name}" for name in source.names))

    own = config.family.sources(config.drafter)
    own = jax.tree.map(named, own, is_leaf=lambda x: isinstance(x, Source))
    return Drafted(config.model.sources(config.target), own)
