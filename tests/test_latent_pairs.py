"""The decode kernel of latent attention in Pallas' interpreter: its tiles, parts and edges."""

import functools

import jax
from jax import lax
from jax.experimental import pallas as pl
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrunner.kernels_pallas import mosaic
from jaxrunner.kernels_pallas.attention import latent_decode as kernel
from jaxrunner.kernels_pallas.attention import latent_pairs
from jaxrunner.kernels_pallas.attention.latent_decode import TuningConfig, latent_decode
from tests.support import oracles
from tests.support.interpreted_products import interpret
from tests.support.lowering import lowers


def ending(body):
    """Has the warpgroup that copies wait for what is free at the end, as the interpreter wants."""

    def run(*args, **smem):
        body(*args, **smem)

        @pl.when(lax.axis_index("wg") == 2)
        def _():
            mosaic.barrier_wait(smem["q_free"])
            for at in range(4):
                mosaic.barrier_wait(smem["free"].at[at])

    return run


@lowers
@pytest.mark.parametrize(
    ("lens", "heads", "S", "rank", "config"),
    [
        ((65,), 8, 64, 128, dict(num_ctas=1)),
        ((1, 63, 64, 65, 0, 200, 2), 16, 64, 128, dict(num_ctas=3)),
        ((99, 332), 20, 16, 256, dict(num_ctas=4)),  # heads that no copy of 8 rows fits
        ((99, 332, 5), 8, 128, 256, dict(num_ctas=2)),
        ((700, 1, 90), 128, 64, 128, dict(num_ctas=6)),
        ((300, 64), 16, 64, 128, dict(num_ctas=8, batch_invariant=True)),
    ],
)
def test_pairs_of_tiles_are_attention(lens, heads, S, rank, config, monkeypatch):
    """Numbers behind a row's end are NaN; scores rise by more than results are rescaled for."""
    rng, D = np.random.default_rng(0), rank + 64
    M = -(-max(lens) // S) + 1
    blocks = rng.permutation(len(lens) * M + 1)[: len(lens) * M].reshape(len(lens), M)
    latents = np.full((len(lens) * M + 1, S, D), np.nan)
    for row, num in enumerate(lens):
        keys = rng.normal(size=(M * S, D)) * np.linspace(0.2, 2.0, M * S)[:, None]
        latents[blocks[row]] = np.where(np.arange(M * S)[:, None] < num, keys, np.nan).reshape(
            M, S, D
        )
    q = jnp.asarray(3 * rng.normal(size=(len(lens), heads, D)), jnp.bfloat16)
    latents = jnp.asarray(latents, jnp.bfloat16)
    args = q, latents, *(jnp.asarray(x, jnp.int32) for x in (blocks, lens))
    sizes = dict(scale=D**-0.5, rank=rank)
    want = oracles.latent_decode(*args, **sizes)
    if interpret(monkeypatch, latent_pairs):
        monkeypatch.setattr(kernel, "_kernel", ending(kernel._kernel))
    attend = functools.partial(latent_decode, **sizes, config=TuningConfig(**config))
    found = jax.jit(attend)(*args)
    np.testing.assert_allclose(found.astype(jnp.float32), want, atol=0.04)
