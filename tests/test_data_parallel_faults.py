"""Engines side by side of which one fails, or that cannot be made: who is told, what goes on."""

from typing import Any

import jax
import pytest

from jaxrunner import LLM
from jaxrunner.engine.engine import Engine
from jaxrunner.worker.worker import Worker
from tests.support.replicas import GREEDY, TWO, folder, ids, open_llm

__all__ = ["folder"]  # a fixture


def fail(engine: Engine, monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Makes methods of an engine's runner raise."""

    def die(*_: Any, **__: Any) -> None:
        raise jax.errors.JaxRuntimeError("INTERNAL: the device fell off the bus")

    for name in names:
        monkeypatch.setattr(engine.runner, name, die)


ASKED = ids([[i] * 5 for i in range(4)])  # two for each


def errors(llm: LLM) -> list[str]:
    outputs = llm.generate(ASKED, GREEDY, use_tqdm=False)
    return [output.error or "" for output in outputs]


@pytest.mark.slow
@pytest.mark.devices(2)
def test_what_an_engine_loses_is_its_requests_alone(folder, monkeypatch, caplog):
    with open_llm(folder, **TWO) as llm:
        first, second = llm.engine.engines
        with monkeypatch.context() as patch:
            fail(second, patch, "step")
            told = errors(llm)
        assert told[::2] == ["", ""] and all("fell off the bus" in e for e in told[1::2])
        assert errors(llm) == [""] * 4
        fail(first, monkeypatch, "step", "restart")
        told = errors(llm)
        assert told[1::2] == ["", ""] and all("fell off the bus" in e for e in told[::2])
        # It has ended: the other gets all.
        assert errors(llm) == [""] * 4
        assert f"replica 0 on {jax.devices()[0]}: the device state was lost" in llm.report()
        alive = [vars(m)["value"] for m in llm.get_metrics() if m.name == "jaxrunner:engine_alive"]
        assert alive == [0, 1] and llm.runner is second.runner
        llm.update_params(jax.device_get(llm.params))
        assert errors(llm) == [""] * 4
        fail(second, monkeypatch, "step", "restart")
        assert "fell off the bus" in errors(llm)[0]
        with pytest.raises(RuntimeError, match="the device state was lost"):
            llm.generate(ASKED, GREEDY, use_tqdm=False)


@pytest.mark.devices(6)
@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        (dict(data_parallel_size=9), r"data_parallel_size=9 needs 9 devices"),
        (TWO | dict(tensor_parallel_size=8), r"needs 16 devices, there are \d+ \(.*\): lower one"),
        (dict(data_parallel_size=0), "data_parallel_size=0 is out of range"),
        (TWO | dict(enforce_eager=True), "enforce_eager=True runs each operation by itself"),
        (TWO | dict(tensor_parallel_size=3), "tensor_parallel_size=3 does not divide"),
    ],
)
def test_what_cannot_be_is_refused_by_name(folder, sizes, words):
    with pytest.raises(ValueError, match=words):
        open_llm(folder, **sizes)
    with pytest.raises(ValueError, match="data_parallel_size=2 is not supported"):
        Worker(folder, data_parallel_size=2)
