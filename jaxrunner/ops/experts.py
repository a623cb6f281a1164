"""Chooses implementations of a mixture's experts, by their weights and the tokens of a step."""

import jax.numpy as jnp

from jaxrunner.mixtures.experts import ExpertWeights, Routes
from jaxrunner.operation import Note, Operation, run_first
from jaxrunner.ops import routing
from jaxrunner.ops.grouped_experts import GROUPED, ROUTE
from jaxrunner.ops.routing import Router, RouterConfig
from jaxrunner.types import Array, Batch


def route(
    batch: Batch, config: RouterConfig, w: Router, logits: Array, *, note: Note, plain: bool = False
) -> Routes:
    """Chooses experts by a router's logits, [T, X]; padding tokens get none.

    plain: whether plain JAX alone is asked.
    """
    real = batch.row < batch.seq_lens.shape[0]
    args = config, w, logits, real
    return run_first("route", (*(() if plain else ROUTE), PLAIN_ROUTE), *args, note=note)


def experts(
    x: Array, routes: Routes, w: ExpertWeights, *, note: Note, plain: bool = False
) -> Array:
    """Runs x, [T, E], through its experts. Returns what `products.project` does.

    plain: whether plain JAX alone is asked.
    """
    known = () if plain else (*w.kernels, *GROUPED)
    return run_first("experts", (*known, PLAIN), x, routes, w, note=note)


def trained(x: Array, routes: Routes, w: ExpertWeights, *, note: Note) -> Array:
    """Runs x, [T, E], all of it real tokens, through its experts, with a gradient."""
    return run_first("experts", (TRAINED,), x, routes, w, note=note)


def _choose(config: RouterConfig, w: Router, logits: Array, real: Array) -> Routes:
    routes, none = routing.route(config, w, logits), jnp.int32(logits.shape[1])
    experts = jnp.where(real[:, None], routes.experts, none)
    return Routes(experts, jnp.where(real[:, None], routes.weights, 0.0))


def _product(x: Array, routes: Routes, w: ExpertWeights) -> Array:
    return w.product(x, routes)


def _differentiable(x: Array, routes: Routes, w: ExpertWeights) -> Array:
    return w.differentiable(x, routes)


PLAIN_ROUTE = Operation("plain JAX", _choose)
# (x [T, E], routes, w) -> the weighted sum of a token's experts, as a residual.
PLAIN = Operation("plain JAX", _product)
TRAINED = Operation("plain JAX", _differentiable)
