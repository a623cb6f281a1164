"""The layer of a mixture: routes, rows by expert, products; against numpy in float64."""

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxrunner import pytree
from jaxrunner.hf_config import Settings
from jaxrunner.mixtures.experts import Experts, Routes
from jaxrunner.models.mixtures.mixture import MixtureConfig
from jaxrunner.models.registry import read_model
from jaxrunner.operation import unnoted
from jaxrunner.ops import grouping
from jaxrunner.ops.backends import dense
from jaxrunner.ops.experts import route
from jaxrunner.ops.routing import Router, RouterConfig, choose, load_balancing_loss, with_routes
from jaxrunner.types import Inputs

T, K, X, E, F = 23, 3, 7, 12, 10


def numbers(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def routes_of(seed=0, tokens=T, skew=0.0):
    """Returns routes to distinct experts of each token, of which the last three are padding."""
    rng = np.random.default_rng(seed)
    scores = rng.normal(size=(tokens, X)) - skew * np.arange(X)[None]
    experts = np.argsort(-scores, 1)[:, :K].astype(np.int32)
    weights = rng.uniform(0.1, 1, (tokens, K)).astype(np.float32)
    experts[-3:], weights[-3:] = X, 0
    return Routes(jnp.asarray(experts), jnp.asarray(weights))


def weights_of(activation="swiglu", bias=False):
    shapes = dict(gate_up=(X, 2, F, E), down=(X, E, F))
    shapes |= dict(gate_up_bias=(X, 2, F), down_bias=(X, E)) if bias else {}
    made = {n: jnp.asarray(numbers(*s, seed=i)) for i, (n, s) in enumerate(shapes.items())}
    biases = made.get("gate_up_bias"), made.get("down_bias")
    return Experts(made["gate_up"], made["down"], *biases, activation)


def expected(x, routes, w):
    """Returns the weighted sum of each token's experts, by loops in float64."""
    gate_up, down = (np.asarray(a, np.float64) for a in (w.gate_up, w.down))
    b1, b2 = (np.zeros((X, 1)) if a is None else a for a in (w.gate_up_bias, w.down_bias))
    out = np.zeros((len(x), E))
    for t, (experts, shares) in enumerate(zip(*map(np.asarray, routes), strict=True)):
        for e, share in zip(experts, shares, strict=True):
            if e == X:
                continue
            gate, up = gate_up[e] @ x[t] + np.asarray(b1[e], np.float64)
            if w.activation == "clamped_swiglu":
                gate, up = np.minimum(gate, 7), np.clip(up, -7, 7) + 1
            slope = 1.702 if w.activation == "clamped_swiglu" else 1
            y = down[e] @ (gate / (1 + np.exp(-slope * gate)) * up)
            out[t] += share * (y + np.asarray(b2[e], np.float64))
    return out


@pytest.mark.parametrize("skew", [0.0, 9.0], ids=["spread", "all to the first ones"])
@pytest.mark.parametrize(("activation", "bias"), [("swiglu", False), ("clamped_swiglu", True)])
def test_products_are_those_of_loops(activation, bias, skew):
    x, routes, w = 3 * numbers(T, E, seed=9), routes_of(skew=skew), weights_of(activation, bias)
    want = expected(x, routes, w)
    for product in (w.product, w.differentiable):
        got = jax.jit(product)(jnp.asarray(x), routes)
        np.testing.assert_allclose(got[:-3], want[:-3], rtol=1e-5, atol=1e-4)
    assert not want[-3:].any() and not np.asarray(w.product(jnp.asarray(x), routes))[-3:].any()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bits_depend_on_the_token_alone(dtype):
    """Whatever the others are, and whichever experts they crowd."""
    w = jax.tree.map(lambda a: a.astype(dtype), weights_of())
    product = jax.jit(w.product)
    x, routes = numbers(T, E, seed=9), routes_of()
    alone = product(jnp.asarray(x, dtype), routes)
    for seed in range(1, 4):
        others = routes_of(seed, skew=3.0 * seed)
        mine = jnp.arange(T)[:, None] == 5 + seed
        mixed = Routes(*(jnp.where(mine, a, b) for a, b in zip(routes, others, strict=True)))
        y = jnp.where(mine, jnp.asarray(x), numbers(T, E, seed=seed)).astype(dtype)
        assert jnp.array_equal(product(y, mixed)[5 + seed], alone[5 + seed])


def test_padding_is_no_experts():
    """A bucket's padding makes no tile, and so costs no product."""
    batch: Any = SimpleNamespace(row=jnp.asarray([0, 2, 1, 2]), seq_lens=jnp.ones(2))
    router, logits = (
        Router(jnp.zeros((X, E)), None, None, None),
        jnp.tile(-jnp.arange(X, dtype=jnp.float32), (4, 1)),
    )
    found = route(batch, RouterConfig(X, K), router, logits, note=unnoted, plain=True)
    assert found.experts[:, 0].tolist() == [0, X, 0, X] and not found.weights[1::2].any()
    assert int(grouping.cut_tiles(grouping.group(found.experts, X).sizes, 4 * K, 8).num) == K


@pytest.mark.parametrize("tokens", [5, T, 700], ids=["few", "some", "sorted"])
@pytest.mark.parametrize("block", [1, 4, 16])
def test_tiles_hold_each_row_once(tokens, block):
    """By expert, ties in the order of tokens; no tile holds rows of two experts, or padding."""
    experts = routes_of(tokens=tokens, skew=0.5).experts
    groups = jax.tree.map(np.asarray, jax.jit(grouping.group, static_argnums=1)(experts, X))
    flat = np.asarray(experts).reshape(-1)
    np.testing.assert_array_equal(groups.order, np.argsort(flat, kind="stable"))
    np.testing.assert_array_equal(groups.order[groups.place], np.arange(flat.size))
    np.testing.assert_array_equal(groups.sizes, np.bincount(flat, minlength=X + 1)[:X])
    cut = jax.jit(grouping.cut_tiles, static_argnums=(1, 2))
    tiles = jax.tree.map(np.asarray, cut(groups.sizes, flat.size, block))
    num = int(tiles.num)
    assert num == sum(-(-int(size) // block) for size in groups.sizes) <= len(tiles.rows)
    assert not tiles.rows[num:].any() and (tiles.rows[:num] <= block).all()
    found = [
        (int(e), first + r)
        for e, first, rows in zip(*(a[:num] for a in tiles[:3]), strict=True)
        for r in range(rows)
    ]
    real = flat[groups.order]
    assert found == [(int(e), row) for row, e in enumerate(real) if e < X]


def test_of_equal_scores_the_lower_expert_is_taken():
    """Whatever scores them, and of groups the lower one."""
    logits = jnp.zeros((2, 6)).at[1, 4].set(1.0)
    for scoring in ("softmax", "sigmoid", "softmax_of_chosen"):
        routes = choose(RouterConfig(6, 3, scoring), logits)
        assert routes.experts.tolist() == [[0, 1, 2], [4, 0, 1]]
    routes = choose(RouterConfig(6, 2, "sigmoid", n_group=3, topk_group=1), logits)
    assert routes.experts.tolist() == [[0, 1], [4, 5]]


def test_a_bias_of_the_choice_counts_for_nothing_else():
    logits = jnp.asarray([[0.0, 1.0, 2.0, -1.0]])
    config = RouterConfig(4, 2, "sigmoid", norm_topk_prob=True, routed_scaling_factor=3.0)
    routes = choose(config, logits, jnp.asarray([0.0, 0.0, -5.0, 5.0]))
    shares = 1 / (1 + np.exp([1.0, -1.0]))
    assert routes.experts.tolist() == [[3, 1]]
    np.testing.assert_allclose(routes.weights[0], 3 * shares / shares.sum(), rtol=1e-6)


def test_a_balanced_loss_is_the_number_of_experts_of_a_token():
    logits = jnp.log(jnp.asarray(np.roll(np.eye(4) * 0.9 + 0.025, 1, 0), jnp.float32))
    routes = choose(RouterConfig(4, 1), logits)
    assert float(load_balancing_loss(logits, routes)) == pytest.approx(1.0)
    crowded = jnp.tile(logits[:1], (4, 1))
    assert float(load_balancing_loss(crowded, choose(RouterConfig(4, 1), crowded))) > 3


SETTINGS = dict(
    architectures=["Qwen3MoeForCausalLM"], hidden_size=12, intermediate_size=20, vocab_size=13,
    num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=8, num_experts=4,
    num_experts_per_tok=2, moe_intermediate_size=10, max_position_embeddings=64,
    norm_topk_prob=True,
)  # fmt: skip


def tiny_mixture():
    model, config = read_model(Settings(SETTINGS))
    assert isinstance(config, MixtureConfig)
    keys = iter(jax.random.split(jax.random.key(0), 99))
    dims = config.dims | dict(param="float32")

    def make(_, shape, dtype):
        return 0.3 * jax.random.normal(next(keys), shape, dtype)

    return model, config, pytree.build(make, model.params, dims)


def run(model, config, params, ids, told):
    """Returns logits, [T, V], and what each of two layers tells, by the name of that."""
    inputs = Inputs(ids, jnp.arange(ids.size), jnp.full(ids.size, ids.size))
    extras = tuple(f"{told}.{i}" for i in range(2))
    x, none = model.embed(config, params, inputs), (None, None)
    hidden, _, found = model.layers(config, params, x, none, inputs, dense(1), extras=extras)
    return model.logits(config, params, hidden), [found[name] for name in extras]


def trained(steps):
    """Trains a tiny mixture to count, and returns its losses and gradients of the first step."""
    model, config, made = tiny_mixture()
    ids = jnp.arange(26, dtype=jnp.int32) % 13

    def loss(params):
        logits, routers = run(model, config, params, ids, "router_logits")
        wrong = optax.softmax_cross_entropy_with_integer_labels(logits[:-1], ids[1:]).mean()
        balance = [load_balancing_loss(x, choose(config.router, x)) for x in routers]
        return wrong + 0.01 * sum(balance)

    optimizer = optax.adam(0.02)

    @jax.jit
    def step(params, state):
        value, grads = jax.value_and_grad(loss)(params)
        with jax.numpy_dtype_promotion("standard"):  # optax's own
            updates, state = optimizer.update(grads, state)
        return optax.apply_updates(params, updates), state, value, grads

    state, losses, grads = optimizer.init(made), [], []
    for _ in range(steps):
        made, state, value, found = step(made, state)
        losses.append(float(value))
        grads.append(found)
    return losses, grads[0]


def test_a_mixture_is_trained_by_the_function_that_serves_it():
    losses, grads = trained(60)
    assert losses[0] > 2.2 and losses[-1] < 0.3
    for layer in grads.layers:
        own = jax.tree.leaves((layer.experts, layer.router))
        assert all(float(jnp.abs(grad).max()) > 0 for grad in own)


def test_routes_are_told_and_replayed():
    """The routes of one model in another: its own replayed change nothing, others do."""
    model, config, params = tiny_mixture()
    ids = jnp.arange(9, dtype=jnp.int32)
    other = jax.tree.map(lambda a: a[::-1], params)
    logits, routes = run(model, config, params, ids, "routed_experts")
    routes = jnp.stack(routes, 1)  # [T, Y, k]
    assert routes.shape == (9, 2, 2)
    small = routes.astype(jnp.int16)
    again, _ = run(model, config, with_routes(params, small), ids, "routed_experts")
    np.testing.assert_array_equal(again, logits)
    free, chosen = run(model, config, other, ids, "routed_experts")
    bound, replayed = run(model, config, with_routes(other, routes), ids, "routed_experts")
    assert (jnp.stack(chosen, 1) != routes).any() and not jnp.allclose(free, bound)
    np.testing.assert_array_equal(jnp.stack(replayed, 1), routes)
