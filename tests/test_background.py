"""Programs that threads compile beside the steps."""

import sys
import threading

import pytest
from test_engine import PROMPTS, run
import tiny

from jaxrunner.engine import Engine
from jaxrunner.layout import Bucket, SampleSize, Steps
from jaxrunner.models.llama import llama
from jaxrunner.params import SamplingParams
from jaxrunner.programs import TURN, Key, Programs

SIZES = dict(decode_buckets=(1, 2, 5), token_buckets=(8, 32))
FIRST = Key("step", Bucket(32, 5))
PARAMS = [SamplingParams(temperature=t, max_tokens=6, seed=1) for t in (0.0, 1.0)]


@pytest.fixture
def gate(monkeypatch):
    """An event that lowering waits for, but of the largest step."""
    event, lower = threading.Event(), Programs._lower

    def waiting(self, key):
        if key.name == "step" and key != FIRST:
            assert event.wait(60)
        return lower(self, key)

    monkeypatch.setattr(Programs, "_lower", waiting)
    yield event
    event.set()


def make(**changes) -> Engine:
    config, params = tiny.model_and_params()
    return Engine(llama, config, tiny.engine_config(**SIZES | changes), params)


def used(engine: Engine, monkeypatch) -> list[Key]:
    """Returns a list that gains the key of each step that is launched."""
    keys, get = [], Programs.__getitem__

    def spy(self, key):
        keys.append(key)
        return get(self, key)

    monkeypatch.setattr(Programs, "__getitem__", spy)
    return keys


@pytest.mark.parametrize("num_decode_steps", [1, 3])
def test_the_largest_size_serves_until_the_others_are_there(gate, monkeypatch, num_decode_steps):
    gate.set()
    want = run(make(), PROMPTS[:2], PARAMS)
    gate.clear()
    engine, usual = make(num_decode_steps=num_decode_steps), sys.getswitchinterval()
    engine.warm_up(background=True)
    engine.runner.programs.strict = True
    keys = used(engine, monkeypatch)
    assert "more to come" in engine.runner.programs.report()
    assert run(engine, PROMPTS[:2], PARAMS) == want
    assert {key for key in keys if key.name == "step"} == {FIRST}
    assert sys.getswitchinterval() == pytest.approx(TURN)
    gate.set()
    for pending in list(engine.runner.programs._pending.values()):
        pending.result(60)
    engine.runner.programs._pool.shutdown()
    assert sys.getswitchinterval() == usual
    keys.clear()
    assert run(engine, PROMPTS[:2], PARAMS) == want
    size = Bucket(2, 2, 1) if num_decode_steps == 1 else Steps(3, SampleSize(2))
    assert size in [key.size for key in keys]
    engine.close()


def test_closing_ends_what_is_compiled_behind_and_does_not_wait(gate):
    engine = make()
    engine.warm_up(background=True)
    programs = engine.runner.programs
    waiting = list(programs._pending.values())
    engine.close()
    assert len(programs._pending) == 4 and not any(future.done() for future in waiting)
    gate.set()
    for future in waiting:  # the one that was lowered, and those that need not be any more
        with pytest.raises(RuntimeError, match="after shutdown"):
            future.result(60)
    assert {entry.key for entry in programs.ledger if entry.key.name == "step"} == {FIRST}


@pytest.mark.parametrize("background", [False, True])
def test_a_program_that_does_not_compile_says_so_where_it_is_needed(monkeypatch, background):
    lower = Programs._lower

    def failing(self, key):
        if key == Key("step", Bucket(2, 2, 1)):
            raise RuntimeError("out of registers")
        return lower(self, key)

    monkeypatch.setattr(Programs, "_lower", failing)
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
