"""Which experts and tokens the kernels of a mixture are given, and what they refuse."""

from dataclasses import replace
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrunner.kernels_pallas.mixtures import group_tokens, grouped_mlp, router
from jaxrunner.kernels_pallas.mixtures.group_tokens import Groups, max_tiles
from jaxrunner.mixtures.experts import Experts, Routes
from jaxrunner.ops import grouped_experts
from jaxrunner.ops.routing import Router, RouterConfig, choose
from tests.support.lowering import cuda, lowers

BF16 = jnp.bfloat16


def shaped(*shape, dtype=BF16) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype)


def routes_of(tokens: int, num_experts: int, k: int, seed: int = 0) -> Routes:
    """Returns routes of which every seventh token has none."""
    rng = np.random.default_rng(seed)
    order = np.argsort(rng.normal(size=(tokens, num_experts)), 1)[:, :k].astype(np.int32)
    order[::7] = num_experts
    return Routes(jnp.asarray(order), jnp.asarray(rng.random((tokens, k)), jnp.float32))


def router_of(**more: Any) -> Router:
    return Router(**dict[str, Any](weight=None, bias=None, choice_bias=None, replayed=None) | more)


def check_groups(groups: Groups, x, routes: Routes, num_experts: int, tile: int) -> None:
    """Each route has a row of a tile of its expert, in the order of tokens; nothing else has."""
    groups, x, routes = jax.tree.map(np.asarray, (groups, x, routes))  # JAX compiles each slice
    flat, k = routes.experts.ravel(), routes.experts.shape[1]
    num, seen = int(groups.num_tiles[0]), []
    assert num <= max_tiles(flat.size, num_experts, tile) and groups.tile == tile
    for i in range(num):
        rows = slice(i * tile, i * tile + int(groups.rows[i]))
        mine = groups.route[rows]
        assert rows.stop > rows.start and (flat[mine] == int(groups.expert[i])).all()
        np.testing.assert_array_equal(groups.x[rows], x[mine // k])
        np.testing.assert_array_equal(groups.weight[rows], routes.weights.ravel()[mine])
        seen.append(mine)
    seen = np.concatenate(seen)
    assert sorted(seen) == np.flatnonzero(flat < num_experts).tolist()
    assert (np.diff(flat[seen] * flat.size + seen) > 0).all()


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("tokens", "num_experts", "k", "tile"),
    [
        (3, 200, 8, 8), (50, 200, 8, 8), (256, 200, 8, 32), (700, 200, 8, 128),
        (1024, 128, 8, 128), (1500, 64, 6, 64), (8191, 128, 8, 128), (8192, 500, 10, 128),
        (32768, 128, 8, 128),
    ],
)  # fmt: skip
def test_kernels_group_tokens_as_a_sort_does(tokens, num_experts, k, tile):
    """Also those that are counted in parts, and of which a block has several."""
    x = jax.random.normal(jax.random.key(0), (tokens, 512), BF16)
    routes = routes_of(tokens, num_experts, k)
    groups = group_tokens.group_tokens(x, *routes, num_experts, tile=tile)
    check_groups(groups, x.astype(jnp.float32), routes, num_experts, tile)


def test_parts_cover_all_tokens():
    """A block's tokens are of one part, and no part is longer than a block reads."""
    for tokens, k in (
        (1, 8),
        (512, 8),
        (513, 8),
        (1025, 8),
        (8191, 10),
        (16384, 8),
        (32768, 10),
        (40000, 2),
    ):
        s = group_tokens._sizes(tokens, k)
        assert s.part % s.own == 0 and s.part * k <= group_tokens.MAX_ROUTES
        assert (s.parts - 1) * s.part < tokens <= s.parts * s.part
        assert s.parts <= group_tokens.PARTS[1] and -(-tokens // s.own) <= group_tokens.BLOCKS


@pytest.mark.gpu
@pytest.mark.parametrize(("tokens", "T"), [(1, 8), (20, 64), (300, 512), (900, 2048)])
def test_bits_of_a_token_do_not_depend_on_the_others(tokens, T):
    """Within a bucket of T tokens; the others crowd the same few experts."""
    keys = jax.random.split(jax.random.key(1), 3)
    shapes = (32, 2, 256, 512), (32, 512, 256), (T, 512)
    gate_up, down, x = (jax.random.normal(*of, BF16) for of in zip(keys, shapes, strict=True))
    w, routes = Experts(gate_up, down, None, None), routes_of(T, 32, 4)
    run = jax.jit(lambda x, routes: grouped_experts._experts(x, routes, w))
    few = Routes(jnp.minimum(routes.experts, 32) % 4 + 4 * jnp.arange(4)[None], routes.weights)
    mine = (jnp.arange(T) < tokens)[:, None]
    mixed = Routes(jnp.where(mine, routes.experts, few.experts), routes.weights)
    real = np.asarray(routes.experts[:tokens, 0] < 32)
    a, b = run(x, routes)[:, :tokens], run(jnp.where(mine, x, -x), mixed)[:, :tokens]
    np.testing.assert_array_equal(np.asarray(a)[:, real], np.asarray(b)[:, real])


@pytest.mark.gpu
@pytest.mark.parametrize("has_bias", [False, True])
def test_one_token_is_a_tile_of_each_of_its_experts(has_bias):
    """Of which one is none, as experts of other devices are; beside a second token, the same."""
    keys = jax.random.split(jax.random.key(3), 5)
    shapes = (8, 2, 256, 512), (8, 512, 256), (1, 512), (8, 2, 256), (8, 512)
    gate_up, down, x, *biases = (
        jax.random.normal(*of, BF16) for of in zip(keys, shapes, strict=True)
    )
    w = Experts(gate_up, down, None, None)
    if has_bias:
        w = replace(w, gate_up_bias=biases[0], down_bias=biases[1])
    routes = Routes(jnp.array([[5, 8, 0]]), jnp.array([[0.5, 0.0, 0.25]]))
    more = jax.tree.map(lambda x, none: jnp.concatenate([x, none]), routes, Routes(
        jnp.full((1, 3), 8), jnp.zeros((1, 3))
    ))  # fmt: skip
    run = jax.jit(lambda x, routes: grouped_experts._experts(x, routes, w))
    got, want = run(x, routes), run(jnp.concatenate([x, x]), more)
    for i in (0, 2):
        np.testing.assert_array_equal(got[i, 0], want[i, 0])


@pytest.mark.gpu
@pytest.mark.parametrize("scoring", ["softmax", "softmax_of_chosen"])
@pytest.mark.parametrize("renormalise", [False, True])
def test_the_router_chooses_as_plain_jax_does(scoring, renormalise):
    config = RouterConfig(60, 4, scoring, renormalise, routed_scaling_factor=1.5)
    logits = jnp.round(jax.random.normal(jax.random.key(2), (99, 60)) * 4) / 4  # many are equal
    got = grouped_experts._route(config, router_of(), logits, jnp.arange(99) != 5)
    want, real = choose(config, logits), np.arange(99) != 5
    np.testing.assert_array_equal(got.experts[real], want.experts[real])
    np.testing.assert_allclose(got.weights[real], want.weights[real], rtol=1e-6)
    assert (np.asarray(got.experts[5]) == 60).all() and not np.asarray(got.weights[5]).any()


@lowers
def test_kernels_refuse_in_words():
    logits, routes = jnp.ones((2, 8)), routes_of(2, 8, 2)
    with pytest.raises(ValueError, match="route wants 1 to 8 experts a token, got 9"):
        router.route(logits, jnp.ones(2, bool), top_k=9, renormalise=True)
    assert "at most 512 experts" in str(router.refuses(shaped(2, 513, dtype=jnp.float32), 2))
    assert "in float32" in str(router.refuses(shaped(2, 8), 2))
    with pytest.raises(ValueError, match="group_tokens wants tokens of an even count of at"):
        group_tokens.group_tokens(jnp.ones((2, 64), BF16), *routes, 8, tile=8)
    float32 = shaped(2, 256, dtype=jnp.float32)
    assert "bfloat16 or float16" in str(group_tokens.refuses(float32, routes.experts, 8))
    for tokens in 99999, 9999999:
        many = shaped(tokens, 256), shaped(tokens, 8)
        assert "at most about 128 x 4096 routes" in str(group_tokens.refuses(*many, 8))
    assert "128 experts a token" in str(group_tokens.refuses(shaped(2, 256), shaped(2, 129), 512))
    row, one = jnp.ones(8), jnp.ones(1)
    groups = Groups(jnp.ones((8, 256), BF16), row, row, one, one, one)
    with pytest.raises(ValueError, match="grouped_mlp wants units and tokens of a multiple of 64"):
        grouped_mlp.grouped_mlp(
            groups, jnp.ones((8, 2, 32, 256), BF16), jnp.ones((8, 256, 32), BF16), (2, 2)
        )
    x, gate_up, down = shaped(8, 256), shaped(8, 2, 64, 256), shaped(8, 256, 64)
    assert grouped_mlp.refuses(x, gate_up, down, 8) is None
    assert "tiles of" in str(grouped_mlp.refuses(x, gate_up, down, 9))
    assert "got relu2" in str(grouped_mlp.refuses(x, gate_up, down, 8, activation="relu2"))
    assert "one dtype" in str(
        grouped_mlp.refuses(shaped(8, 256, dtype=jnp.float32), gate_up, down, 8)
    )
    assert "wants weights of 256" in str(grouped_mlp.refuses(x, gate_up, gate_up, 8))


@lowers
@pytest.mark.parametrize(
    ("tokens", "tile", "consumers"),
    [(1, 8, 1), (64, 8, 1), (128, 16, 1), (300, 64, 1), (4096, 128, 2)],
)
def test_tiles_follow_the_tokens_of_an_expert(tokens, tile, consumers):
    w = Experts(shaped(128, 2, 768, 2048), shaped(128, 2048, 768), None, None)
    routes = Routes(shaped(tokens, 8, dtype=jnp.int32), shaped(tokens, 8, dtype=jnp.float32))
    found, config = grouped_experts._sizes(shaped(tokens, 2048), routes, w)
    assert (found, config.consumers) == (tile, consumers)
    assert grouped_experts._refuses_experts(shaped(tokens, 2048), routes, w) is None
    with cuda():
        made = jax.eval_shape(grouped_experts._experts, shaped(tokens, 2048), routes, w)
    assert made.shape == (8, tokens, 2048)


@pytest.mark.parametrize(
    ("config", "more", "words"),
    [
        (RouterConfig(8, 2, "sigmoid"), {}, "scoring by softmax, got sigmoid"),
        (RouterConfig(8, 2, n_group=2), {}, "without bias or groups"),
        (RouterConfig(8, 2), dict(choice_bias=jnp.ones(8)), "without bias or groups"),
        (RouterConfig(8, 2), dict(replayed=jnp.ones((3, 2))), "does not replay"),
    ],
)
def test_the_router_of_logits_refuses_other_kinds(config, more, words):
    logits, real = jnp.ones((3, 8)), jnp.ones(3, bool)
    assert words in str(grouped_experts._refuses_route(config, router_of(**more), logits, real))


@lowers
def test_experts_with_biases_have_a_kernel():
    """gpt-oss' 20 billion: 2,880 numbers and units, 64 times an odd number."""
    gate_up, down, routes = shaped(8, 2, 2880, 2880), shaped(8, 2880, 2880), routes_of(3, 8, 2)
    biases, x = (shaped(8, 2, 2880), shaped(8, 2880)), shaped(3, 2880)
    kernel = grouped_experts.OF_FLOATS
    whole = Experts(gate_up, down, *biases, "clamped_swiglu")
    assert kernel.refuses(x, routes, whole) is None
    with cuda():
        assert jax.eval_shape(kernel.run, x, routes, whole).shape == (2, 3, 2880)
    others: list[tuple[Any, Any, str]] = [
        (x, object(), "weights that are Experts, got object"),
        (x, Experts(gate_up, down, biases[0], None), "a bias of both products, or of none"),
        (x, Experts(gate_up, down, *biases, "relu2"), "wants one of .*swiglu"),
        (shaped(3, 64), whole, "of at least 256 numbers, got 64"),
    ]
    for tokens, other, words in others:
        assert re.search(words, str(kernel.refuses(tokens, routes, other)))
