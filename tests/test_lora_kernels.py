"""Kernels of adapters refuse in words, equal plain JAX, and keep tokens apart."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrunner.kernels_pallas.lora import lora_expand, lora_shrink, prefill_units
from jaxrunner.kernels_pallas.products import add_norm
from jaxrunner.lora.adapted_linear import Stack, delta, own_ranks
from jaxrunner.ops.adapters import low_rank
from jaxrunner.ops.adapters.adapted_parts import AdaptedParts
from tests.support import oracles
from tests.support.lowering import lowers


def shape(*sizes: int, dtype="bfloat16") -> Any:
    return jax.ShapeDtypeStruct(sizes, jnp.dtype(dtype))


PLACE = shape(8, dtype="int32")
X, A, B, Y = shape(8, 512), shape(1, 2, 16, 512), shape(1, 2, 16, 256), shape(8, 256)
LOW = shape(1, 8, 16, dtype="float32")


@pytest.mark.parametrize(
    ("x", "a", "place", "words"),
    [
        (shape(8, 512, dtype="float32"), A, PLACE, "one dtype, bfloat16 or float16"),
        (shape(9, 512), A, shape(9, dtype="int32"), "1, 8, 16, ... 64 or 128, 192, 256 tokens"),
        (X, A, shape(7, dtype="int32"), "places of 8 tokens in int32"),
        (shape(8, 480), shape(1, 2, 16, 480), PLACE, "multiple of 64 terms"),
        (X, shape(1, 2, 12, 512), PLACE, "ranks in eights"),
    ],
)
@lowers
def test_the_first_product_refuses_in_words(x, a, place, words):
    assert words in lora_shrink.refuses(x, a, place)
    with pytest.raises(ValueError, match="lora_shrink wants"):
        jax.eval_shape(lora_shrink.lora_shrink, x, a, place)


@pytest.mark.parametrize(
    ("y", "low", "b", "place", "words"),
    [
        (shape(8, 256, dtype="float32"), LOW, B, PLACE, "products in bfloat16, or their parts"),
        (shape(8, 128), LOW, B, PLACE, "128 outputs, got 1 x 256"),
        (Y, LOW, B, shape(7, dtype="int32"), "places of 8 tokens in int32"),
        (shape(9, 256), LOW, B, shape(9, dtype="int32"), "tokens, got 9"),
        (Y, LOW, shape(1, 1, 8, 256), PLACE, "together in sixteens"),
        (shape(8, 96), LOW, shape(1, 2, 16, 96), PLACE, "outputs in tiles of 64"),
        (Y, LOW, shape(1, 99, 16, 256), PLACE, "at most 896 ranks of all places"),
    ],
)
@lowers
def test_the_second_product_refuses_in_words(y, low, b, place, words):
    assert words in lora_expand.refuses(y, b, place)
    with pytest.raises(ValueError, match="lora_expand wants"):
        jax.eval_shape(lora_expand.lora_expand, y, low, b, place)


@lowers
def test_what_the_first_product_gives_is_checked():
    with pytest.raises(ValueError, match=r"lora_expand wants parts of \[8, 16\] in float32"):
        jax.eval_shape(lora_expand.lora_expand, Y, shape(1, 8, 24, dtype="float32"), B, PLACE)
    with pytest.raises(ValueError, match="lora_units wants a gate and an up projection"):
        jax.eval_shape(lora_expand.lora_units, Y, LOW, B, PLACE)


UNITS, GATES, PLACES = shape(128, 2, 256), shape(2, 3, 16, 256), shape(128, dtype="int32")
RANKS = shape(128, 32)


@pytest.mark.parametrize(
    ("y", "b", "place", "words"),
    [
        (UNITS, shape(2, 3, 16, 256, dtype="float32"), PLACES, "bfloat16 or float16, got float32"),
        (shape(128, 2, 128), GATES, PLACES, "wants a gate and an up projection, got (128, 2, 128)"),
        (shape(96, 2, 256), GATES, shape(96, dtype="int32"), "tokens in blocks of 64, got 96"),
        (UNITS, GATES, shape(128), "places of 128 tokens in int32, got (128,) in bfloat16"),
        (UNITS, shape(2, 3, 8, 256), PLACES, "multiples of 16, at most 64, got 8"),
        (UNITS, shape(2, 3, 128, 256), PLACES, "multiples of 16, at most 64, got 128"),
        (shape(128, 2, 96), shape(2, 3, 16, 96), PLACES, "units in tiles of 64, got 96"),
        (UNITS, shape(2, 64, 16, 256), PLACES, "that shared memory holds, got 1024"),
    ],
)
@lowers
def test_units_of_prompts_are_refused_in_words(y, b, place, words):
    assert words in prefill_units.refuses(y, b, place)
    with pytest.raises(ValueError, match="prefill_units wants"):
        jax.eval_shape(prefill_units.prefill_units, y, RANKS, b, place)


@lowers
@pytest.mark.parametrize("low", [shape(128, 16), shape(128, 32, dtype="float32")])
def test_ranks_of_prompts_are_checked(low):
    with pytest.raises(ValueError, match=r"wants ranks, \[128, 32\], in bfloat16, got"):
        jax.eval_shape(prefill_units.prefill_units, UNITS, low, GATES, PLACES)


@pytest.mark.parametrize(
    ("T", "places", "activation", "words"),
    [
        (1024, 8, "gelu_tanh", "gates of silu, got gelu_tanh"),
        (960, 8, "silu", "at least 1024 tokens, got 960"),
        (1024, 33, "silu", "at most 512 ranks of all places, got 528"),
    ],
)
def test_units_of_prompts_leave_what_they_are_not_ahead_of(T, places, activation, words):
    _, (_, _, refuses) = low_rank.KERNELS.units
    stack = Stack(shape(2, places, 16, 512), shape(2, places, 16, 256))
    place = shape(T, dtype="int32")
    assert words in refuses(shape(T, 2, 256), shape(T, 512), stack, place, activation)


@pytest.mark.parametrize("blocks", [1, 2])
def test_plain_jax_equals_the_oracles_of_kernels(blocks):
    rng = np.random.default_rng(blocks)
    x, a, b = (
        jnp.asarray(rng.standard_normal(s), jnp.float32)
        for s in ((5, 24), (blocks, 3, 4, 24), (blocks, 3, 4, 10))
    )
    place = jnp.asarray([0, 3, 1, 2, 3], jnp.int32)
    low = oracles.lora_shrink(x, a, place)[None]
    want = oracles.lora_expand(jnp.zeros((5, 10 * blocks)), low, b, place)
    got = delta(x, Stack(a, b), place, jnp.float32)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    ranks = own_ranks(x, Stack(a, b), place)
    np.testing.assert_allclose(ranks, low[0], rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("T", [8, 64, 1024])
def test_bits_of_a_token_depend_on_its_own_adapter_alone(T):
    rng = np.random.default_rng(T)
    shapes = (T, 2048), (2, 8, 16, 2048), (2, 8, 16, 256), (T, 2, 256)
    x, a, b, y = (jnp.asarray(rng.standard_normal(s), jnp.bfloat16) for s in shapes)
    _, units, refuses = low_rank.KERNELS.units[T > 64]
    place = rng.integers(0, 9, T).astype(np.int32)
    assert refuses(y, x, Stack(a, b), place, "silu") is None
    run = jax.jit(lambda place: units(y, x, Stack(a, b), place, "silu"))
    other = np.where(np.arange(T) == 3, place, rng.integers(0, 9, T)).astype(np.int32)
    np.testing.assert_array_equal(run(place)[3], run(other)[3])


@pytest.mark.parametrize(
    ("rank", "low", "residual", "words"),
    [
        (64, LOW, shape(2, 8, 256, dtype="float32"), "rank <= 16"),
        (16, shape(1, 8, 8, dtype="float32"), shape(2, 8, 256, dtype="float32"), "of 8 rows"),
        (16, LOW, Y, "must be in parts where adapters add to them"),
    ],
)
def test_the_norm_refuses_adapters_in_words(rank, low, residual, words):
    more = add_norm.LowRank(low, shape(2, rank, 256), PLACE)
    args = Y, residual, shape(256), more
    assert words in str(add_norm.refuses(*args))
    with pytest.raises(ValueError, match=words):
        jax.eval_shape(functools.partial(add_norm.add_rms_norm, eps=1e-5), *args)


def test_a_residual_is_what_models_take_it_for():
    """Those that norm or scale it sum its parts up, with what adapters add."""
    parts, rest = jnp.ones((2, 3, 4)), (jnp.zeros(()),) * 3
    residual = AdaptedParts(parts, *rest, whole=lambda y, *_: y.at[0].add(5))
    assert residual.ndim == parts.ndim
    np.testing.assert_array_equal(residual.sum(0), np.full((3, 4), 7))
    assert residual.sum(0, keepdims=True).shape == (1, 3, 4)
    assert residual.astype(jnp.float16).sum(0).dtype == jnp.float16
