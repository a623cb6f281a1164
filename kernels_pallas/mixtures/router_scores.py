"""The choice of experts by more than their logits, on Hopper (Mosaic GPU), as DeepSeek and GLM do.

By sigmoids or a softmax, with a bias that counts for the choice alone, among the best groups of
experts. A block of the grid serves one token, as in `router`. arXiv:2412.19437, 2408.15664.
"""

import functools
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from jaxrunner.kernels_pallas import lanes, pdl
from jaxrunner.kernels_pallas.lanes import LANES
from jaxrunner.kernels_pallas.mixtures import router
from jaxrunner.kernels_pallas.mosaic import Ref, Shaped
from jaxrunner.types import Array

SCORINGS = "softmax", "sigmoid", "softmax_of_chosen"
LEAST_SUM = 1e-20  # of the scores of the chosen, which may all be zero: DeepSeek-V3's


class How(NamedTuple):
    """How experts are chosen and what each counts, as `RouterConfig` says it."""

    top_k: int
    scoring: str  # in SCORINGS
    renormalise: bool
    groups: int = 1
    best_groups: int = 1
    ranking: int = 2  # best scores of a group whose sum ranks it
    scale: float = 1.0


def refuses(logits: Shaped, how: How) -> str | None:
    """Says why logits, [T, X], are not served; None if they are."""
    if how.scoring not in SCORINGS:
        return f"wants scoring by one of {SCORINGS}, got {how.scoring}"
    if logits.shape[1] % how.groups:
        return f"wants {how.groups} equal groups, got {logits.shape[1]} experts"
    return router.refuses(logits, how.top_k)


def route(logits: Array, is_real: Array, bias: Array | None, how: How) -> tuple[Array, Array]:
    """Returns each token's experts, best first, and what each counts: [T, k], int32 and float32.

    logits: [T, X], float32; is_real: [T], the others' experts are X and count 0; bias: [X],
    float32, added to the scores that experts are chosen by. Of equal ones the lower is taken.

    Raises:
      ValueError: what `refuses` says.
    """
    if why := refuses(logits, how):
        raise ValueError(f"route {why}")
    (T, X), k = logits.shape, how.top_k
    out = tuple(jax.ShapeDtypeStruct((T * k,), dtype) for dtype in (jnp.int32, jnp.float32))
    more = () if bias is None else (bias.astype(jnp.float32),)
    body = functools.partial(_route, X, how)
    scratch = (plgpu.SMEM((-(-X // LANES) * LANES,), jnp.float32),)
    kernel = lanes.kernel(body, out, (T,), scratch)
    experts, weights = kernel(logits.reshape(-1), is_real.astype(jnp.int32), *more)
    return experts.reshape(T, k), weights.reshape(T, k)


def _route(X: int, how: How, token: Array, logits_ref: Ref, real_ref: Ref, *refs: Any) -> None:
    pdl.begin()
    *bias_ref, experts_ref, weights_ref, all_smem = refs
    k, ids = how.top_k, [lanes.lane() + i * LANES for i in range(-(-X // LANES))]
    scores = scored([router.read(logits_ref, token, id, X) for id in ids], how.scoring)
    ranked = scores
    if bias_ref:
        biases = [lanes.gather(bias_ref[0], jnp.minimum(id, X - 1)) for id in ids]
        ranked = [score + bias for score, bias in zip(scores, biases, strict=True)]
    ranked = [jnp.where(id < X, x, -jnp.inf) for id, x in zip(ids, ranked, strict=True)]

    def tell(values: list[Array]) -> None:
        for i, x in enumerate(values):
            all_smem[pl.ds(i * LANES, LANES)] = x

    tell(ranked)
    if how.groups > 1:
        ranked = of_best_groups(all_smem, ranked, ids, X, how)
        tell(ranked)
    ranks = router.ranks(all_smem, ranked, ids, X)
    keep = [rank < k for rank in ranks]
    counted = weighed(scores, keep, how)
    real = real_ref[token] > 0
    weights = [jnp.where(real, w, 0.0) for w in counted]
    experts = [jnp.where(real, id, X) for id in ids]
    at = [token * k + jnp.minimum(rank, k - 1) for rank in ranks]
    lanes.scatter(at, keep, (experts_ref, experts), (weights_ref, weights))


def scored(logits: list[Array], scoring: str) -> list[Array]:
    """Returns the scores of logits, [128] at a time; -inf is of no expert."""
    if scoring == "sigmoid":
        return [1 / (1 + jnp.exp(-x)) for x in logits]
    if scoring == "softmax_of_chosen":
        return logits
    best = jnp.max(functools.reduce(jnp.maximum, logits))
    mass = [jnp.exp(x - best) for x in logits]
    total = jnp.sum(functools.reduce(jnp.add, mass))
    return [m / total for m in mass]


def of_best_groups(
    every: Ref | Array, ranked: list[Array], ids: list[Array], X: int, how: How
) -> list[Array]:
    """Returns scores, -inf outside of the best groups, by the sum of their best scores.

    every: [X], the scores of all experts, of which ranked, [128] at a time, are those of `ids`.
    """
    size, totals = X // how.groups, []
    for group in range(how.groups):
        best: list[Any] = [-jnp.inf] * min(how.ranking, size)
        for other in range(group * size, (group + 1) * size):
            x = every[other]
            for i, least in enumerate(best):
                best[i], x = jnp.maximum(least, x), jnp.minimum(least, x)
        totals.append(sum(best[1:], best[0]))
    found = []
    for x, id in zip(ranked, ids, strict=True):
        mine, own = lax.div(id, jnp.full_like(id, size)), x
        for group, total in enumerate(totals):
            own = jnp.where(mine == group, total, own)
        rank = jnp.zeros_like(id)
        for group, total in enumerate(totals):
            rank += lanes.ones((total > own) | ((total == own) & (group < mine)))
        found.append(jnp.where(rank < how.best_groups, x, -jnp.inf))
    return found


def weighed(scores: list[Array], keep: list[Array], how: How) -> list[Array]:
    """Returns what experts count whose scores are given, where they are kept."""
    if how.scoring == "softmax_of_chosen":
        best = jnp.max(functools.reduce(jnp.maximum, scores))
        scores = [jnp.exp(x - best) for x in scores]
    if how.scoring == "softmax_of_chosen" or how.renormalise:
        kept = [jnp.where(own, x, 0.0) for own, x in zip(keep, scores, strict=True)]
        total = jnp.sum(functools.reduce(jnp.add, kept)) + LEAST_SUM
        scores = [x / total for x in scores]
    return [x * how.scale for x in scores]
