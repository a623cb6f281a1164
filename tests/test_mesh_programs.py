"""Programs on a mesh: kept from one process to the next, shared by engines, lowered beside them."""

from dataclasses import replace
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache
import numpy as np
import pytest

from jaxrunner.api.sampling_params import SamplingParams
from jaxrunner.device import lowering
from jaxrunner.device.lowering import Build, LoweringProcess, lower, lowering_task
from jaxrunner.device.parts import parts
from jaxrunner.device.program_spec import usual_spec
from jaxrunner.engine.engine import Engine
from jaxrunner.models.llama import llama
from jaxrunner.parallel.mesh import make_mesh
from jaxrunner.parallel.tensor import shard
from jaxrunner.program.bucket import Bucket
from jaxrunner.programs.program_cache import OWN
from jaxrunner.programs.program_table import LOADED, Key
from tests.support import tiny

pytestmark = pytest.mark.devices(6)

SIZES = dict(hidden_size=24, intermediate_size=32, num_attention_heads=8, vocab_size=64, head_dim=4)
SIZES |= dict(num_key_value_heads=4)
KEY = Key("step", Bucket(5, 5, 1))
GREEDY = SamplingParams(temperature=0, max_tokens=8)


@pytest.fixture(autouse=True, scope="module")
def no_cache_of_jax():
    """What JAX loads from its own cache cannot be serialised once more."""
    folder = getattr(jax.config, OWN[1])
    jax.config.update(OWN[1], None)
    compilation_cache.reset_cache()
    lowering._lower.cache_clear()
    parts._first.cache_clear()
    yield
    jax.config.update(OWN[1], folder)


def engine(folder=None, num=2, first=0, model=llama) -> Engine:
    """Returns an engine on `num` devices, by number from `first` on."""
    config = tiny.config(**SIZES)
    whole = jax.tree.map(np.asarray, tiny.random_params(config))
    made, on_mesh = shard(model, config, make_mesh(num, jax.local_devices()[first:]))
    return Engine(made, on_mesh, tiny.engine_config(), whole, cache_dir=folder)


def tokens(made: Engine) -> list[int]:
    request = made.add("a", [3, 1, 4, 1, 5], GREEDY)
    while made.has_unfinished:
        made.step()
    return request.output_token_ids


def reasons(made: Engine) -> set[str]:
    return {compilation.reason for compilation in made.runner.programs.ledger}


@pytest.mark.slow
def test_a_second_start_loads_what_a_mesh_has_compiled(tmp_path):
    told = []
    for _ in range(2):
        made = engine(tmp_path, first=4)
        made.warm_up()
        told.append((reasons(made), tokens(made)))
        assert made.runner.state.kv[0].k.devices() == set(jax.local_devices()[4:6])
        made.close()
    assert told == [({"warm-up"}, told[0][1]), ({LOADED}, told[0][1])]


def test_other_meshes_have_their_own(tmp_path):
    """An executable holds the numbers of its devices, too."""
    meshes: list[dict[str, Any]] = [dict(num=2), dict(num=4), dict(num=2, first=2), dict(num=2)]
    caches = [engine(tmp_path, **mesh).runner.programs._cache for mesh in meshes]
    paths = [cache._path(KEY) for cache in caches if cache is not None]
    assert len({*paths}) == 3 and paths[0] == paths[-1]

    def layers(*args, **kwargs):
        return llama.layers(*args, **kwargs)

    other = engine(tmp_path, model=llama._replace(layers=layers))
    assert other.runner.programs._cache is None  # code of others is not kept


def test_engines_of_one_mesh_share_what_is_lowered():
    builds: list[Build] = [lower(engine().runner.programs._spec(KEY)) for _ in range(2)]
    assert builds[0] is builds[1]


@pytest.mark.slow
def test_a_process_lowers_for_a_mesh():
    lowering._lower.cache_clear()
    parts._first.cache_clear()
    made = engine()
    program, params = replace(made.runner.program, rules=()), made.runner.params_spec
    task = lowering_task(usual_spec, program, params)
    assert task is not None
    process, spec = LoweringProcess(task), made.runner.programs._spec(KEY)
    theirs, ours = process.lower(KEY, spec), lower(spec)
    process.close()
    for word in ("stablehlo.all_reduce", "stablehlo.dot_general", "jax.buffer_donor"):
        counts = {build._lowered.as_text().count(word) for build in (theirs, ours)}
        assert len(counts) == 1 and counts != {0}, word
    want = tokens(made)
    made.runner.programs._table[KEY] = theirs.executable
    assert tokens(made) == want
