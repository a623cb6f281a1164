"""What the experts of a mixture run through, by their weights and the tokens of a step."""

import jax.numpy as jnp

from jaxrunner.experts import ExpertWeights, Routes
from jaxrunner.operation import Note, Operation, run_first
from jaxrunner.types import Array, Batch


def experts(
    batch: Batch, x: Array, routes: Routes, w: ExpertWeights, *, note: Note, plain: bool = False
) -> Array:
    """Runs x, [T, E], through its experts. Returns what `products.project` does.

    plain: whether plain JAX alone is asked.
    """
    known = () if plain else (*w.kernels, *GROUPED)
    return run_first("experts", (*known, PLAIN), x, skip_padding(batch, routes, w), w, note=note)


def trained(x: Array, routes: Routes, w: ExpertWeights, *, note: Note) -> Array:
    """Runs x, [T, E], all of it real tokens, through its experts, with a gradient."""
    return run_first("experts", (TRAINED,), x, routes, w, note=note)


def skip_padding(batch: Batch, routes: Routes, w: ExpertWeights) -> Routes:
    """Returns routes by which a bucket's padding is no expert's."""
    real = (batch.row < batch.seq_lens.shape[0])[:, None]
    none = jnp.int32(w.num_experts)
    return Routes(jnp.where(real, routes.experts, none), jnp.where(real, routes.weights, 0.0))


def _product(x: Array, routes: Routes, w: ExpertWeights) -> Array:
    return w.product(x, routes)


def _differentiable(x: Array, routes: Routes, w: ExpertWeights) -> Array:
    return w.differentiable(x, routes)


# (x [T, E], routes, w) -> the weighted sum of a token's experts, as a residual.
GROUPED: tuple[Operation, ...] = ()
PLAIN = Operation("plain JAX", _product)
TRAINED = Operation("plain JAX", _differentiable)
