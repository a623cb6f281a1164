"""The interface of drafters: speculators with weights and layers of their own."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
import functools
from typing import Any, NamedTuple, Protocol

from jaxrunner.caches.cache_group import CacheKind
from jaxrunner.caches.kv_blocks import KVBlocks
from jaxrunner.config import ModelConfig, WrappingConfig
from jaxrunner.model import Model
from jaxrunner.pytree import part, pytree
from jaxrunner.types import Array, Inputs


class DrafterConfig(Protocol):
    """The settings of a drafter that engines need. Each family has a frozen dataclass of them."""

    @property
    def architecture(self) -> str:
        """Its name in messages."""
        ...

    @property
    def dims(self) -> dict[str, Any]:
        """Sizes of axes and flags of its weights, where they are not the model's."""
        ...

    @property
    def cache_kinds(self) -> tuple[CacheKind, ...]:
        """The cache kind of each of its layers."""
        ...

    @property
    def extras(self) -> tuple[str, ...]:
        """Names of the arrays of the model's layers that it reads."""
        ...


class Target(NamedTuple):
    """The ends of the model that a drafter may share."""

    embed: Callable[[Inputs], Array]  # inputs of T tokens -> [T, E]
    logits: Callable[[Array], Array]  # hidden, [..., E] -> [..., V]


def own_or_shared_embed(config: Any, params: Any, inputs: Inputs, target: Target) -> Array:
    """Returns the embeddings of tokens, [T, E]: of `params.embed`, or where that is None the
    model's."""
    return target.embed(inputs) if params.embed is None else params.embed[inputs.token_ids]


class Drafter(NamedTuple):
    """A family of drafters: its weights, and pure functions of `config`, its own, and `params`.

    A step's tokens go through `layers` first, then one token of each request at a time. A shifted
    drafter reads, at each position, the model's hidden state of that token, and the token that
    follows; other drafters read tokens only, each at its own position.
    """

    name: str
    params: type  # pytree of weights, declared by axes
    sources: Callable[..., Any]  # (config) -> `params` filled with `Source`
    embed: Callable[..., Array]  # (config, params, inputs, target) -> x [T, E]
    # (config, params, hidden [T, E], extras) -> what `layers` take of the model, [T, ...]
    feature: Callable[..., Array]
    # (config, params, x, feature, kv, inputs, ops) -> hidden [T, E] for `logits`, the feature that
    # the next token is drafted with, caches
    layers: Callable[..., tuple[Array, Array, tuple[Any, ...]]]
    logits: Callable[..., Array]  # (config, params, hidden [..., E], target) -> [..., V]
    is_shifted: bool = True
    spare: tuple[str, ...] = ()  # beginnings of names of tensors in its files that are not read
    # (settings, config of the model, names of tensors) -> `config`: of config.json, checked. None
    # where no checkpoint says it.
    read: Callable[..., DrafterConfig] | None = None
    # Whether it runs on shards: what layers add to x is made by `ops.project` and `ops.mlp`, and no
    # axis V is its own.
    tensor_parallel: bool = False


@pytree
class Drafted:
    """Weights of a model, and of its drafter."""

    target: Any = part("target")
    drafter: Any = part("drafter")


@dataclass(frozen=True)
class DraftedConfig(WrappingConfig):
    """The `ModelConfig` of a model with a drafter: the model's, and caches of both."""

    INNER = "target"
    model: Model = field(repr=False)
    target: ModelConfig
    family: Drafter = field(repr=False)
    drafter: DrafterConfig
    num_drafts: int
    # How drafts are drawn: "coupled", with the model's noise; "probabilistic", with their own;
    # "greedy", the likeliest.
    draft_sample_method: str = "coupled"

    @functools.cached_property
    def cache_kinds(self) -> tuple[CacheKind, ...]:
        """The cache kind of each layer, the drafter's behind the model's."""
        return (*self.target.cache_kinds, *self.own_kinds)

    @functools.cached_property
    def own_kinds(self) -> tuple[CacheKind, ...]:
        """The cache kinds of the drafter's layers: in the model's blocks where sizes are equal."""
        dims = self.drafter.dims  # without K and D where no layer keeps keys
        axes = tuple((axis, dims[axis]) for axis in "KD" if axis in dims)
        if all(self.target.dims.get(axis) == size for axis, size in axes):
            return self.drafter.cache_kinds
        kinds = self.drafter.cache_kinds
        return tuple(replace(k, axes=axes) if isinstance(k, KVBlocks) else k for k in kinds)

    @functools.cached_property
    def dims(self) -> dict[str, Any]:
        """The dims of the model, and those of both parts of `Drafted`."""
        own = {"kinds": {}} | self.drafter.dims  # no stand-ins of the model's
        parts = dict(target=(self.model.params, {}), drafter=(self.family.params, own))
        return self.target.dims | parts
