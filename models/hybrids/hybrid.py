"""The common part of decoders with some layers that carry a state on: a class for each layer.

Their functions are Llama's: a layer is what its `attend` and `feed_forward` do.
"""

import abc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxrunner.api.validation import shown
from jaxrunner.caches.cache_group import CacheKind
from jaxrunner.caches.full import FullAttention
from jaxrunner.caches.state import RecurrentState
from jaxrunner.config import check_dtype
from jaxrunner.hf_config import Settings
from jaxrunner.model import AttentionSpec, Ops
from jaxrunner.models import llama
from jaxrunner.models.llama import Turn
from jaxrunner.pytree import each, host_value, leaf, pytree
from jaxrunner.types import Array

FULL = "full_attention"


@dataclass(frozen=True, kw_only=True)
class Hybrid:
    """The half of a `ModelConfig` that says which layers attend, and what the others keep."""

    attends: tuple[bool, ...]
    state: RecurrentState

    @property
    def concurrent_kernels(self) -> bool:
        """Whether kernels of a step may run at once: small ones around a state."""
        return True

    @property
    def cache_kinds(self) -> tuple[CacheKind, ...]:
        """The cache kind of each layer: keys and values of all tokens, or a state."""
        return tuple(FullAttention() if attends else self.state for attends in self.attends)

    def of_layers(
        self, other: type, attention: type, dims: Sequence[Mapping[str, Any]] = ()
    ) -> dict[str, Any]:
        """Returns the dims of each layer as Y, with its class: `attention` where it attends.

        dims: that each layer has besides.
        """
        classes, dims = (other, attention), dims or ({},) * len(self.attends)
        pairs = zip(dims, self.attends, strict=True)
        return dict(Y=tuple({**flags, "class": classes[attends]} for flags, attends in pairs))


@pytree
class Normed:
    """Norms of a layer: before what mixes tokens, and before what follows."""

    attn_norm: Array = leaf("E", "param")
    mlp_norm: Array = leaf("E", "param")


@pytree
class Mixing(Normed, abc.ABC):
    """A layer with a mixer in place of attention."""

    @abc.abstractmethod
    def mix(self, config: Any, ops: Ops, h: Array, cache: Any, group: int) -> tuple[Array, Any]:
        """Returns what the mixer adds to the residual, given h, [T, E]; and the cache."""

    def attend(
        self, config: Any, ops: Ops, h: Array, turn: Turn, cache: Any, spec: AttentionSpec
    ) -> tuple[Array, Any]:
        """Returns what the mixer adds to the residual, given h, [T, E]; and the cache."""
        return self.mix(config, ops, h, cache, spec.group)


@pytree
class Params(llama.Params):
    """Weights of a hybrid; the config's dims give the class of each layer."""

    layers: tuple[Any, ...] = each("Y")


def read_attends(settings: Settings, default: Sequence[str], other: str) -> tuple[bool, ...]:
    """Returns which layers attend; the others are called `other` in the config.

    Raises:
      ValueError: there are other kinds, or too few layers.
    """
    key, num = "layer_types", settings.size("num_hidden_layers")
    kinds = settings.each(key, str, [*default])
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


def layered(config: Any, one: Callable[[Any, str, bool], Any]) -> Params:
    """Returns where the weights of a hybrid lie.

    one: (config, prefix of its names, whether it attends) -> the sources of a layer.
    """
    layers = tuple(
        one(config, f"model.layers.{i}.", attends) for i, attends in enumerate(config.attends)
    )
    return host_value(Params, **llama.outer_sources(config), layers=layers)
