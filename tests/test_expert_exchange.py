"""Tokens sent to the devices of their experts and back, on fake devices of a CPU."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrunner import LLM
from jaxrunner.hf_config import Settings
from jaxrunner.mixtures.experts import Routes
from jaxrunner.models.registry import read_model
from jaxrunner.parallel.exchange import exchanged
from jaxrunner.parallel.mesh import DATA, TENSOR, make_mesh
from jaxrunner.parallel.parallel_config import ParallelConfig
from tests.support import small_checkpoint
from tests.support.data_ranks import GREEDY, MIXTURE, RANKS, SIZES
from tests.support.lowering import compiled_by, compiles

T, E, OWN, K = 5, 3, 2, 4  # tokens of a rank, experts of a device, routes of a token
EXCHANGE: dict[str, Any] = dict(all2all_backend="ragged_all_to_all", all2all_token_threshold=3)
MESHES = {"ranks": (2, 3), "ranks of one device": (1, 3), "one rank": (3, 1)}


def scaled(first: Any, is_parts: bool, x: jax.Array, routes: Routes) -> jax.Array:
    """Stands for experts, of which number i multiplies by i + 1. Parts of others are anything."""
    each = (first + routes.experts + 1).astype(jnp.float32) * routes.weights
    each = jnp.where(routes.experts < OWN, each, jnp.nan if is_parts else 0)
    parts = each.T[..., None] * x[None]
    return parts if is_parts else parts.sum(0)


@functools.cache
def on(num_tensor: int, num_ranks: int, is_parts: bool) -> Any:
    mesh = make_mesh(num_tensor, jax.devices(), num_ranks)
    axes = (DATA, TENSOR) if num_ranks > 1 else (TENSOR,)

    def run(x: jax.Array, experts: jax.Array, weights: jax.Array) -> jax.Array:
        experts_of = functools.partial(scaled, OWN * jax.lax.axis_index(axes), is_parts)
        return exchanged(experts_of, x, Routes(experts, weights), OWN, axes)

    of_rank = jax.sharding.PartitionSpec(DATA if num_ranks > 1 else None)
    return jax.jit(
        jax.shard_map(run, mesh=mesh, in_specs=of_rank, out_specs=of_rank, check_vma=False)
    )


def routed(rng: Any, num: int, of: np.ndarray) -> np.ndarray:
    """Returns different experts for each token, of some, and none (the number of all) for a few."""
    found = np.stack([rng.permutation(of)[:K] for _ in range(num)])
    return np.where(rng.random((num, 1)) < 0.2, -1, found)


@pytest.mark.devices(6)
@pytest.mark.parametrize("is_parts", [False, True], ids=["sums", "parts"])
@pytest.mark.parametrize("mesh", MESHES)
def test_each_token_gets_the_sum_of_its_experts(mesh, is_parts):
    """Under any skew: also where all tokens of all devices go to the first two."""
    (N, D), rng = MESHES[mesh], np.random.default_rng(3)
    run, X = on(N, D, is_parts), N * D * OWN
    x = rng.standard_normal((D * T, E)).astype(np.float32)
    weights = rng.random((D * T, K)).astype(np.float32)
    for of in np.arange(X), np.arange(4), np.arange(X - 4, X):
        experts = routed(rng, D * T, of)
        factor = ((experts + 1) * weights).sum(1)  # of none 0
        got = run(x, np.where(experts < 0, X, experts).astype(np.int32), weights)
        np.testing.assert_allclose(got, factor[:, None] * x, rtol=1e-5)
        alone = rng.random((D * T, 1)) < 0.5  # the others have gone, their neighbours stay
        some = np.where(alone & (experts >= 0), experts, X).astype(np.int32)
        np.testing.assert_array_equal(run(x, some, weights), np.where(alone, got, 0))


@pytest.mark.slow
@compiles
def test_gpus_send_ragged_rows_and_gather_routes_alone():
    found, _ = compiled_by("aot_exchange.py")
    # The third gather is of what the devices of a rank have summed.
    assert found["ragged-all-to-all"] == 2 and found["all-gather"] <= 3 and len(found) == 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return small_checkpoint.save_family(tmp_path_factory.mktemp("mixture"), MIXTURE)


@pytest.fixture(scope="module")
def wanted(folder):
    return tokens(folder)


def tokens(folder: str, **changes: Any) -> list[list[int]]:
    prompts = [dict(prompt_token_ids=[n, *range(9), 5]) for n in range(9)]
    with LLM(folder, **SIZES | changes) as llm:
        outputs = llm.generate(prompts, GREEDY, on_error="raise")
    return [output.outputs[0].token_ids for output in outputs]


EPLB: dict[str, Any] = dict(num_redundant_experts=6, window_size=2, step_interval=3)


@pytest.mark.devices(6)
@pytest.mark.parametrize(
    "changes",
    [
        RANKS,
        pytest.param(
            dict(tensor_parallel_size=2, enable_expert_parallel=True), marks=pytest.mark.slow
        ),
        pytest.param(
            RANKS | dict(tensor_parallel_size=2, enable_eplb=True, eplb_config=EPLB),
            marks=pytest.mark.slow,
        ),
    ],
    ids=["data ranks", "tensor parallel", "ranks of two, balanced"],
)
def test_tokens_are_those_of_one_device(changes, folder, wanted, monkeypatch):
    seen = []
    monkeypatch.setattr(
        "jaxrunner.parallel.tensor.exchanged",
        lambda run, x, *args: seen.append(x.shape[0]) or exchanged(run, x, *args),
    )
    assert tokens(folder, **changes | EXCHANGE) == wanted
    assert set(seen) == {16}  # a prefill's; a decode's two tokens are below the threshold


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (dict(all2all_backend="pplx"), "all2all_backend='pplx' is none of allgather_reducescatter"),
        (dict(all2all_token_threshold=3), "threshold=3 is of all2all_backend='ragged_all_to_all'"),
        (EXCHANGE, "='ragged_all_to_all' wants whole experts on several devices: set enable_exp"),
    ],
)
def test_what_has_no_effect_is_refused(changes, words):
    with pytest.raises(ValueError, match=words):
        ParallelConfig(**changes).cut(*read_model(Settings(MIXTURE)))
