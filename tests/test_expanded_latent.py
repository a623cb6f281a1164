"""Latent attention of prompts by keys and values of each head, against float64 and absorbed."""

from dataclasses import replace
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrunner.bench.presets import PRESETS
from jaxrunner.caches.latent import LatentCache
from jaxrunner.config import EngineConfig
from jaxrunner.device.operations import operations
from jaxrunner.device.program_key import Key
from jaxrunner.hf_config import Settings
from jaxrunner.kernels_pallas import reference
from jaxrunner.loading.declared import abstract_params
from jaxrunner.model import AttentionSpec
from jaxrunner.models.registry import read_model
from jaxrunner.operation import Operation, unnoted
from jaxrunner.ops import backends
from jaxrunner.ops.latent import attention as latent_attention
from jaxrunner.ops.latent import expanded as expanded_latent
from jaxrunner.ops.latent.expanded import expanded, refuses
from jaxrunner.program.bucket import Bucket
from jaxrunner.program.program import Program
from jaxrunner.sampling import RULES
from tests.support import oracles
from tests.support.lowering import cuda, lowers
from tests.support.paged_attention import Problem

RANK, STILL, VALUE, HEADS = 5, 7, 4, 6  # and 3 numbers of each key and query that are turned
SPEC = AttentionSpec(0, None, 0.3, value_dim=RANK)
PLAIN = Operation("expanded", functools.partial(expanded, attend=reference.attend))


@functools.partial(jax.jit, static_argnums=(5, 6))
def run(batch, q, latents, up, cache, prompts, room):
    """room: is a part of the key of what is compiled, as it is read when this is traced."""
    args = batch, unnoted, q, latents, up, cache, SPEC
    return latent_attention.attend_latent(latent_attention.PLAIN, *args, prompts=prompts)[0]


@pytest.mark.parametrize("case", ["prefill", "mixed, with cached prefixes", "with empty rows"])
def test_prompts_see_what_absorbed_ones_see(case, monkeypatch):
    """What is there of others is NaN; rows of one token and of none are among them."""
    problem, rng = Problem(case, "float32"), np.random.default_rng(1)
    q = rng.normal(size=(len(problem.q), HEADS, STILL + 3)).astype(np.float32)
    up = rng.normal(size=(STILL + VALUE, HEADS, RANK)).astype(np.float32)
    cache = LatentCache(latents=jnp.asarray(problem.cache[0][:, 0]), scale=None)
    args = [problem.batch, *map(jnp.asarray, (q, problem.k[:, 0], up)), cache]
    told = [run(*args, (PLAIN,), 2), run(*args, (), 2)]
    monkeypatch.setattr(expanded_latent, "ROOM", 0)
    told.append(run(*args, (PLAIN,), 0))
    none: dict[str, Any] = dict(window=None, soft_cap=None, sinks=None)
    for b, tokens, positions in problem.rows():
        rows = [problem.history[b, 0, : problem.computed[b], 0], problem.k[tokens, 0]]
        latents = np.concatenate(rows).astype(np.float64)
        made = np.einsum("pr,ohr->hpo", latents[:, :RANK], up.astype(np.float64))
        turned = np.broadcast_to(latents[:, RANK:], (HEADS, len(latents), 3))
        keys = np.concatenate([made[..., :STILL], turned], -1)
        wide = np.pad(made[..., STILL:], ((0, 0), (0, 0), (0, STILL + 3 - VALUE)))
        of_row = q[tokens].astype(np.float64), keys, wide, positions
        want = oracles.one_row(*of_row, scale=SPEC.scale, **none)[..., :VALUE]
        for got in told:
            np.testing.assert_allclose(got[tokens], want, atol=1e-5)


def refused(
    *, spec: AttentionSpec = SPEC, T: int = 512, V: int = VALUE, query_len: int = 0,
    up: Any = None, scale: Any = None,
) -> str:  # fmt: skip
    batch = replace(Problem("prefill", "float32").batch, query_len=query_len)
    q = jnp.zeros((T, HEADS, STILL + 3), jnp.bfloat16)
    up = jnp.zeros((STILL + V, HEADS, RANK), jnp.bfloat16) if up is None else up
    cache = LatentCache(latents=jnp.zeros((2, 4, RANK + 3), jnp.bfloat16), scale=scale)
    return str(refuses(batch, q, up, cache, spec, lambda batch, q: q))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (dict(query_len=1), "wants rows side by side, not 1 tokens apart"),
        (dict(T=511), "wants steps of 512 tokens, got 511"),
        (dict(up="adapted"), "wants weights without adapters, got str"),
        (dict(scale=jnp.ones((2, 4))), "wants latents without scales, got bfloat16"),
        (dict(spec=SPEC._replace(window=9)), "wants attention to all keys, without a cap or sinks"),
        (dict(V=STILL + 4), "wants values no wider than keys, got 11 and 10"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_what_is_not_served_is_absorbed(changes, words):
    assert refused(**changes) == words


@lowers
def test_the_kernel_of_prompts_serves_deepseeks_sizes():
    assert "wants a head_dim that is a multiple of 16" in refused()
    lite = PRESETS["deepseek_v2_lite"].config | dict(num_hidden_layers=1)
    model, config = read_model(Settings(lite))
    sizes: dict[str, Any] = dict(dtype="bfloat16", kv_dtype="bfloat16", num_blocks=40)
    params = abstract_params(model, config, "bfloat16")
    told = []
    # A kernel that runs where keys of all rows have room goes by all rows.
    for ops, T, Q in (
        (backends.fused, 512, 0), (backends.fused, 256, 0), (backends.fused, 8, 1),
        (backends.BATCH_INVARIANT, 512, 0),
    ):  # fmt: skip
        program = Program(
            model, config, EngineConfig(max_model_len=256, **sizes), ops, tuple(RULES)
        )
        with cuda():
            found = operations(program, params, Key("step", Bucket(T, 8, Q)))
        told.append({one.name for one in found})
    assert ["expanded" in names for names in told] == [True, False, False, False]
    assert all("latent_decode" in names for names in told)
