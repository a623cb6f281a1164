"""Weights and snapshots of a mesh: what one saves, another restores, and tokens are equal."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxrunner import pytree
from jaxrunner.api.sampling_params import SamplingParams
from jaxrunner.engine.engine import Engine
from jaxrunner.engine.snapshots.snapshot import restore_engine, save_engine
from jaxrunner.hf_config import Settings
from jaxrunner.loading import safetensors_file, sharded_state
from jaxrunner.loading.declared import abstract_params
from jaxrunner.loading.loader import LoadConfig
from jaxrunner.loading.weights import _maker, load_params, random_params, save_checkpoint
from jaxrunner.models.llama import llama
from jaxrunner.parallel.drafter import shard_drafter
from jaxrunner.parallel.mesh import make_mesh
from jaxrunner.parallel.placement import place
from jaxrunner.parallel.tensor import shard
from jaxrunner.parallel.whole import copied, merge, whole_config, whole_params
from jaxrunner.speculators import eagle as heads
from jaxrunner.speculators.draft_model import DraftModelConfig, draft_model
from jaxrunner.speculators.drafted import with_drafter
from jaxrunner.speculators.drafter import Drafted
from jaxrunner.speculators.eagle import eagle
from tests.support import tiny

# Two KV heads: on two devices each has one, on four both are copied.
SIZES: dict[str, Any] = dict(
    hidden_size=24, intermediate_size=32, num_attention_heads=8, vocab_size=64, head_dim=4,
    num_key_value_heads=2, attention_bias=True, num_hidden_layers=1,
)  # fmt: skip
PROMPT, GREEDY = [3, 1, 4, 1, 5, 9, 2], SamplingParams(temperature=0, max_tokens=12)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Returns a config, two checkpoints of it, and what one device answers with each."""
    config = tiny.config(**SIZES)
    folders, told = [], []
    for seed in (3, 4):
        folders.append(tmp_path_factory.mktemp("checkpoint"))
        params = tiny.random_params(config, seed)
        save_checkpoint(folders[-1], llama, config, params, tiny.SETTINGS | SIZES)
        told.append(tokens(engine(config, folders[-1], 1)))
    assert told[0] != told[1]
    return config, folders, told


def engine(config, folder: Path, num: int) -> Engine:
    """Returns an engine of a checkpoint on `num` devices."""
    model, on = (llama, config) if num == 1 else shard(llama, config, make_mesh(num))
    params = load_params(folder, model, on, dtype="float32", progress=False)
    made = Engine(model, on, tiny.engine_config(num_decode_steps=2, block_size=2), params)
    made.worker.load_config = LoadConfig(folder)
    return made


def tokens(made: Engine, request=None) -> list[int]:
    request = request or made.add("a", PROMPT, GREEDY)
    while made.has_unfinished:
        made.step()
    return request.output_token_ids


@pytest.mark.devices(2)
def test_random_weights_are_those_of_one_device_and_made_in_shards():
    config = tiny.config(**SIZES)
    model, on = shard(llama, config, make_mesh(2))
    one, cut = random_params(llama, config, "float32", 0), random_params(model, on, "float32", 0)
    jax.tree.map(np.testing.assert_array_equal, one, cut)
    shape, dtype, at = cut.embed.shape, cut.embed.dtype, cut.embed.sharding
    maker: Any = _maker(shape, dtype, None, at)
    text = maker.lower(jax.random.key(0)).compile().as_text()
    whole, half = (f"f32[{rows},{shape[1]}]" for rows in (shape[0], shape[0] // 2))
    assert half in text and whole not in text


def leaves_on(made: Engine) -> set[int]:
    return {len(x.sharding.device_set) for x in jax.tree.leaves(made.runner.params)}


@pytest.mark.devices("num")
@pytest.mark.slow
@pytest.mark.parametrize("num", [2, 4])
def test_every_way_to_new_weights(saved, num):
    config, (old, new), (before, after) = saved
    made = engine(config, old, num)
    worker, spec = made.worker, made.runner.params_spec
    own = jax.device_get(worker.params)
    assert tokens(made) == before
    worker.reload_weights(new)
    assert tokens(made) == after
    worker.update_params(own)  # of the host
    assert tokens(made) == before
    path = new / "model.safetensors"
    header = safetensors_file.read_header(path)
    tensors = {name: safetensors_file.read(path, name, of) for name, of in header.items()}
    worker.start_weight_update()
    for name in tensors:
        worker.update_weights({name: tensors[name]})
    worker.finish_weight_update()
    assert tokens(made) == after
    for level in (1, 2):
        made.step()  # slots are given back
        worker.sleep(level)
        worker.wake_up()
        if level == 2:
            worker.reload_weights(old)
        assert tokens(made) == (after if level == 1 else before)
    where = [x.sharding.is_equivalent_to(y.sharding, x.ndim) for x, y in zip(
        jax.tree.leaves(made.runner.params), jax.tree.leaves(spec), strict=True)]  # fmt: skip
    assert all(where) and leaves_on(made) == {num}


@pytest.mark.devices(4)
@pytest.mark.parametrize(
    "one,other", [(1, 2), (2, 1), pytest.param(2, 4, marks=pytest.mark.slow), (4, 1)]
)
def test_what_a_mesh_saves_another_reads(saved, one, other, tmp_path):
    config, (old, new), (before, after) = saved
    first, second = engine(config, old, one), engine(config, new, other)
    first.worker.save_params(tmp_path / "orbax")
    second.worker.load_params(tmp_path / "orbax")
    assert tokens(second) == before and leaves_on(second) == {other}
    first.worker.save_sharded_state(tmp_path / "state", max_size=9000)
    program = second.runner.program
    params = sharded_state.load(
        tmp_path / "state", program.model, program.config, dtype="float32", progress=False
    )
    second.worker.reload_weights(new)
    assert tokens(second) == after
    second.update_params(params)
    assert tokens(second) == before
    request = first.add("b", PROMPT, GREEDY)
    while len(request.output_token_ids) < 4:
        first.step()
    save_engine(first, tmp_path / "engine")
    live = restore_engine(second, tmp_path / "engine").requests["b"]
    assert 4 <= len(live.output_token_ids) < 12 and tokens(second, live) == before
    cache = second.runner.state.kv[0].k
    assert len(cache.sharding.device_set) == other
    assert cache.sharding.shard_shape(cache.shape)[1] == max(config.num_key_value_heads // other, 1)


@pytest.mark.devices(4)
def test_weights_of_the_host_are_placed(saved):
    config, (old, _), (before, _) = saved
    made = engine(config, old, 4)
    model, on, params = made.runner.program.model, made.model_config, made.runner.params
    given = jax.tree.map(np.asarray, params)
    again = Engine(model, on, made.config, given)
    assert tokens(again) == before
    for x, y in zip(jax.tree.leaves(again.runner.params), jax.tree.leaves(params), strict=True):
        assert x.sharding.is_equivalent_to(y.sharding, x.ndim)
    with pytest.raises(ValueError, match="params must be a Params with the leaves that its config"):
        Engine(model, on, made.config, {"embed": given})


@pytest.mark.devices(4)
@pytest.mark.parametrize("method", ["eagle", "draft_model"])
def test_a_drafter_has_its_own_heads_to_merge(method):
    config, mesh = tiny.config(**SIZES), make_mesh(4)
    if method == "eagle":
        own = dict(num_hidden_layers=1, attention_bias=False)
        settings = Settings(tiny.SETTINGS | SIZES | own)
        family, own = eagle, heads.read(settings, config, frozenset())
    else:
        other = tiny.config(**SIZES | dict(num_key_value_heads=4))
        family, own = draft_model(llama), DraftModelConfig(llama, other)
    _, alone = with_drafter(llama, config, family, own, 2)
    model, on_mesh = with_drafter(*shard(llama, config, mesh), *shard_drafter(family, own, mesh), 2)
    assert whole_config(on_mesh).dims | dict(drafter=0) == alone.dims | dict(drafter=0)
    whole = whole_params(model.params, on_mesh)
    params = pytree.abstract(Drafted, alone.dims | {"param": "float32"})
    assert whole == params
    where = abstract_params(model, on_mesh, "float32")
    made = jax.tree.map(lambda x: np.arange(x.size, dtype=x.dtype).reshape(x.shape), whole)
    there = place(copied(made, where), where)
    assert [x.shape for x in jax.tree.leaves(there)] == [x.shape for x in jax.tree.leaves(where)]
    jax.tree.map(np.testing.assert_array_equal, merge(there, whole), made)
