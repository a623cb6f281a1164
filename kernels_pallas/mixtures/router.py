"""The choice of experts for each token, on Hopper (Mosaic GPU): its best logits and their weights.

A warp serves one token: a thread has one expert in 32, and the best one that is left is found as
often as there are to be chosen. Fedus et al., arXiv:2101.03961.
"""

import functools

import jax
import jax.numpy as jnp

from jaxrunner.kernels_pallas import lanes, pdl, warps
from jaxrunner.kernels_pallas.lanes import LANES
from jaxrunner.kernels_pallas.mosaic import TOO_OLD, Ref, Shaped
from jaxrunner.types import Array

MAX_EXPERTS = 4 * LANES
MAX_CHOSEN = 16
WARPS = LANES // warps.SIZE  # tokens of a block
TAKEN = -(2**31)  # below the order of every number
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
    body = functools.partial(_route, T, X, top_k, renormalise, scale)
    kernel = lanes.kernel(body, out, (-(-T // WARPS),))
    experts, weights = kernel(logits.reshape(-1), is_real.astype(jnp.int32))
    return experts.reshape(T, top_k), weights.reshape(T, top_k)


def _route(
    T: int, X: int, k: int, renormalise: bool, scale: float, block: Array, logits_ref: Ref,
    real_ref: Ref, experts_ref: Ref, weights_ref: Ref,
) -> None:  # fmt: skip
    pdl.begin()
    lane, mine = lanes.lane() & (warps.SIZE - 1), block * WARPS + (lanes.lane() >> 5)
    token = jnp.minimum(mine, T - 1)
    ids = [lane + i * warps.SIZE for i in range(-(-X // warps.SIZE))]
    # Zeros of both signs are equal.
    logits = [read(logits_ref, token, id, X) + 0.0 for id in ids]
    keys = [lanes.order(x) for x in logits]
    best = warps.largest(functools.reduce(jnp.maximum, keys))
    expert, chosen = jnp.full_like(lane, X), best
    for j in range(k):
        highest = warps.largest(functools.reduce(jnp.maximum, keys))
        found = [jnp.where(key == highest, id, X) for key, id in zip(keys, ids, strict=True)]
        first = warps.least(functools.reduce(jnp.minimum, found))
        expert, chosen = (
            jnp.where(lane == j, new, old) for new, old in ((first, expert), (highest, chosen))
        )
        # The array first: a literal's sign is lost there, and with it that of the result.
        keys = [jnp.where(id != first, key, TAKEN) for key, id in zip(keys, ids, strict=True)]
    top = lanes.unorder(best)
    mass = jnp.where(lane < k, jnp.exp(lanes.unorder(chosen) - top), 0.0)
    counted = mass if renormalise else functools.reduce(jnp.add, [jnp.exp(x - top) for x in logits])
    real = lanes.gather(real_ref, token) > 0
    weight = jnp.where(real, mass / warps.total(counted) * scale, 0.0)
    expert, keep = jnp.where(real, expert, X), (lane < k) & (mine < T)
    pairs = (experts_ref, [expert]), (weights_ref, [weight])
    lanes.scatter([token * k + jnp.minimum(lane, k - 1)], [keep], *pairs)


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
