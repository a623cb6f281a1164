"""Wraps a mixture so that experts have redundant copies; its interface stays the same.

Experts are numbered as in the checkpoint; copies lie in numbered places. A token's position selects
the copy that computes it, so a request's tokens depend on no other request.
"""

from dataclasses import dataclass, replace
import functools
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from jaxrunner.config import ModelConfig
from jaxrunner.mixtures.eplb_config import EplbConfig
from jaxrunner.mixtures.experts import Experts, Routes
from jaxrunner.mixtures.placement import Placement, in_turn
from jaxrunner.mixtures.wrapped import WrappedConfig, embed, logits
from jaxrunner.model import Model, Ops, Source
from jaxrunner.pytree import host_value, leaf, pytree, static
from jaxrunner.slot_table import SlotTable
from jaxrunner.types import Array, Batch, Inputs

LOADS = "expert_loads"  # in `State.tables`


@pytree
class PlacedExperts:
    """Weights of the copies of experts, and their places, stored as differences from `in_turn`."""

    gate_up: Array = leaf("X gate_up F E", "param")
    down: Array = leaf("X E F", "param")
    gate_up_bias: Array | None = leaf("X gate_up F", "param", when="bias")
    down_bias: Array | None = leaf("X E", "param", when="bias")
    moved: Array = leaf("candidates slots")  # places of copies
    more: Array = leaf("candidates")  # copies
    activation: str = static(default="swiglu")

    @property
    def weights(self) -> Experts:
        """The copies, as experts."""
        biases = self.gate_up_bias, self.down_bias
        return Experts(self.gate_up, self.down, *biases, self.activation)

    def place(self, routes: Routes, positions: Array, num_places: int) -> Routes:
        """Returns routes to places: the copies of an expert take turns by positions, [T]."""
        (X, slots), experts = self.moved.shape, routes.experts
        first = _first(X, num_places, slots)
        known = jnp.minimum(experts, X - 1)
        copies = (self.more + jnp.asarray(first.copies[0]))[known]
        places = (self.moved + jnp.asarray(first.places[0]))[known, positions[:, None] % copies]
        return Routes(jnp.where(experts < X, places, num_places), routes.weights)


@pytree
class ExpertLoads:
    """Tokens that each expert has computed, modulo 2^32."""

    counts: Array = leaf("layers candidates")


@dataclass(frozen=True)
class BalancedConfig(WrappedConfig):
    """The config of a mixture, and how many copies its experts have."""

    eplb: EplbConfig

    @property
    def num_places(self) -> int:
        """Copies of all experts of a layer, P."""
        return self.plain.router.num_experts + self.eplb.num_redundant_experts

    @functools.cached_property
    def dims(self) -> dict[str, Any]:
        """The dims of the model, with as many experts as places."""
        dims = self.plain.dims
        kinds = dims.get("kinds", {}) | {Experts: PlacedExperts}
        slots = 1 + self.eplb.num_redundant_experts
        return dims | dict(experts=self.num_places, slots=slots, kinds=kinds)


def with_balance(model: Model, config: ModelConfig, eplb: EplbConfig) -> tuple[Model, ModelConfig]:
    """Returns a mixture whose experts have copies, and whose steps count their loads."""
    made = BalancedConfig(model, config, eplb)
    balanced = with_loads(model, config)._replace(
        embed=embed, layers=_layers, logits=logits, sources=_sources
    )
    return balanced, cast(ModelConfig, made)


def with_loads(model: Model, config: Any) -> Model:
    """Returns a mixture whose steps count the loads of its experts."""
    names = tuple(f"routed_experts.{i}" if s else "" for i, s in enumerate(config.sparse))
    table = SlotTable(
        LOADS, ExpertLoads, None, dims=(("layers", len(names)),), extras=tuple(filter(None, names)),
        observe=functools.partial(_count, names),
    )  # fmt: skip
    return model._replace(tables=(*model.tables, table))


def maps(placement: Placement, slots: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns `moved` and `more` of each layer, [layers, X, slots] and [layers, X]."""
    Y, X, most = placement.places.shape
    first = _first(X, placement.expert.shape[1], slots)
    places = np.full((Y, X, slots), -1, np.int32)
    places[:, :, : min(most, slots)] = placement.places[:, :, :slots]
    return places - first.places, placement.copies - first.copies


def placed(moved: np.ndarray, more: np.ndarray, num_places: int) -> np.ndarray:
    """Returns the expert at each place, [P], from one layer's `moved` and `more`."""
    first = _first(more.size, num_places, moved.shape[1])
    places, copies = moved + first.places[0], more + first.copies[0]
    expert = np.zeros(num_places, np.int32)
    for x, count in enumerate(copies.tolist()):
        expert[places[x, :count]] = x
    return expert


@functools.lru_cache(maxsize=8)
def _first(num_experts: int, num_places: int, slots: int) -> Placement:
    """Returns `in_turn` of one layer, with places for `slots` copies."""
    made = in_turn(1, num_experts, num_places)
    places = np.full((1, num_experts, slots), -1, np.int32)
    places[:, :, : made.places.shape[2]] = made.places
    return made._replace(places=places)


def _count(
    names: tuple[str, ...], loads: ExpertLoads, found: dict[str, Array], batch: Batch
) -> ExpertLoads:
    """Adds the tokens of a step to the loads; those of padding have no expert.

    Layers of other stages of a pipeline are not found here, and count there.
    """
    layers = np.array([i for i, name in enumerate(names) if name in found], np.int32)
    if not layers.size:
        return loads
    experts = jnp.stack([found[names[i]] for i in layers])
    at = jnp.asarray(layers)[:, None, None], experts
    return ExpertLoads(loads.counts.at[at].add(1, mode="drop"))


def _layers(
    config: BalancedConfig, params: Any, x: Array, kv: tuple[Any, ...], inputs: Inputs, ops: Ops,
    **which: Any,
) -> tuple[Array, tuple[Any, ...], dict[str, Array]]:  # fmt: skip
    def experts(x: Array, routes: Routes, w: PlacedExperts) -> Array:
        places = w.place(routes, inputs.positions, config.num_places)
        return ops.experts(x, places, w.weights)

    run, own = config.family.layers, replace(ops, experts=cast(Any, experts))
    return run(config.plain, params, x, kv, inputs, own, **which)


def _sources(config: BalancedConfig) -> Any:
    """Returns where each weight lies in a checkpoint: the first experts are read twice."""
    X, slots = config.router.num_experts, 1 + config.eplb.num_redundant_experts
    order = _first(X, config.num_places, slots).expert[0]

    def copied(source: Source | None) -> Source | None:
        if source is None:
            return None
        join, split = source.join, source.split
        undo = None if split is None else lambda packed: split(packed[:X])
        return source._replace(join=lambda arrays: join(arrays)[order], split=undo)

    def one(node: Any) -> Any:
        if not isinstance(node, Experts):
            return node
        names = "gate_up", "down", "gate_up_bias", "down_bias"
        made = {name: copied(cast(Any, getattr(node, name))) for name in names}
        shapes = dict(moved=(X, slots), more=(X,))
        made |= {name: _zeros(shape) for name, shape in shapes.items()}
        return host_value(PlacedExperts, **made, activation=node.activation)

    def is_whole(node: Any) -> bool:
        return isinstance(node, Experts | Source)

    return jax.tree.map(one, config.family.sources(config.plain), is_leaf=is_whole)


def _zeros(shape: tuple[int, ...]) -> Source:
    """Returns the source of integers that no file has."""
    return Source((), (), lambda _: np.zeros(shape, np.int32), lambda _: [])
