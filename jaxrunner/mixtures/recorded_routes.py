"""Wraps a mixture so that its routes are recorded; its interface stays the same.

The experts of each token lie in blocks like its keys and values, in one more cache of each layer.
So routes stay right for shared prefixes, chunked prompts and preempted requests. Routes that a user
gives are written there before the step that replays them.
"""

from dataclasses import dataclass, replace
import functools
from typing import Any, ClassVar, cast

import jax.numpy as jnp

from jaxrunner.caches.cache_group import CacheKind, distinct
from jaxrunner.caches.full import FullAttention
from jaxrunner.config import ModelConfig
from jaxrunner.mixtures.experts import Routes
from jaxrunner.mixtures.wrapped import WrappedConfig, embed, logits
from jaxrunner.model import Model, Ops
from jaxrunner.ops.routing import Router, RouterConfig, scored, weigh, with_routes
from jaxrunner.pytree import leaf, pytree
from jaxrunner.types import Array, Inputs

NONE = -1  # expert of a layer without experts, and of a token whose routes are not given
GIVEN = -2  # a given expert e is kept as GIVEN - e


@pytree
class RoutesCache:
    """The experts of each token in one layer; every device of a mesh has those of all tokens."""

    experts: Array = leaf("N whole_block routes", jnp.int16)


@dataclass(frozen=True, kw_only=True)
class RoutesKind(FullAttention):
    """Routes of all tokens; none is given back before a request ends."""

    num_routes: int
    leaves: ClassVar[type] = RoutesCache
    is_small: ClassVar[bool] = True  # beside keys and values, whose pools share memory by layers

    @property
    def dims(self) -> dict[str, Any]:
        """Experts of a token."""
        return dict(routes=self.num_routes)


@dataclass(frozen=True)
class RecordedConfig(WrappedConfig):
    """The config of a mixture, and of the caches that have its routes."""

    @functools.cached_property
    def routes_kind(self) -> RoutesKind:
        """The cache kind of each layer's routes."""
        return RoutesKind(num_routes=self.plain.router.num_experts_per_tok)

    @functools.cached_property
    def cache_kinds(self) -> tuple[CacheKind, ...]:
        """The cache kinds of the layers, and then that of the routes of each."""
        return (*self.plain.cache_kinds, *(self.routes_kind,) * self.plain.num_hidden_layers)


def with_recorded_routes(model: Model, config: ModelConfig) -> tuple[Model, ModelConfig]:
    """Returns a mixture that keeps its routes.

    Raises:
      ValueError: the model has no experts.
    """
    if "experts" not in config.dims:
        raise ValueError(
            f"enable_return_routed_experts=True wants a mixture of experts, {config.architecture} "
            "is none: leave it out"
        )
    recorded = model._replace(embed=embed, layers=_layers, logits=logits, sources=_sources)
    return recorded, cast(ModelConfig, RecordedConfig(model, config))


def routes_group(config: Any) -> int | None:
    """Returns the cache group of routes; None where they are not kept."""
    kind = getattr(config, "routes_kind", None)
    return None if kind is None else distinct(config.cache_kinds).index(kind)


def _sources(config: RecordedConfig) -> Any:
    return config.family.sources(config.plain)


def _layers(
    config: RecordedConfig, params: Any, x: Array, kv: tuple[Any, ...], inputs: Inputs, ops: Ops,
    *, first: int = 0, last: int | None = None, extras: tuple[str, ...] = (), **which: Any,
) -> tuple[Array, tuple[Any, ...], dict[str, Array]]:  # fmt: skip
    """Runs layers, and writes down the experts of each token."""
    num = config.num_hidden_layers
    end = num if last is None else last
    own, kept = kv[: first - end], [cache.experts for cache in kv[first - end :]]
    batch, group = ops.batch, routes_group(config)
    assert batch is not None and group is not None, "a trainer keeps no routes"
    index, (_, S, k) = batch.cache_index[group], kept[0].shape
    at = index // S, index % S
    if not batch.query_len:  # steps of a token each replay none
        none = jnp.full((x.shape[0], k), NONE, jnp.int32)
        given = [one.at[at].get(mode="fill", fill_value=NONE).astype(jnp.int32) for one in kept]
        every = [*[none] * first, *given, *[none] * (num - end)]
        routes = jnp.stack([jnp.where(one <= GIVEN, GIVEN - one, NONE) for one in every], 1)
        params = with_routes(params, routes)
        ops = replace(ops, route=functools.partial(_replay, ops))
    names = [f"routed_experts.{i}" if config.sparse[i] else "" for i in range(first, end)]
    wanted = tuple(dict.fromkeys((*extras, *filter(None, names))))
    run, which = config.family.layers, which | dict(first=first, last=end, extras=wanted)
    hidden, own, found = run(config.plain, params, x, own, inputs, ops, **which)
    written = (
        one.at[at].set(found[name].astype(jnp.int16) if name else NONE, mode="drop")
        for one, name in zip(kept, names, strict=True)
    )
    return hidden, (*own, *map(RoutesCache, written)), {name: found[name] for name in extras}


def _replay(ops: Ops, config: RouterConfig, w: Router, logits: Array) -> Routes:
    """Chooses experts, but where the router has given ones: these count what its scores say."""
    given = w.replayed
    assert given is not None
    routes = ops.route(config, replace(w, replayed=None), logits)
    again = weigh(config, scored(config, logits), jnp.maximum(given, 0))
    return Routes(*(jnp.where(given >= 0, a, b) for a, b in zip(again, routes, strict=True)))
