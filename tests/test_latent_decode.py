"""The decode kernel of latent attention: how keys are shared out, and what it refuses."""

from dataclasses import replace
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrunner.caches.latent import LatentCache
from jaxrunner.kernels_pallas.attention import latent_reference
from jaxrunner.kernels_pallas.attention.latent_decode import (
    TuningConfig,
    latent_decode,
    refuses,
)
from jaxrunner.kernels_pallas.attention.latent_shares import (
    SLACK,
    of_part,
    share_out,
)
from jaxrunner.model import AttentionSpec
from jaxrunner.ops.latent import attention as latent_attention
from jaxrunner.ops.latent.attention import LATENT_ATTENTION
from tests.support import oracles
from tests.support.lowering import lowers
from tests.support.paged_attention import Problem


@functools.partial(jax.jit, static_argnums=1)
def shares_and_places(lens, num_ctas):
    shares = share_out(lens, 64, num_ctas)
    part = jnp.arange(num_ctas)
    return shares, of_part(shares.head[:, None], part[None])


@pytest.mark.parametrize("num_ctas", [1, 7, 132])
@pytest.mark.parametrize("B", [1, 6, 200])
def test_blocks_read_each_tile_once_in_equal_shares(B, num_ctas):
    """And what they leave of rows in parts lies where the block that ends a row looks for it."""
    rng = np.random.default_rng()
    for most in (3, 70, 5000):
        lens = np.where(rng.random(B) < 0.2, 0, rng.integers(1, most, B))
        found = shares_and_places(jnp.asarray(lens), num_ctas)
        s, places = jax.tree.map(np.asarray, found)
        tiles = np.maximum(-(-lens // 64), 1)
        read, left, merged = np.zeros(tiles.sum(), int), {}, set()
        for c in range(num_ctas):
            low, high = s.first[c], s.last[c]
            for row in range(s.row[c], s.row[c] + s.num_rows[c]):
                a, b = max(s.start[row], low), min(s.end[row], high)
                assert a < b
                read[a:b] += 1
                if (a, b) != (s.start[row], s.end[row]):
                    left[2 * c + int(s.start[row] >= low)] = row
            row = s.row[c]
            if low < high and s.start[row] < low and s.end[row] <= high:
                merged.add(row)
                parts = places[c][: c - s.head[c] + 1]
                assert sorted(k for k, v in left.items() if v == row) == sorted(parts)
        assert (read == 1).all() and merged == set(left.values())
        np.testing.assert_array_equal(s.end - s.start, tiles)
        assert set(s.row[s.ends == 1]) == merged
        equal = -(-tiles.sum() // num_ctas)
        num = (s.last - s.first).max()
        assert num == equal or (not left and equal < num <= equal + equal // SLACK + 1)


@pytest.mark.parametrize(
    ("lens", "whole"),
    [
        ([4096] * 64, True),  # 64 tiles a block in place of 63
        ([4096] * 60 + [4352] * 4, False),  # 68
        ([1024] * 256, True),  # four rows a block
        ([1000, 900] * 128, True),
        ([4096] * 67, False),  # two rows for one block, one for each other
    ],
)
def test_rows_that_are_about_as_long_are_read_whole(lens, whole):
    shares, _ = shares_and_places(jnp.asarray(lens), 66)
    assert (np.asarray(shares.ends).sum() == 0) == whole
    run = -(-len(lens) // 66)
    if whole:
        np.testing.assert_array_equal(shares.num_rows[: len(lens) // run], run)


@pytest.mark.parametrize("B", [1, 6, 200])
def test_rows_may_be_shared_out_by_their_own_length_alone(B):
    rng, longest = np.random.default_rng(0), 100
    found = set()
    for most in (3, 70, 6000):
        lens = np.where(rng.random(B) < 0.2, 0, rng.integers(1, most, B))
        at = rng.integers(B)
        lens[at] = 6000
        s = jax.tree.map(np.asarray, share_out(jnp.asarray(lens), 64, 132, longest))
        assert s.first.size % B == 0 and s.first.size <= max(B, 2 * 132)
        tiles = np.maximum(-(-lens // 64), 1)
        np.testing.assert_array_equal(s.end - s.start, tiles)
        for row in range(B):
            mine = np.flatnonzero((s.row == row) & (s.first < s.last))
            assert (s.num_rows[mine] == 1).all() and (s.head[mine] == mine[0]).all()
            assert mine.size == 1 or s.first.size > B  # as `latent_decode` takes it
            assert (np.diff(mine) == 1).all() and s.first[mine[0]] == s.start[row]
            assert (s.first[mine[1:]] == s.last[mine[:-1]]).all() and s.last[mine[-1]] == s.end[row]
            if row == at:
                found.add((*(s.last[mine] - s.first[mine]),))
        assert (s.num_rows[s.first >= s.last] == 0).all()
    assert len(found) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("B", [4, 64, 300])
def test_a_row_s_bits_do_not_depend_on_the_others(B):
    rng, keys = np.random.default_rng(0), jax.random.split(jax.random.key(0))
    q, latents = (
        jax.random.normal(key, shape, jnp.bfloat16)
        for key, shape in zip(keys, ((B, 16, 576), (99, 64, 576)), strict=True)
    )
    blocks = jnp.asarray(rng.integers(0, 99, (B, 64)), jnp.int32)
    attend = functools.partial(latent_decode, scale=0.1, rank=512)
    alone = jax.jit(functools.partial(attend, config=TuningConfig(batch_invariant=True)))
    found = []
    for most in (40, 1000, 4000):
        lens = jnp.asarray(rng.integers(1, most, B), jnp.int32).at[1].set(3000)
        own = alone(q, latents, blocks, lens)[1]
        want = jax.jit(attend)(q, latents, blocks, lens)[1]
        np.testing.assert_allclose(*(x.astype(jnp.float32) for x in (own, want)), atol=0.04)
        found.append(np.asarray(own.view(jnp.uint16)))
    np.testing.assert_array_equal(found[1:], found[:1] * 2)


def shaped(H=16, D=576, S=64, dtype="bfloat16", kept="bfloat16"):
    return jax.ShapeDtypeStruct((2, H, D), dtype), jax.ShapeDtypeStruct((9, S, D), kept)


@lowers
@pytest.mark.parametrize(
    ("sizes", "rank", "words"),
    [
        (dict(kept="float8_e4m3fn"), 512, "wants one dtype, bfloat16 or float16, got bfloat16 and"),
        (dict(dtype="float32", kept="float32"), 512, "got float32 and float32"),
        (dict(D=544), 512, "wants values of 128, 256, 384 or 512 numbers, and 64 more of a key"),
        (dict(D=164), 100, "got 100 and 64"),
        (dict(H=96), 512, "wants at most 64 heads or a multiple of that, got 96"),
        (dict(S=48), 512, "wants a block_size that divides or is a multiple of 64, got 48"),
        (dict(S=4), 512, "wants a block_size"),
    ],
)
def test_what_the_kernel_does_not_serve_is_refused_in_words(sizes, rank, words):
    q, latents = shaped(**sizes)
    assert words in str(refuses(q, latents, rank))
    held = [jnp.zeros(x.shape, x.dtype) for x in (q, latents)]
    blocks, lens = jnp.zeros((2, 1), jnp.int32), jnp.ones(2, jnp.int32)
    with pytest.raises(ValueError, match=f"latent_decode .*{words[-20:]}"):
        latent_decode(held[0], held[1], blocks, lens, scale=1.0, rank=rank)


@lowers
@pytest.mark.parametrize("H", [1, 16, 20, 64, 128])
def test_the_kernel_serves_heads_of_models(H):
    assert refuses(*shaped(H), 512) is None


@pytest.mark.parametrize("case", ["prefill", "mixed, with cached prefixes"])
def test_tokens_of_prompts_are_rows_of_the_kernel(case, monkeypatch):
    """The kernel's oracle stands for it; what prompts attend to is that of plain JAX."""

    def stand_in(*args, config, **sizes):
        assert config == TuningConfig()
        return oracles.latent_decode(*args, **sizes)

    monkeypatch.setattr(latent_attention.latent_decode, "latent_decode", stand_in)
    problem, spec = Problem(case, "float32"), AttentionSpec(0, None, 0.3, value_dim=5)
    q, new = jnp.asarray(problem.q), jnp.asarray(problem.k[:, 0])
    cache = LatentCache(jnp.nan_to_num(problem.cache[0][:, 0]), None)
    cache = jax.jit(latent_reference.write_latents, static_argnums=3)(problem.batch, new, cache, 0)
    attend = jax.jit(latent_reference.attend, static_argnums=3)
    want = np.asarray(attend(problem.batch, q, cache, spec))
    got = np.asarray(LATENT_ATTENTION[0].run(problem.batch, q, cache, spec))
    for _, tokens, _ in problem.rows():
        np.testing.assert_allclose(got[tokens], want[tokens], atol=1e-6)


@pytest.mark.parametrize(
    ("case", "kept", "changes", "words"),
    [
        ("decode", "int8", {}, "wants latents without scales, got int8"),
        ("decode", "bfloat16", dict(window=8), "wants attention to all keys"),
        ("decode", "bfloat16", dict(soft_cap=8.0), "wants attention to all keys"),
    ],
)
def test_the_operation_refuses_batches_and_layers_in_words(case, kept, changes, words):
    batch = replace(Problem("prefill", "float32").batch, query_len=int(case == "decode"))
    q, latents = (jnp.zeros(x.shape, x.dtype) for x in shaped(kept=kept))
    scale = jnp.ones((9, 64)) if kept == "int8" else None
    spec = AttentionSpec(0, None, 1.0, value_dim=512)._replace(**changes)
    kernel = LATENT_ATTENTION[0]
    assert kernel.name == "latent_decode"
    assert words in str(kernel.refuses(batch, q, LatentCache(latents, scale), spec))
