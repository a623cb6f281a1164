"""Experts chosen by sigmoids, biases and groups, in a kernel: the same as plain JAX chooses."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrunner.kernels_pallas.lanes import LANES
from jaxrunner.kernels_pallas.mixtures import router, router_scores
from jaxrunner.kernels_pallas.mixtures.router_scores import How
from jaxrunner.mixtures.experts import Routes
from jaxrunner.ops.grouped_experts import BY_SCORES
from jaxrunner.ops.routing import Router, RouterConfig, choose
from tests.support.lowering import cuda, lowers

X = 160  # more than a warpgroup has threads
KINDS = {
    "DeepSeek-V3": RouterConfig(X, 8, "sigmoid", True, 8, 4, 2, 2.5),
    "GLM-4.5": RouterConfig(X, 8, "sigmoid", True),
    "DeepSeek-V2": RouterConfig(X, 6, "softmax", False, 8, 3, 1, 16.0),
    "Llama 4": RouterConfig(X, 1, "sigmoid"),
    "gpt-oss": RouterConfig(X, 4, "softmax_of_chosen"),
    "a group of one": RouterConfig(X, 4, "sigmoid", True, X, 9, 2),
}


def router_of(bias: bool, **more: Any) -> Router:
    """Returns a router with a bias for the choice, or with none."""
    choice = jax.random.normal(jax.random.key(1), (X,), jnp.float32) * 0.2 if bias else None
    return Router(
        **dict[str, Any](weight=None, bias=None, choice_bias=choice, replayed=None) | more
    )


def logits_of(tokens: int, equal: bool) -> jax.Array:
    logits = jax.random.normal(jax.random.key(2), (tokens, X), jnp.float32) * 2
    return jnp.round(logits) if equal else logits


def check(got: Any, want: Any) -> None:
    np.testing.assert_array_equal(got[0], want.experts)
    np.testing.assert_allclose(got[1], want.weights, rtol=2e-6)


def chosen(logits: jax.Array, bias: jax.Array | None, how: How) -> tuple[Any, Any]:
    """Does what the kernel does for a token, but for what threads tell each other."""
    ids = list(jnp.arange(2 * LANES, dtype=jnp.int32).reshape(2, LANES))

    def parts(values: jax.Array) -> list[jax.Array]:
        return list(jnp.pad(values, (0, 2 * LANES - X), constant_values=-np.inf).reshape(2, -1))

    scores = router_scores.scored(parts(logits), how.scoring)
    ranked = scores if bias is None else [a + b for a, b in zip(scores, parts(bias), strict=True)]
    ranked = [jnp.where(id < X, x, -jnp.inf) for id, x in zip(ids, ranked, strict=True)]
    if how.groups > 1:
        ranked = router_scores.of_best_groups(jnp.concatenate(ranked), ranked, ids, X, how)
    ranks = router.ranks(jnp.concatenate(ranked), ranked, ids, X)
    counts = router_scores.weighed(scores, [rank < how.top_k for rank in ranks], how)
    rank, weights = np.concatenate(ranks), np.concatenate(counts)
    order = np.argsort(rank, kind="stable")[: how.top_k]
    assert rank[order].tolist() == list(range(how.top_k))  # each place is taken once
    return order, weights[order]


@pytest.mark.parametrize("equal", [False, True], ids=["", "equal scores"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_arithmetic_of_the_kernel_is_that_of_plain_jax(kind: str, equal: bool):
    config, logits = KINDS[kind], logits_of(3, equal)
    bias = router_of(config.scoring == "sigmoid" and not equal).choice_bias
    how = _how(config)
    run = [chosen(row, bias, how) for row in logits]
    check([np.stack(part) for part in zip(*run, strict=True)], choose(config, logits, bias))


def _how(config: RouterConfig) -> How:
    return How(
        config.num_experts_per_tok, config.scoring, config.norm_topk_prob, config.n_group,
        config.topk_group, config.ranking_experts, config.routed_scaling_factor,
    )  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("equal", [False, True], ids=["", "equal scores"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_kernel_chooses_as_plain_jax_does(kind: str, equal: bool):
    config, logits, real = KINDS[kind], logits_of(99, equal), jnp.arange(99) != 5
    w = router_of(config.scoring == "sigmoid" and not equal)
    assert BY_SCORES.refuses(config, w, logits, real) is None
    got, want = BY_SCORES.run(config, w, logits, real), choose(config, logits, w.choice_bias)
    mine = np.asarray(real)
    check([part[mine] for part in got], Routes(*(part[mine] for part in want)))
    assert (np.asarray(got.experts[5]) == X).all() and not np.asarray(got.weights[5]).any()


@lowers
@pytest.mark.parametrize("kind", ["DeepSeek-V3", "DeepSeek-V2"])
def test_the_kernel_lowers(kind: str):
    config, w = KINDS[kind], router_of(kind == "DeepSeek-V3")
    logits, real = logits_of(2, False), jnp.ones(2, bool)
    with cuda():
        run = jax.jit(lambda logits, real: BY_SCORES.run(config, w, logits, real))
        text = run.trace(logits, real).lower(lowering_platforms=("cuda",)).as_text()
    assert "mosaic_gpu" in text


@lowers
def test_other_routers_are_refused_in_words():
    logits, real = logits_of(2, False), jnp.ones(2, bool)
    w = router_of(False)
    others: list[tuple[RouterConfig, Router, str]] = [
        (KINDS["GLM-4.5"], router_of(False, replayed=jnp.ones((2, 8))), "does not replay"),
        (RouterConfig(X, 4, "relu"), w, "wants scoring by one of"),
        (RouterConfig(X, 4, n_group=7), w, "wants 7 equal groups, got 160 experts"),
        (RouterConfig(X, 99, "sigmoid"), w, "wants 1 to 16 experts a token, got 99"),
    ]
    for config, other, words in others:
        assert words in str(BY_SCORES.refuses(config, other, logits, real))
    with pytest.raises(ValueError, match="route wants 7 equal groups, got 160 experts"):
        router_scores.route(logits, real, None, How(4, "sigmoid", True, 7))
