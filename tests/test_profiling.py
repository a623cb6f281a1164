"""Profiles, with named steps, and the health of a device."""

import gzip
import json
import re
import time

import jax
import jax.numpy as jnp
import pytest

from jaxrunner import LLM, SamplingParams
from jaxrunner.runner.profiling import Profiler, check_device, step_name
from jaxrunner.scheduling.request import SchedulerOutput
from tests.support.small_llm import SIZES
from tests.support.tiny_engine import PROMPTS, drain, engine


def test_steps_are_named_by_what_they_compute(monkeypatch):
    """A prompt of 21 tokens in chunks of 8, and one of 3 beside its last chunks."""
    names, step = [], Profiler.step

    def named(self, output: SchedulerOutput):
        if output.num_scheduled_tokens:
            names.append(step_name(output))
        return step(self, output)

    monkeypatch.setattr(Profiler, "step", named)
    e = engine(max_num_batched_tokens=8, token_buckets=(8,), async_depth=1)
    params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
    e.add("a", PROMPTS[5], params)
    e.add("b", PROMPTS[1], params)
    drain(e)
    assert names == [
        "execute_context_1(8)_generation_0(0)",
        "execute_context_1(8)_generation_0(0)",
        "execute_context_2(8)_generation_0(0)",
        "execute_context_0(0)_generation_2(2)",
    ]


def test_a_profile_has_the_steps(tmp_path, shallow):
    with LLM(shallow, **SIZES) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
        llm.generate("def f", params, use_tqdm=False)
        with pytest.raises(RuntimeError, match="no profile is recorded: call start_profile first"):
            llm.stop_profile()
        llm.start_profile(tmp_path)
        with pytest.raises(RuntimeError, match=r"a profile is recorded in .*: call stop_profile"):
            llm.start_profile(tmp_path)
        llm.generate("x = 1", params, use_tqdm=False)
        (tmp_path / "perfetto_trace.json.gz").write_bytes(b"")  # of others: the folder may be any
        path = llm.stop_profile()
        with gzip.open(path) as file:
            events = {event.get("name") for event in json.load(file)["traceEvents"]}
        assert {"execute_context_0(0)_generation_1(1)"} < events
        assert llm.get_supported_tasks() == ("generate",)
        llm.check_health()


def test_a_device_that_hangs_or_fails_is_found(monkeypatch):
    check_device(30.0)
    monkeypatch.setattr(jnp, "arange", lambda n: time.sleep(2.0))
    with pytest.raises(RuntimeError, match=r"the device did not run a tiny program in 0\.05 s"):
        check_device(0.05)

    def broken(n):
        raise ValueError("uncorrectable ECC error")

    monkeypatch.setattr(jnp, "arange", broken)
    device = jax.devices()[-1]
    message = re.escape(f"{device} cannot run a tiny program")
    with pytest.raises(RuntimeError, match=message) as caught:
        check_device(5.0, [device])
    assert "ECC" in str(caught.value.__cause__)
