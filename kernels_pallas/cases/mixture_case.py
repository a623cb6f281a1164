"""Problems for the kernels of a mixture of experts, which run one behind the other."""

import functools

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from jaxrunner.kernels_pallas.cases.case import Case
from jaxrunner.kernels_pallas.mixtures import router_scores
from jaxrunner.kernels_pallas.mixtures.group_tokens import Groups, group_tokens, of_one
from jaxrunner.kernels_pallas.mixtures.grouped_mlp import TuningConfig, grouped_mlp
from jaxrunner.kernels_pallas.mixtures.router import route
from jaxrunner.kernels_pallas.mixtures.router_scores import How
from jaxrunner.types import Array


def mixtures(
    T: int, X: int, k: int, E: int, F: int, *, tile: int, consumers: int = 1, clamped: bool = False
) -> Case:
    """T tokens through k of X gated MLPs; every fifth is padding. The parts are added up.

    clamped: with gpt-oss' activation and biases.
    """
    activation = "clamped_swiglu" if clamped else "swiglu"

    def make(seed: int) -> tuple[Array, ...]:
        keys = jax.random.split(jax.random.key(seed), 4)
        shapes = (T, E), (X, 2, F, E), (X, E, F)
        x, gate_up, down = map(jax.random.normal, keys[:3], shapes)
        gate_up, down = gate_up * E**-0.5, down * F**-0.5
        logits = jax.random.normal(keys[3], (T, X), jnp.float32)
        biases = map(jax.random.normal, keys[1:3], ((X, 2, F), (X, E))) if clamped else ()
        weights = (w.astype(jnp.bfloat16) for w in (gate_up, down, *biases))
        return x.astype(jnp.bfloat16), logits, jnp.arange(T) % 5 != 4, *weights

    def run(x: Array, logits: Array, real: Array, *weights: Array) -> Array:
        experts, counts = route(logits, real, top_k=k, renormalise=True)
        routes = x, experts, counts
        groups = group_tokens(*routes, X, tile=tile) if T > 1 else of_one(*routes)
        gate_up, down, *biases = weights
        both = (biases[0], biases[1]) if biases else None
        parts = grouped_mlp(
            groups, gate_up, down, (T, k), both, activation=activation,
            config=TuningConfig(consumers=consumers),
        )  # fmt: skip
        return jnp.where(real[:, None], parts.sum(0), 0).astype(x.dtype)

    tokens = T - T // 5
    distinct = X * (1 - np.float64(1 - k / X) ** tokens)  # of experts that differ, on average
    name = f"{T} x {E} x {F}, {k} of {X}" + ", clamped" * clamped
    options = dict(k=k) | (dict(activation=activation) if clamped else {})
    return Case("grouped_mlp", name, make, run, float(6.0 * E * F * distinct), "TB/s", options)


def routes(T: int, X: int, k: int) -> Case:
    """The choice of k of X experts for T tokens, by their logits alone; every fifth is padding."""

    def make(seed: int) -> tuple[Array, ...]:
        logits = jax.random.normal(jax.random.key(seed), (T, X), jnp.float32)
        return logits, jnp.arange(T) % 5 != 4

    run = functools.partial(route, top_k=k, renormalise=True)
    return Case("route", f"{k} of {X}, {T} tokens", make, run, 4.0 * T * X, "TB/s", {})


def groups(T: int, X: int, k: int, E: int, *, tile: int) -> Case:
    """T tokens of E numbers, by k of X experts each; an expert's begin at a tile."""

    def make(seed: int) -> tuple[Array, ...]:
        keys = jax.random.split(jax.random.key(seed))
        x = jax.random.normal(keys[0], (T, E), jnp.bfloat16)
        experts = lax.top_k(jax.random.normal(keys[1], (T, X)), k)[1]
        return x, experts.astype(jnp.int32), jnp.ones((T, k), jnp.float32)

    run = functools.partial(group_tokens, num_experts=X, tile=tile)
    name = f"{T} x {E}, {k} of {X}, tiles of {tile}"
    return Case("group_tokens", name, make, run, 2.0 * T * E * (1 + k), "TB/s", {})


def choices(T: int, X: int, how: How) -> Case:
    """The choice of experts of T tokens, with a bias."""

    def make(seed: int) -> tuple[Array, ...]:
        keys = jax.random.split(jax.random.key(seed))
        logits = jax.random.normal(keys[0], (T, X), jnp.float32)
        return logits, jnp.arange(T) % 5 != 4, jax.random.normal(keys[1], (X,), jnp.float32)

    def run(logits: Array, real: Array, bias: Array) -> tuple[Array, Array]:
        return router_scores.route(logits, real, bias, how)

    name = f"{how.top_k} of {X}, {how.scoring}, {how.groups} groups, {T} tokens"
    return Case("router_scores", name, make, run, 4.0 * T * X, "TB/s", {})


def full_tiles(T: int, X: int, k: int, E: int, F: int, *, tile: int = 128) -> Case:
    """T tokens that lie by expert already, each of which has as many: the products alone."""
    tiles, config = T * k // tile, TuningConfig(consumers=2, dtype="bfloat16")

    def make(seed: int) -> tuple[Array, ...]:
        keys = jax.random.split(jax.random.key(seed), 3)
        shapes = (T * k, E), (X, 2, F, E), (X, E, F)
        made = (jax.random.normal(k, s, jnp.bfloat16) for k, s in zip(keys, shapes, strict=True))
        x, gate_up, down = made
        return x, gate_up * E**-0.5, down * F**-0.5

    def run(x: Array, gate_up: Array, down: Array) -> Array:
        own = jnp.arange(tiles, dtype=jnp.int32) * X // tiles
        rows = jnp.full((tiles,), tile, jnp.int32)
        route, weight = jnp.arange(T * k, dtype=jnp.int32), jnp.ones((T * k,), jnp.float32)
        groups = Groups(x, route, weight, own, rows, jnp.full((1,), tiles, jnp.int32))
        return grouped_mlp(groups, gate_up, down, (T, k), config=config)

    name, operations = f"{T * k} rows x {E} x {F}, {X} experts", 6.0 * T * k * E * F
    return Case("grouped_mlp", name, make, run, operations, "TFLOP/s", dict(k=k))
