"""Stages of a pipeline in two processes give the tokens of one device."""

import threading
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrunner import LLM
from jaxrunner.errors import StepTimeout
from jaxrunner.hf_config import Settings
from jaxrunner.mixtures.eplb_config import EplbConfig
from jaxrunner.mixtures.recorded_routes import with_recorded_routes
from jaxrunner.models.registry import read_model
from jaxrunner.parallel import pipeline, stage_link
from jaxrunner.parallel.parallel_config import ParallelConfig
from tests.support import crowd, processes, small_checkpoint, tiny
from tests.support.failing import Hanging
from tests.support.two_processes import start, told_by

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        jax.default_backend() != "cpu", reason="each process has devices of its own: those of a CPU"
    ),
]
PROGRAM = "tests.support.stage_processes"
NOT_OVER_PROCESSES = (
    "save_state", "restore_state", "save_params", "load_params", "save_sharded_state",
    "warm_up='background'",
)  # fmt: skip


@pytest.fixture(scope="module")
def told(tmp_path_factory) -> tuple[Any, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("checkpoint")
    checkpoint = small_checkpoint.save(folder, num_key_value_heads=2, num_hidden_layers=2)
    started = start(PROGRAM, checkpoint)
    with LLM(str(checkpoint), tokenizer=processes.tokenizer(), **processes.SIZES) as llm:
        want = processes.answers(llm)
    return want, [told_by(process) for process in started]


def test_tokens_are_those_of_one_device(told):
    want, both = told
    assert want[4][:4] == [32, 33, 33, 32]  # ABBA, as its grammar wants
    for one in both:
        assert one["tokens"] == one["after a sleep"] == want
    first, last = (set(one["kinds"]) for one in both)
    assert first == {"stage", "receive", "admit"} and {"step", "forward", "sample"} <= last


def test_what_processes_cannot_do_together_is_refused(told):
    _, both = told
    wanted = [
        *(f"{name} does not go with a pipeline over 2 processes: " for name in NOT_OVER_PROCESSES),
        "pipeline_parallel_size=2 does not go with drafts of layers, of 'auto' numbers, or of some",
        "pipeline_parallel_size=2 with tensor_parallel_size=3 needs 6 devices, there are 4 (cpu)",
    ]
    for one in both:
        for words, want in zip(one["refused"], wanted, strict=True):
            assert words.startswith(want)


@pytest.mark.slow
def test_requests_that_crowd_each_other_get_the_tokens_of_one_device():
    """Rules, grammars, logprobs, preemption, and requests that end early."""
    started, config = start(PROGRAM, "crowded"), tiny.config(**crowd.QWEN)
    one = crowd.engine((config, tiny.random_params(config, seed=5)), num_blocks=60)
    wanted = crowd.answers(one, 1)
    for told in map(told_by, started):
        assert told["preemptions"]
        for (reason, tokens, logprobs), want in zip(told["answers"], wanted, strict=True):
            ids = want.output_token_ids
            assert tokens == (ids[: len(tokens)] if reason == "abort" else ids)
            if reason != "abort":
                np.testing.assert_allclose(logprobs, crowd.logprobs(want), atol=2e-3)


def mesh_of(*processes: int) -> Any:
    """Stands for a mesh of devices of these processes."""
    return SimpleNamespace(devices=np.array([SimpleNamespace(process_index=i) for i in processes]))


def test_each_process_has_stages_and_each_stage_one_process(monkeypatch):
    monkeypatch.setattr("jax.process_count", lambda: 2)
    assert pipeline._held([mesh_of(0), mesh_of(0), mesh_of(1)], "P") == range(2)
    with pytest.raises(ValueError, match=r"P wants each stage on devices of one process, got st.*"):
        pipeline._held([mesh_of(0, 0), mesh_of(0, 1)], "P")
    monkeypatch.setattr("jax.process_count", lambda: 3)
    with pytest.raises(ValueError, match=r"P leaves processes \[2\] without a stage: raise it"):
        pipeline._held([mesh_of(0), mesh_of(1)], "P")


class Store:
    """A key-value store that answers at once."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.key_value_delete = self.values.pop

    def key_value_set_bytes(self, key: str, value: bytes, overwrite: bool) -> None:
        self.values[key] = value

    def blocking_key_value_get_bytes(self, key: str, timeout_ms: int) -> bytes:
        if key not in self.values:
            raise jax.errors.JaxRuntimeError("DEADLINE_EXCEEDED" if key != "lost" else "ABORTED")
        return self.values[key]


def test_a_vector_is_told_once_and_awaited_for_so_long(monkeypatch):
    store = Store()
    monkeypatch.setattr(stage_link, "_store", lambda: store)
    late = stage_link.Told(None, ["a"])
    with pytest.raises(StepTimeout, match="no process told the tokens of a step in step_timeout_s"):
        late.wait(0.0)
    with pytest.raises(jax.errors.JaxRuntimeError, match="ABORTED"):
        stage_link.Told(None, ["lost"]).wait()
    hangs: Any = Hanging(end := threading.Event())
    with pytest.raises(StepTimeout, match=r"device did not do a step in step_timeout_s=0\.01: end"):
        stage_link.Told(hangs, ["a"]).wait(0.01)
    end.set()
    own = stage_link.Told(jnp.arange(3, dtype=jnp.int32), ["a", "b"])
    assert not late.is_ready()
    np.testing.assert_array_equal(own, [0, 1, 2])
    np.testing.assert_array_equal(late, own.wait())
    assert [*store.values] == ["b"] and late.is_ready()
    own.wait()  # and tells no more
    assert [*store.values] == ["b"]


@pytest.mark.devices(2)
def test_what_reads_the_devices_of_all_stages_is_refused_over_processes(monkeypatch):
    settings = tiny.SETTINGS | processes.MIXTURE | dict(num_hidden_layers=2)
    model, config = read_model(Settings(settings))
    monkeypatch.setattr(pipeline, "is_spread", lambda config: True)
    with pytest.raises(
        ValueError, match=r"^enable_eplb=True does not go with a pipeline over 1 pr"
    ):
        ParallelConfig(pipeline_parallel_size=2, eplb=EplbConfig()).cut(model, config)
    with pytest.raises(
        ValueError, match=r"^enable_return_routed_experts=True does not go with a p"
    ):
        ParallelConfig(pipeline_parallel_size=2).cut(*with_recorded_routes(model, config))
