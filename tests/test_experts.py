"""The layer of a mixture: routes, rows by expert, products; against numpy in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrunner.experts import Experts, Routes
from jaxrunner.ops import grouping

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


@pytest.mark.parametrize("tokens", [5, T, 700], ids=["few", "some", "sorted"])
@pytest.mark.parametrize("block", [1, 4, 16])
def test_tiles_hold_each_row_once(tokens, block):
    """By expert, ties in the order of tokens; no tile holds rows of two experts, or padding."""
    experts = routes_of(tokens=tokens, skew=0.5).experts
    groups = grouping.group(experts, X)
    flat = np.asarray(experts).reshape(-1)
    np.testing.assert_array_equal(groups.order, np.argsort(flat, kind="stable"))
    np.testing.assert_array_equal(groups.order[groups.place], np.arange(flat.size))
    np.testing.assert_array_equal(groups.sizes, np.bincount(flat, minlength=X + 1)[:X])
    tiles = grouping.cut_tiles(groups.sizes, flat.size, block)
    num = int(tiles.num)
    assert num == sum(-(-int(size) // block) for size in groups.sizes) <= len(tiles.rows)
    assert not np.asarray(tiles.rows)[num:].any() and (np.asarray(tiles.rows)[:num] <= block).all()
    found = [
        (int(e), first + r)
        for e, first, rows in zip(*(np.asarray(a)[:num] for a in tiles[:3]), strict=True)
        for r in range(rows)
    ]
    real = flat[np.asarray(groups.order)]
    assert found == [(int(e), row) for row, e in enumerate(real) if e < X]
