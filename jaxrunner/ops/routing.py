"""Routers choose the experts of each token; they compute in float32 whatever the model's dtype."""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from jaxrunner.linear import precision_of
from jaxrunner.mixtures.experts import Routes
from jaxrunner.pytree import leaf, pytree
from jaxrunner.types import Array


@dataclass(frozen=True)
class RouterConfig:
    """How experts are chosen and what each counts, in Hugging Face's names."""

    num_experts: int
    num_experts_per_tok: int
    # "softmax" over all experts, "sigmoid" of each alone, "softmax_of_chosen" over those chosen.
    scoring: str = "softmax"
    norm_topk_prob: bool = False  # whether the weights of a token's experts are made to sum to one
    # Of `n_group` groups of neighbours, experts of the best `topk_group` may be chosen.
    n_group: int = 1
    topk_group: int = 1
    ranking_experts: int = 2  # of a group: the sum of so many best scores ranks it
    routed_scaling_factor: float = 1.0


@pytree
class Router:
    """Weights of a router."""

    weight: Array = leaf("X E", "param")
    bias: Array | None = leaf("X", "param", when="bias")
    # Added to the scores that experts are chosen by, and not to what they count. DeepSeek-V3's
    # balance without a loss, arXiv:2408.15664.
    choice_bias: Array | None = leaf("X", jnp.float32, when="choice_bias")
    # Experts that were chosen before, which are taken again whatever the scores are.
    replayed: Array | None = leaf("T k", when="replayed")


def route(config: RouterConfig, w: Router, logits: Array) -> Routes:
    """Returns the routes of logits, [T, X]: chosen, or those that the router is to replay."""
    if w.replayed is None:
        return choose(config, logits, w.choice_bias)
    return weigh(config, scored(config, logits), w.replayed)


def with_routes(params: Any, routed_experts: Array) -> Any:
    """Returns a mixture's weights whose routers replay routes, [T, Y, k], of as many tokens.

    A trainer that computes the routes of a rollout has its probabilities, too: what each expert
    counts follows from the trainer's own scores. Layers without experts ignore theirs.
    """

    def one(i: int, layer: Any) -> Any:
        router = getattr(layer, "router", None)  # classes of layers without experts may have none
        if router is None:
            return layer
        experts = routed_experts[:, i].astype(jnp.int32)
        return replace(layer, router=replace(router, replayed=experts))

    return replace(params, layers=tuple(one(i, layer) for i, layer in enumerate(params.layers)))


def scores_of(w: Router, x: Array) -> Array:
    """Returns the router's logits of x, [T, E]: [T, X], float32."""
    # Products of two numbers of 16 bits are exact in float32.
    logits = jax.lax.dot_general(
        x, w.weight, (((1,), (1,)), ((), ())), precision=precision_of(x),
        preferred_element_type=jnp.float32,
    )  # fmt: skip
    return logits if w.bias is None else logits + w.bias.astype(jnp.float32)[None]


def choose(config: RouterConfig, logits: Array, choice_bias: Array | None = None) -> Routes:
    """Chooses the experts of logits, [T, X]; of equal scores the lower expert's is taken."""
    scores = scored(config, logits)
    ranked = scores if choice_bias is None else scores + choice_bias[None]
    if config.n_group > 1:
        ranked = _of_best_groups(config, ranked)
    _, experts = jax.lax.top_k(ranked, config.num_experts_per_tok)
    return weigh(config, scores, experts.astype(jnp.int32))


def scored(config: RouterConfig, logits: Array) -> Array:
    """Returns the scores that experts are chosen by, [T, X], but for a bias."""
    if config.scoring == "softmax":
        return jax.nn.softmax(logits, -1)
    return jax.nn.sigmoid(logits) if config.scoring == "sigmoid" else logits


def weigh(config: RouterConfig, scores: Array, experts: Array) -> Routes:
    """Returns the routes to experts, [T, k], by what their scores make them count."""
    weights = jnp.take_along_axis(scores, experts, 1)
    if config.scoring == "softmax_of_chosen":
        weights = jax.nn.softmax(weights, -1)
    if config.norm_topk_prob:
        # Sigmoids may all be zero: the small number is DeepSeek-V3's, and lost in any other sum.
        weights /= weights.sum(-1, keepdims=True) + 1e-20
    return Routes(experts, weights * config.routed_scaling_factor)


def _of_best_groups(config: RouterConfig, ranked: Array) -> Array:
    """Returns scores, [T, X], -inf outside of the best groups, by the sum of their best scores."""
    T, X = ranked.shape
    groups = ranked.reshape(T, config.n_group, X // config.n_group)
    best = jax.lax.top_k(groups, min(config.ranking_experts, groups.shape[2]))[0].sum(-1)
    _, chosen = jax.lax.top_k(best, config.topk_group)
    kept = (chosen[:, :, None] == jnp.arange(config.n_group)[None, None]).any(1)
    return jnp.where(kept[:, :, None], groups, -jnp.inf).reshape(T, X)


def load_balancing_loss(logits: Array, routes: Routes) -> Array:
    """Returns the auxiliary loss of a layer's router: k where all experts get as many tokens.

    X times the sum over experts of the share of tokens that each gets, times its mean
    probability, as transformers counts it. logits: [T, X], of the tokens that count; of several
    layers they may lie one behind the other. arXiv:2101.03961.
    """
    X, probabilities = logits.shape[1], jax.nn.softmax(logits, -1)
    chosen = jax.nn.one_hot(routes.experts, X, dtype=jnp.float32)  # [T, k, X]
    return X * jnp.sum(chosen.sum(1).mean(0) * probabilities.mean(0))
