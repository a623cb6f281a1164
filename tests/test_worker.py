"""vLLM's worker, by its method names and in its order."""

from dataclasses import replace
from pathlib import Path
import shutil
from typing import Any

import jax
import numpy as np
import pytest

from jaxrunner import LLM, SamplingParams, embedded
from jaxrunner.worker import sizing
from jaxrunner.worker.worker import Worker
from tests.support import tiny
from tests.support.small_llm import SIZES, live_bytes

GREEDY = SamplingParams(temperature=0.0, max_tokens=6)
PROMPT = [5, 17, 300]
SETTINGS: dict[str, Any] = {
    k: v for k, v in SIZES.items() if k not in ("use_tqdm", "warm_up", "num_blocks")
}


def make(**changes: Any) -> Worker:
    settings: dict[str, Any] = SETTINGS | dict(num_blocks=16) | changes
    return Worker(str(embedded.PATH), **settings)


def ready(worker: Worker) -> Worker:
    worker.init_device()
    worker.load_model()
    worker.initialize_from_config()
    return worker


@pytest.fixture(scope="module")
def worker():
    worker = ready(make())
    yield worker
    worker.shutdown()


def generate(worker: Worker) -> list[int]:
    """Drives one request by hand, from its admission to its end."""
    new, out = [tiny.new_request("a", PROMPT, blocks=[0, 1], params=GREEDY)], []
    for count in (len(PROMPT), 1, 1, 1):
        worker.execute_model(tiny.scheduled({"a": count}, new))
        out += worker.sample_tokens().get().sampled_token_ids[0]
        new = []
    worker.execute_model(tiny.scheduled({}, finished_req_ids={"a"}))
    assert worker.sample_tokens().get().req_ids == ()
    return out


@pytest.fixture(scope="module")
def llm():
    with LLM(str(embedded.PATH), skip_tokenizer_init=True, **SIZES) as llm:
        yield llm


def test_a_worker_set_up_in_order_gives_the_tokens_of_an_llm(worker: Worker, llm: LLM):
    prompt = {"prompt_token_ids": PROMPT}
    [want] = [o.outputs[0].token_ids for o in llm.generate(prompt, GREEDY, use_tqdm=False)]
    assert generate(worker) == want[:4]
    assert worker.get_supported_tasks() == ("generate",)
    worker.check_health()


def test_memory_and_specs_say_how_many_blocks_fit():
    worker = make(num_blocks=None, kv_cache_memory_bytes=1 << 20, kv_cache_dtype="int8")
    worker.init_device()
    worker.load_model()
    specs, config = worker.get_kv_cache_spec(), worker._loaded.config
    assert list(specs)[1] == "model.layers.1.self_attn.attn"
    assert len(specs) == config.num_hidden_layers
    K, D = config.dims["K"], config.dims["D"]
    block = sum(spec.page_size_bytes for spec in specs.values())
    fitting = min((1 << 20) // block, 2 * 4)  # no slot needs more
    assert set(specs.values()) == {(16, K, D, "int8", None, 2 * 16 * K * (D + 4), fitting, None)}
    assert worker.determine_available_memory() == fitting * block
    worker.initialize_from_config(worker.determine_available_memory() // block)
    state = worker.runner.state
    assert sum(x.nbytes for x in jax.tree.leaves(state.kv)) == fitting * block
    with pytest.raises(RuntimeError, match="initialize_from_config was called: shutdown first"):
        worker.initialize_from_config(3)
    worker.shutdown()


def test_a_wrong_order_is_told():
    worker = make()
    with pytest.raises(RuntimeError, match="load_model needs a device: call init_device first"):
        worker.load_model()
    for early in (worker.determine_available_memory, worker.get_kv_cache_spec,
                  worker.initialize_from_config):  # fmt: skip
        with pytest.raises(RuntimeError, match="the worker has no model: call load_model first"):
            early()
    for early in (worker.compile_or_warm_up_model, worker.sample_tokens, worker.sleep,
                  lambda: worker.execute_model(tiny.scheduled({}))):  # fmt: skip
        with pytest.raises(RuntimeError, match="has no runner: call initialize_from_config first"):
            early()


def test_a_shutdown_gives_memory_back_and_may_be_repeated():
    before = live_bytes()
    worker = ready(make())
    assert worker.compile_or_warm_up_model() < 60 and live_bytes() > before
    for _ in range(2):
        worker.shutdown()
        assert live_bytes() <= before
    with pytest.raises(RuntimeError, match="the worker has no runner"):
        worker.execute_model(tiny.scheduled({}))
    worker.init_device()
    worker.load_model()
    worker.shutdown()
    assert live_bytes() <= before


def test_a_start_chooses_once_what_is_compiled(monkeypatch):
    calls, build = [], sizing.build
    monkeypatch.setattr(sizing, "build", lambda *a, **k: calls.append(a) or build(*a, **k))
    worker = ready(make())
    assert len(calls) == 1 and worker.runner.program.engine.num_blocks == 16
    worker.shutdown()
    with LLM(str(embedded.PATH), skip_tokenizer_init=True, **SIZES) as llm:
        assert len(calls) == 2 and llm.runner.program.engine == llm.engine.config


def test_a_worker_sleeps_between_requests(worker: Worker):
    first, awake = generate(worker), live_bytes()
    held = sum(x.nbytes for x in jax.tree.leaves((worker.params, worker.runner.state)))
    worker.execute_model(tiny.scheduled({"a": 3}, [tiny.new_request("a", PROMPT, blocks=[0])]))
    worker.sample_tokens()
    with pytest.raises(RuntimeError, match="requests have slots: name them in finished_req_ids"):
        worker.sleep()
    worker.execute_model(tiny.scheduled({}, finished_req_ids={"a"}))
    worker.sleep()
    assert live_bytes() <= awake - held
    with pytest.raises(RuntimeError, match="kv_cache and weights sleep: call wake_up"):
        worker.execute_model(tiny.scheduled({}))
    worker.wake_up()
    assert generate(worker) == first


@pytest.mark.parametrize("kind", ["worker", "llm"])
def test_what_is_reloaded_follows_the_config(kind, request, tmp_path: Path):
    owner: Any = request.getfixturevalue(kind)
    old = owner.params
    owner.update_params(jax.tree.map(lambda x: 2 * x, old))
    owner.save_sharded_state(tmp_path)
    shutil.copy(embedded.PATH / "config.json", tmp_path)
    owner.reload_weights()
    jax.tree.map(np.testing.assert_array_equal, owner.params, old)
    owner.update_config({
        "load_config": {"load_format": "sharded_state"}, "model_config": {"model": str(tmp_path)}
    })  # fmt: skip
    owner.reload_weights()
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(x, 2 * y), owner.params, old)
    words = "load_format must be one of"
    with pytest.raises(ValueError, match=words):
        owner.update_config({"load_config": {"load_format": "pt"}, "model_config": {"model": "x"}})
    words = r"model_config.max_model_len cannot change while .* \['model', 'revision'\] can: build"
    with pytest.raises(ValueError, match=words):
        owner.update_config({"model_config": {"max_model_len": 3}})
    with pytest.raises(
        ValueError, match=r"cache_config.num_blocks cannot change while .* \[\] can"
    ):
        owner.update_config({"cache_config": {"num_blocks": 3}})
    owner.update_config({
        "load_config": {"load_format": "dummy"}, "model_config": {"model": str(embedded.PATH)}
    })  # fmt: skip
    owner.reload_weights()
    assert not np.array_equal(owner.params.embed, old.embed)
    owner.reload_weights(embedded.PATH)
    jax.tree.map(np.testing.assert_array_equal, owner.params, old)


def test_an_llm_changes_what_is_not_compiled_in(llm: LLM):
    prompt = {"prompt_token_ids": PROMPT}
    first = llm.generate(prompt, GREEDY, use_tqdm=False)[0].outputs[0].token_ids
    llm.update_config({"engine_config": {"async_depth": 1}})
    assert llm.engine.config.async_depth == 1
    assert llm.generate(prompt, GREEDY, use_tqdm=False)[0].outputs[0].token_ids == first
    for values, words in [
        ({"num_decode_steps": 4}, "num_decode_steps=4 was not compiled, 1 and 1 can be set: build"),
        ({"async_depth": 0}, "async_depth must be an integer of at least 1"),
        ({"num_blocks": 9}, "engine_config.num_blocks cannot change while the model is at work"),
    ]:
        with pytest.raises(ValueError, match=words):
            llm.update_config({"engine_config": values})
    assert llm.engine.config.async_depth == 1


@pytest.mark.parametrize(
    ("method", "argument", "words"),
    [
        ("save_params", 3, "folder must be a string or a Path, got 3 of int"),
        ("load_params", "\0", "folder=.* can be no path, which has at most 4096 characters"),
        ("sleep", True, "level must be 1 or 2"),
        ("wake_up", 3, "tags must be a list"),
        ("check_health", "soon", "timeout_s must be a finite number"),
        ("profile", "yes", "is_start must be True or False"),
        ("update_config", 3, "overrides must be a dict from names of configs .*, got 3"),
        ("update_config", {"load_config": 3}, "overrides must be .*, got among them 'load_c"),
        ("update_config", {"model_config": {"model": 3}}, "model must be a string or a Path"),
        (
            "update_params",
            {1: 2},
            "must have the leaves of those they replace, in Params, got dict",
        ),
    ],
)
def test_arguments_that_have_no_meaning_are_named(worker: Worker, method, argument, words):
    with pytest.raises((TypeError, ValueError), match=words):
        getattr(worker, method)(argument)
    with pytest.raises(TypeError, match="params must be a tree of arrays: ValueError"):
        worker.update_params(replace(worker.params, embed={1: 2, "a": 3}))
    assert not worker.is_sleeping()


def test_a_profile_by_vllms_name(worker: Worker, tmp_path: Path):
    with pytest.warns(UserWarning, match="no profile is recorded, so none is ended"):
        worker.profile(is_start=False)
    with pytest.raises(ValueError, match="profile_prefix must name a folder the first time"):
        worker.profile()
    for prefix in (tmp_path / "first", None):
        worker.profile(True, prefix)
        generate(worker)
        worker.profile(False)
        assert list((tmp_path / "first").rglob("perfetto_trace.json.gz"))
        shutil.rmtree(tmp_path / "first")
