"""What decoders have in common of which some layers carry a state on: a class for each layer.

Their functions are Llama's: a layer is what its `attend` and `feed_forward` do.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from jaxrunner.api.validation import shown
from jaxrunner.caches.cache_group import CacheKind
from jaxrunner.caches.full import FullAttention
from jaxrunner.caches.state import RecurrentState
from jaxrunner.config import check_dtype
from jaxrunner.hf_config import Settings
from jaxrunner.model import Source
from jaxrunner.models import llama
from jaxrunner.pytree import each, pytree

FULL = "full_attention"


@dataclass(frozen=True, kw_only=True)
class Hybrid:
    """The half of a `ModelConfig` that says which layers attend, and what the others keep."""

    attends: tuple[bool, ...]
    state: RecurrentState

    @property
    def cache_kinds(self) -> tuple[CacheKind, ...]:
        """What each layer keeps: keys and values of all tokens, or a state."""
        return tuple(FullAttention() if attends else self.state for attends in self.attends)

    def of_layers(self, dims: Sequence[Mapping[str, Any]], other: type, attention: type) -> Any:
        """Returns the dims of each layer with its class, `attention` where it attends."""
        classes = other, attention
        pairs = zip(dims, self.attends, strict=True)
        return tuple({**flags, "class": classes[attends]} for flags, attends in pairs)


@pytree
class Params(llama.Params):
    """Weights of a hybrid; the config's dims tell the class of each layer."""

    layers: tuple[Any, ...] = each("Y")


def read_attends(
    settings: Settings, default: Sequence[str], other: str, key: str = "layer_types"
) -> tuple[bool, ...]:
    """Returns which layers attend; the others are called `other` in the config.

    Raises:
      ValueError: there are other kinds, or too few layers.
    """
    num, kinds = settings.size("num_hidden_layers"), settings.each(key, str, [*default])
    if len(kinds) != num or not set(kinds) <= {FULL, other}:
        raise ValueError(f"{key} must name {FULL} or {other} for {num} layers, got {shown(kinds)}")
    return tuple(kind == FULL for kind in kinds)


def read_state_dtype(settings: Settings) -> str:
    """Returns what the matrices of states are kept in, in the names of vLLM and of Qwen.

    Raises:
      ValueError: it is no dtype that is computed in.
    """
    name, other = "mamba_ssm_cache_dtype", "mamba_ssm_dtype"
    found = settings.take(name, str, settings.take(other, str, "float32"))
    return check_dtype(name, found)


def renamed(sources: Any, names: dict[str, str]) -> Any:
    """Returns sources whose tensors have names in which each key of `names` is its value."""

    def one(source: Source) -> Source:
        found = source.names
        for old, new in names.items():
            found = tuple(name.replace(old, new) for name in found)
        return source._replace(names=found)

    return jax.tree.map(one, sources, is_leaf=lambda node: isinstance(node, Source))


def conv_source(name: str, channels: int, width: int) -> Source:
    """Returns the source of a convolution of each channel by itself, [C, W]."""
    return Source.whole(f"{name}.weight", channels, 1, width, held=(channels, width))
