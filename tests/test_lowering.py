"""Programs that processes lower: the same programs, and a process that dies costs nothing."""

from dataclasses import replace
import pickle
import time

import pytest

from jaxrunner.api.sampling_params import SamplingParams
from jaxrunner.device.lowering import Died, LoweringProcess, lower, lowering_task
from jaxrunner.device.program_spec import abstract, program_spec, usual_spec
from jaxrunner.engine.engine import Engine
from jaxrunner.models.llama import llama
from jaxrunner.program.bucket import Bucket
from jaxrunner.program.program import HOST_ONLY
from jaxrunner.programs.program_table import Key, ProgramTable
from jaxrunner.runner.model_runner import ModelRunner
from tests.support import tiny
from tests.support.tiny_engine import PROMPTS, run

PARAMS = [SamplingParams(temperature=t, max_tokens=6, seed=1) for t in (0.0, 1.0)]
KEY = Key("step", Bucket(2, 2, 1))


def engine(**programs) -> Engine:
    config, params = tiny.model_and_params()
    sizes = tiny.engine_config(decode_buckets=(2, 5), token_buckets=(32,))
    made = Engine(llama, config, sizes, params)
    program, shapes = made.runner.program, abstract(params)
    if programs:
        task = lowering_task(usual_spec, replace(program, rules=()), shapes)
        made.runner.programs = ProgramTable(
            lambda key: program_spec(program, shapes, key), task=task, **programs
        )
    return made


def spec_of(made: ModelRunner, key: Key):
    return made.programs._spec(key)


def process_of(made: Engine) -> LoweringProcess:
    task = made.runner.programs._task
    assert task is not None
    return LoweringProcess(task)


def test_a_process_lowers_what_this_one_lowers_and_says_what_it_cannot(whole):
    made = engine(num_processes=1)
    spec = spec_of(made.runner, KEY)
    process = process_of(made)
    texts = [build._lowered.as_text() for build in (process.lower(KEY, spec), lower(spec))]
    for word in ("tf.aliasing_output", "stablehlo.dot_general", "stablehlo.scatter"):
        assert len({text.count(word) for text in texts}) == 1 and word in texts[0]
    with pytest.raises(Died, match="KeyError: 'walk'"):
        process.lower(Key("walk", KEY.size), spec)
    process.close()
    with pytest.raises(Died, match="the process ended"):
        process.lower(KEY, spec)


def test_what_the_host_alone_reads_changes_no_program():
    def spec(**changes):
        return spec_of(tiny.runner(**changes), KEY)

    other = dict(
        token_buckets=(8, 32), decode_buckets=(2,), num_decode_steps=2, async_depth=1,
        policy="priority", enable_prefix_caching=False, long_prefill_token_threshold=3, seed=1,
        step_timeout_s=7.0,
    )  # fmt: skip
    assert other.keys() | {"max_cpu_loras"} == set(HOST_ONLY)
    assert spec(**other) == spec() != spec(nan_policy="ignore")
    adapters = dict(enable_lora=True, max_loras=1)
    assert spec(**adapters, max_cpu_loras=2) == spec(**adapters)


@pytest.mark.slow
def test_tokens_are_the_same_whoever_lowers(monkeypatch):
    want = run(engine(), PROMPTS[:2], PARAMS)
    here, lower_here = [], ProgramTable._lower
    monkeypatch.setattr(
        ProgramTable, "_lower", lambda self, key: here.append(key) or lower_here(self, key)
    )
    made = engine(num_processes=2)
    made.warm_up()
    # The first program and the small ones.
    assert [key.name for key in here if key.name not in ("admit", "copy")] == ["step"]
    assert len([key for key in made.runner.programs.ready() if key.name == "step"]) == 3
    made.runner.programs.strict = True
    assert run(made, PROMPTS[:2], PARAMS) == want
    made.close()


def test_what_a_process_that_died_would_have_lowered_is_lowered_here(monkeypatch):
    def dying(self, key, spec):
        self.kill()
        return lower_there(self, key, spec)

    lower_there = LoweringProcess.lower
    monkeypatch.setattr(LoweringProcess, "lower", dying)
    made = engine(num_processes=2)
    made.warm_up()
    made.runner.programs.strict = True
    assert run(made, PROMPTS[:2], PARAMS) == run(engine(), PROMPTS[:2], PARAMS)
    made.close()


def test_closing_ends_processes_and_waits_for_none(monkeypatch):
    def endless(self, key, spec):
        while self._process.poll() is None:
            time.sleep(0.01)
        raise Died("closed")

    monkeypatch.setattr(LoweringProcess, "lower", endless)
    made = engine(num_processes=2)
    programs = made.runner.programs
    started = made.runner.prepare()
    while len(programs._processes) < 2:
        time.sleep(0.01)
    made.close()
    large = [future for key, future in started.items() if key.name == "step"]
    assert any(isinstance(future.exception(60), RuntimeError) for future in large)


def test_what_cannot_be_told_to_a_process_is_lowered_here():
    assert lowering_task(lambda key: None) is None
    settings, platform, device, spec, args = pickle.loads(lowering_task(print, 1) or b"")
    assert (spec, args) == (print, (1,))
    assert settings["jax_numpy_rank_promotion"] == "raise"  # as conftest says
    assert platform == "cpu" if device is None else device.platform == "gpu"
