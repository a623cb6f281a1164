"""Products with over 512 ranks of adapters: tiles of one adapter each give what all ranks give."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrunner.lora import adapted_linear
from jaxrunner.lora.adapted_linear import MOST_RANKS, Stack, delta

PLACES, RANK, INPUTS = 9, 64, 40


def normal(seed: int, *sizes: int, dtype: Any) -> jax.Array:
    rng = np.random.default_rng(seed)  # JAX's would compile a program for each shape
    return jnp.asarray(rng.standard_normal(sizes, np.float32).astype(dtype))


def stack(blocks: int, outputs: int, dtype: Any) -> Stack:
    sizes = blocks, PLACES, RANK
    a, b = (normal(i, *sizes, last, dtype=dtype) for i, last in enumerate((INPUTS, outputs)))
    return Stack(a, b)


def places(seed: int, T: int) -> jax.Array:
    """Returns places of which some are none's, some of one token and one of many."""
    rng = np.random.default_rng(seed)
    return jnp.asarray(rng.choice([0, 1, 1, 1, 2, 5, PLACES], T), jnp.int32)


def inputs(T: int, dtype: Any) -> jax.Array:
    return normal(T, T, INPUTS, dtype=dtype)


@pytest.mark.parametrize("T", [1, 2, 7, 33, 300, 1500])
@pytest.mark.parametrize("blocks", [1, 2])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tiles_of_one_adapter_give_what_all_ranks_give(T, blocks, dtype):
    x, of, place = inputs(T, dtype), stack(blocks, 24, dtype), places(T, T)
    assert PLACES * RANK > MOST_RANKS
    got, want = (  # each is one program, not one of each operation
        np.asarray(jax.jit(function, static_argnums=3)(x, of, place, jnp.dtype(dtype)), np.float32)
        for function in (delta, adapted_linear._masked)
    )
    few = 1e-5 if dtype == "float32" else 2**-7
    np.testing.assert_allclose(got, want, rtol=few, atol=few * np.abs(want).max())
    assert not got[np.asarray(place) == 0].any()


@pytest.mark.parametrize("T", [8, 64, 300])
def test_bits_of_a_token_are_its_own(T):
    x, of, dtype = inputs(T, "float32"), stack(2, 24, "float32"), jnp.dtype("float32")
    run = jax.jit(lambda x, place: delta(x, of, place, dtype))
    for seed in range(5):
        place = places(seed, T)
        got = run(x, place)
        for own in (0, T // 2, T - 1):
            others = jnp.where(jnp.arange(T) == own, place, places(seed + 9, T))
            changed = jnp.where((jnp.arange(T) == own)[:, None], x, x[::-1] * 3)
            np.testing.assert_array_equal(run(changed, others)[own], got[own])


def test_a_tile_has_the_tokens_of_an_adapter():
    found = [adapted_linear.tile_rows(T, 8) for T in (1, 8, 9, 64, 100, 8192, 65536)]
    assert found == [1, 1, 1, 8, 16, 256, 256]
