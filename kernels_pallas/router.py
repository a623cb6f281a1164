"""The choice of experts for each token, on Hopper (Mosaic GPU): its best logits and their weights.

A block of the grid serves one token; a thread has one expert in 128. Fedus et al.,
arXiv:2101.03961.
"""

import functools

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from jaxrunner.kernels_pallas import lanes, pdl
from jaxrunner.kernels_pallas.lanes import LANES
from jaxrunner.kernels_pallas.mosaic import TOO_OLD, Ref, Shaped
from jaxrunner.types import Array

MAX_EXPERTS = 4 * LANES
MAX_CHOSEN = 16
LEAST = -3.0e38  # the value of a logit that is less or NaN: chosen last, and once


def refuses(logits: Shaped, top_k: int) -> str | None:
    """Says why logits, [T, X], are not served; None if they are."""
    _, X = logits.shape
    if TOO_OLD is not None:
        return TOO_OLD
    if logits.dtype != jnp.float32:
        return f"wants logits in float32, got {logits.dtype}"
    if not 1 <= top_k <= min(X, MAX_CHOSEN):
        return f"wants 1 to {min(X, MAX_CHOSEN)} experts a token, got {top_k}"
    if X > MAX_EXPERTS:
        return f"wants at most {MAX_EXPERTS} experts, got {X}"
    return None


def route(
    logits: Array, is_real: Array, *, top_k: int, renormalise: bool, scale: float = 1.0
) -> tuple[Array, Array]:
    """Returns each token's experts, best first, and what each counts: [T, k], int32 and float32.

    logits: [T, X], float32; equal ones go to the lower expert. is_real: [T]; the others' experts
    are X and count 0. What counts is the softmax over all experts, or, with `renormalise`, over the
    chosen ones; times `scale`.

    Raises:
      ValueError: what `refuses` says.
    """
    if why := refuses(logits, top_k):
        raise ValueError(f"route {why}")
    T, X = logits.shape
    out = tuple(jax.ShapeDtypeStruct((T * top_k,), dtype) for dtype in (jnp.int32, jnp.float32))
    body = functools.partial(_route, X, top_k, renormalise, scale)
    scratch = (plgpu.SMEM((-(-X // LANES) * LANES,), jnp.float32),)
    kernel = lanes.kernel(body, out, (T,), scratch)
    experts, weights = kernel(logits.reshape(-1), is_real.astype(jnp.int32))
    return experts.reshape(T, top_k), weights.reshape(T, top_k)


def _route(
    X: int, k: int, renormalise: bool, scale: float, token: Array, logits_ref: Ref, real_ref: Ref,
    experts_ref: Ref, weights_ref: Ref, all_smem: Ref,
) -> None:  # fmt: skip
    pdl.begin()
    ids = [lanes.lane() + i * LANES for i in range(-(-X // LANES))]
    logits = [read(logits_ref, token, id, X) for id in ids]
    best = jnp.max(functools.reduce(jnp.maximum, logits))
    for i, x in enumerate(logits):
        all_smem[pl.ds(i * LANES, LANES)] = x
    places = ranks(all_smem, logits, ids, X)
    mass = [jnp.exp(x - best) for x in logits]
    keep = [rank < k for rank in places]
    counted = [jnp.where(kept, m, 0.0) for kept, m in zip(keep, mass, strict=True)]
    total = jnp.sum(functools.reduce(jnp.add, counted if renormalise else mass))
    real = real_ref[token] > 0
    weights = [jnp.where(real, m / total * scale, 0.0) for m in mass]
    experts = [jnp.where(real, id, X) for id in ids]
    at = [token * k + jnp.minimum(rank, k - 1) for rank in places]
    lanes.scatter(at, keep, (experts_ref, experts), (weights_ref, weights))


def read(logits_ref: Ref, token: Array, id: Array, X: int) -> Array:
    """Reads a token's logits of some experts, -inf for those that are none."""
    x = lanes.gather(logits_ref, token * X + jnp.minimum(id, X - 1))
    return jnp.where(id < X, jnp.where(x > LEAST, x, LEAST), -jnp.inf)


def ranks(every: Ref | Array, values: list[Array], ids: list[Array], X: int) -> list[Array]:
    """Returns the place of each expert among all, which is how many are ahead of it.

    every: [X], the values of all, of which `values`, [128] at a time, are those of `ids`.
    """
    found = [jnp.zeros_like(id) for id in ids]
    for other in range(X):
        y = every[other]
        ahead = [(y > x) | ((y == x) & (other < id)) for id, x in zip(ids, values, strict=True)]
        found = [rank + lanes.ones(a) for rank, a in zip(found, ahead, strict=True)]
    return found
