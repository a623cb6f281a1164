"""A mixture whose routes are kept, as a model that the rest knows no difference of.

The experts of each token lie in blocks like its keys and values, one more cache behind those of the
layers: what shares a prefix, is computed in chunks or again has the routes of its tokens. Routes
that are given lie there too, before the step that computes their tokens replays them.
"""

from dataclasses import dataclass, field, replace
import functools
from typing import Any, ClassVar, cast

import jax.numpy as jnp

from jaxrunner.caches.cache_group import CacheKind, distinct
from jaxrunner.caches.full import FullAttention
from jaxrunner.config import ModelConfig
from jaxrunner.experts import Routes
from jaxrunner.model import Model, Ops
from jaxrunner.ops.routing import Router, RouterConfig, scored, weigh, with_routes
from jaxrunner.pytree import leaf, pytree
from jaxrunner.types import Array, Inputs

NONE = -1  # expert of a layer without experts, and of a token whose routes are not given
GIVEN = -2  # a given expert e is kept as GIVEN - e


@pytree
class RoutesCache:
    """The experts of each token in all layers."""

    experts: Array = leaf("N S layers routes", jnp.int16)


@dataclass(frozen=True, kw_only=True)
class RoutesKind(FullAttention):
    """Routes of all tokens; none is given back before a request ends."""

    num_layers: int
    num_routes: int
    leaves: ClassVar[type] = RoutesCache

    @property
    def dims(self) -> dict[str, Any]:
        """Layers, and experts of a token in each."""
        return dict(layers=self.num_layers, routes=self.num_routes)


@dataclass(frozen=True)
class RecordedConfig:
    """The config of a mixture, and of the cache that has its routes."""

    family: Model = field(repr=False)
    plain: Any  # its own config

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "plain":  # asked while it is unpickled
            raise AttributeError(name)
        return getattr(self.plain, name)

    @functools.cached_property
    def routes_kind(self) -> RoutesKind:
        """What is kept of each token's routes."""
        layers, chosen = self.plain.num_hidden_layers, self.plain.router.num_experts_per_tok
        return RoutesKind(num_layers=layers, num_routes=chosen)

    @functools.cached_property
    def cache_kinds(self) -> tuple[CacheKind, ...]:
        """What the layers keep, and the routes."""
        return (*self.plain.cache_kinds, self.routes_kind)


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
    recorded = model._replace(embed=_embed, layers=_layers, logits=_logits, sources=_sources)
    return recorded, cast(ModelConfig, RecordedConfig(model, config))


def routes_place(config: Any) -> tuple[int, int] | None:
    """Returns which cache has the routes, and its group; None where they are not kept."""
    if (kind := getattr(config, "routes_kind", None)) is None:
        return None
    return config.cache_kinds.index(kind), distinct(config.cache_kinds).index(kind)


def _embed(config: RecordedConfig, params: Any, inputs: Inputs) -> Array:
    return config.family.embed(config.plain, params, inputs)


def _logits(config: RecordedConfig, params: Any, hidden: Array) -> Array:
    return config.family.logits(config.plain, params, hidden)


def _sources(config: RecordedConfig) -> Any:
    return config.family.sources(config.plain)


def _layers(
    config: RecordedConfig, params: Any, x: Array, kv: tuple[Any, ...], inputs: Inputs, ops: Ops,
    *, extras: tuple[str, ...] = (), **which: Any,
) -> tuple[Array, tuple[Any, ...], dict[str, Array]]:  # fmt: skip
    """Runs all layers, and writes down the experts of each token."""
    cache = kv[-1]
    batch, place = ops.batch, routes_place(config)
    assert batch is not None and place is not None, "a trainer keeps no routes"
    index, (N, S, Y, k) = batch.cache_index[place[1]], cache.experts.shape
    kept = cache.experts.reshape(N * S, Y, k)
    if not batch.query_len:  # steps of a token each replay none
        given = kept.at[index].get(mode="fill", fill_value=NONE).astype(jnp.int32)
        params = with_routes(params, jnp.where(given <= GIVEN, GIVEN - given, NONE))
        ops = replace(ops, route=functools.partial(_replay, ops))
    names = [f"routed_experts.{i}" if sparse else "" for i, sparse in enumerate(config.sparse)]
    wanted = tuple(dict.fromkeys((*extras, *filter(None, names))))
    run, which = config.family.layers, which | dict(extras=wanted)
    hidden, own, found = run(config.plain, params, x, kv[:-1], inputs, ops, **which)
    none = jnp.full((x.shape[0], k), NONE, jnp.int32)
    routes = jnp.stack([found.get(name, none) for name in names], 1)
    kept = kept.at[index].set(routes.astype(jnp.int16), mode="drop")
    own = *own, RoutesCache(kept.reshape(N, S, Y, k))
    return hidden, own, {name: found[name] for name in extras}


def _replay(ops: Ops, config: RouterConfig, w: Router, logits: Array) -> Routes:
    """Chooses experts, but where the router has given ones: these count what its scores say."""
    given = w.replayed
    assert given is not None
    routes = ops.route(config, replace(w, replayed=None), logits)
    again = weigh(config, scored(config, logits), jnp.maximum(given, 0))
    return Routes(*(jnp.where(given >= 0, a, b) for a, b in zip(again, routes, strict=True)))
