"""A mixture inside a model that changes what its layers do; it embeds and scores as by itself."""

from dataclasses import dataclass, field
from typing import Any

from jaxrunner.config import WrappingConfig
from jaxrunner.model import Model
from jaxrunner.types import Array, Inputs


@dataclass(frozen=True)
class WrappedConfig(WrappingConfig):
    """The config of a mixture, for what runs it; has all attributes of its own config."""

    family: Model = field(repr=False)
    plain: Any  # its own config


def embed(config: WrappedConfig, params: Any, inputs: Inputs) -> Array:
    """Returns the embeddings of the tokens, [T, E]."""
    return config.family.embed(config.plain, params, inputs)


def logits(config: WrappedConfig, params: Any, hidden: Array) -> Array:
    """Scores every token of the vocabulary: hidden [..., E] -> [..., V]."""
    return config.family.logits(config.plain, params, hidden)
