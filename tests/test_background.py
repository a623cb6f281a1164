"""Programs that threads compile beside the steps."""

import sys
import threading
from typing import Any

import pytest

from jaxrunner import LLM, embedded
from jaxrunner.api.sampling_params import SamplingParams
from jaxrunner.device.switch_interval import INTERVAL_S
from jaxrunner.engine.engine import Engine
from jaxrunner.loading import orbax_io
from jaxrunner.loading.loader import LoadConfig
from jaxrunner.models.llama import llama
from jaxrunner.program.bucket import Bucket, MultiStepBucket, SampleSize
from jaxrunner.programs.program_table import Key, ProgramTable
from tests.support import tiny
from tests.support.tiny_engine import PROMPTS, run

# With kernels other processes lower, of which `_lower` knows nothing.
SIZES = dict(decode_buckets=(2, 5), token_buckets=(32,), attention_backend="reference")
FIRST = Key("step", Bucket(32, 5))
PARAMS = [SamplingParams(temperature=t, max_tokens=6, seed=1) for t in (0.0, 1.0)]


@pytest.fixture
def gate(monkeypatch):
    """An event that lowering waits for, but of the largest step."""
    event, lower = threading.Event(), ProgramTable._lower

    def waiting(self, key):
        if key.name == "step" and key != FIRST:
            assert event.wait(60)
        return lower(self, key)

    monkeypatch.setattr(ProgramTable, "_lower", waiting)
    yield event
    event.set()


def make(**changes) -> Engine:
    config, params = tiny.model_and_params()
    return Engine(llama, config, tiny.engine_config(**SIZES | changes), params)


def used(engine: Engine, monkeypatch) -> list[Key]:
    """Returns a list that gains the key of each step that is launched."""
    keys, get = [], ProgramTable.__getitem__

    def spy(self, key):
        keys.append(key)
        return get(self, key)

    monkeypatch.setattr(ProgramTable, "__getitem__", spy)
    return keys


def test_the_largest_size_serves_until_the_others_are_there(gate, monkeypatch):
    gate.set()
    want = run(make(), PROMPTS[:2], PARAMS)
    gate.clear()
    engine, usual = make(num_decode_steps=3), sys.getswitchinterval()
    engine.warm_up(background=True)
    assert "_state" in vars(engine.runner)  # a device that has no room says so now
    engine.runner.programs.strict = True
    keys = used(engine, monkeypatch)
    assert "; 3 more to come" in engine.runner.programs.report()
    assert run(engine, PROMPTS[:2], PARAMS) == want
    assert {key for key in keys if key.name == "step"} == {FIRST}
    assert sys.getswitchinterval() == pytest.approx(INTERVAL_S)
    gate.set()
    for pending in list(engine.runner.programs._pending.values()):
        pending.result(60)
    pool = engine.runner.programs._pool
    assert pool is not None
    pool.shutdown()
    assert sys.getswitchinterval() == usual
    keys.clear()
    assert run(engine, PROMPTS[:2], PARAMS) == want
    assert MultiStepBucket(3, SampleSize(2)) in [key.size for key in keys]
    engine.close()


def test_programs_are_prepared_while_the_weights_come(monkeypatch):
    order = []

    def told(cls: type, name: str):
        method = getattr(cls, name)
        monkeypatch.setattr(
            cls, name, lambda *a, **k: order.append(f"{cls.__name__}.{name}") or method(*a, **k)
        )

    for cls, name in ((ProgramTable, "start"), (LoadConfig, "read"), (ProgramTable, "wait")):
        told(cls, name)
    sizes: dict[str, Any] = dict(
        max_model_len=64, decode_buckets=(1,), token_buckets=(16,), max_num_seqs=1
    )
    sizes |= dict(max_num_batched_tokens=16, use_tqdm=False)
    with LLM(str(embedded.PATH), **sizes) as llm:
        assert llm.report().count("programs: ") == 1
    start, read, wait = "ProgramTable.start", "LoadConfig.read", "ProgramTable.wait"
    assert order == [start, read, start, wait]
    order.clear()
    with pytest.raises(MemoryError, match="raise kv_cache_memory_bytes to"):
        LLM(str(embedded.PATH), kv_cache_memory_bytes=1, **sizes)
    assert not order  # what does not fit is refused before its weights are read


def test_a_runner_takes_its_weights_once_they_are_there():
    config, params = tiny.model_and_params()
    want = run(make(), PROMPTS[:1], PARAMS[:1])
    engine = Engine(llama, config, tiny.engine_config(**SIZES), orbax_io.abstract(params))
    engine.runner.prepare()
    assert engine.runner.params is None
    engine.runner.update_params(params)
    engine.warm_up()
    engine.runner.programs.strict = True
    assert run(engine, PROMPTS[:1], PARAMS[:1]) == want


def test_closing_ends_what_is_compiled_behind_and_does_not_wait(gate):
    engine = make()
    engine.warm_up(background=True)
    programs = engine.runner.programs
    waiting = list(programs._pending.values())
    engine.close()
    assert len(programs._pending) == 2 and not any(future.done() for future in waiting)
    gate.set()
    for future in waiting:  # the one that was lowered, and those that need not be any more
        with pytest.raises(RuntimeError, match="after shutdown"):
            future.result(60)
    assert {entry.key for entry in programs.ledger if entry.key.name == "step"} == {FIRST}


@pytest.mark.parametrize("background", [False, True])
def test_a_program_that_does_not_compile_says_so_where_it_is_needed(monkeypatch, background):
    lower = ProgramTable._lower

    def failing(self, key):
        if key == Key("step", Bucket(2, 2, 1)):
            raise RuntimeError("out of registers")
        return lower(self, key)

    monkeypatch.setattr(ProgramTable, "_lower", failing)
    engine = make()
    if not background:
        with pytest.raises(RuntimeError, match="out of registers"):
            engine.warm_up()
        return
    engine.warm_up(background=True)
    for pending in list(engine.runner.programs._pending.values()):
        pending.exception(60)
    with pytest.raises(RuntimeError, match="out of registers"):
        engine.runner.programs[Key("step", Bucket(2, 2, 1))]
    engine.close()
