"""Engines come and go: nothing is left on the device, and several live side by side."""

import gc
import itertools
from pathlib import Path
import subprocess
import sys
import threading
from typing import Any

import jax
import pytest

from jaxrunner import LLM, SamplingParams, llm
from jaxrunner.loading import loader, weights
from jaxrunner.runner import model_runner
from jaxrunner.worker import worker
from tests.support.small_llm import SIZES, live_bytes
from tests.support.tiny_engine import KINDS, PROMPTS, drain, engine, run

ROOT = Path(__file__).parents[1]
CYCLES, DROPPED = 3, 3
SCRIPT = """
import os, signal, threading, warnings
from jaxrunner import LLM, SamplingParams, embedded
llm = LLM(str(embedded.PATH), {sizes})
params = SamplingParams(max_tokens=20, ignore_eos=True, seed=1)
stream = llm.stream("def f", params)
told = next(stream).outputs[0].token_ids

held, go = threading.Event(), threading.Event()
def hold():
    with llm.completions.lock:
        held.set()
        go.wait()
thread = threading.Thread(target=hold)
thread.start()
held.wait()
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # JAX's own, of what is tried here
    child = os.fork()
if not child:
    signal.alarm(30)  # for one that hangs
    calls = (
        lambda: llm.generate("x", params), lambda: next(stream), lambda: llm.abort("0"),
        llm.engine.step, lambda: llm.engine.add("mine", [1], params),
        lambda: llm.update_params(llm.params),
    )
    for call in calls:
        try:
            call()
        except RuntimeError as error:
            print(error, flush=True)
    llm.close()
    os._exit(0)
go.set()
thread.join()
print("child", os.waitpid(child, 0)[1])
told += [token for part in stream for token in part.outputs[0].token_ids]
(whole,) = llm.generate("def f", params, use_tqdm=False)
print("tokens", told == whole.outputs[0].token_ids, len(told))
rest = llm.stream("def f", params)
next(rest)
"""


def test_what_is_closed_leaves_nothing_on_the_device(shallow):
    params = SamplingParams(temperature=0.0, max_tokens=4)
    texts, held = [], []
    for _ in range(CYCLES):
        with LLM(shallow, **SIZES) as llm:
            texts.append(llm.generate("def f", params, use_tqdm=False)[0].outputs[0].text)
        llm.close()  # twice
        del llm
        held.append(live_bytes())
    assert len(set(texts)) == 1
    assert len(set(held[1:])) == 1, held  # the first leaves constants that all share


def test_what_is_dropped_unclosed_leaves_nothing_on_the_device(shallow):
    """Nothing refers back to a runner, and no garbage that was there is kept for ever."""
    params, held = SamplingParams(temperature=0.0, max_tokens=4), []
    frozen = [gc.get_freeze_count()]  # of which the first engine may free some
    for i in range(DROPPED):
        sizes: dict[str, Any] = SIZES | dict(warm_up=i < 2, num_blocks=16)
        llm = LLM(shallow, **sizes)
        llm.generate("def f", params, use_tqdm=False)
        gc.disable()
        try:
            del llm
            held.append(sum(x.nbytes for x in jax.live_arrays()))
        finally:
            gc.enable()
        frozen.append(gc.get_freeze_count())
    assert len(set(held[1:])) == 1, held
    assert frozen[0] >= frozen[1] and len(set(frozen[1:])) == 1, frozen


@pytest.mark.gpu
def test_what_is_dropped_unclosed_gives_the_gpu_its_memory_back(shallow):
    held = []
    for _ in range(DROPPED):
        llm = LLM(shallow, **SIZES)
        llm.generate("def f", SamplingParams(max_tokens=4), use_tqdm=False)
        del llm
        stats = jax.local_devices()[0].memory_stats()
        assert stats is not None
        held.append(stats["bytes_in_use"])
    assert held[-1] <= held[1], held


def test_engines_take_turns():
    params = [KINDS["greedy"], KINDS["sampled"]]
    want = [run(engine(), [PROMPTS[i]], [params[i]]) for i in range(2)]
    engines = [engine(), engine(num_blocks=40)]
    requests = [e.add("a", PROMPTS[i], params[i]) for i, e in enumerate(engines)]
    while any(e.has_unfinished for e in engines):
        for e in engines:
            e.step()
    for e in engines:
        drain(e)
    assert [[r.output_token_ids] for r in requests] == want


def test_closing_ends_what_is_under_way(shallow):
    params = SamplingParams(max_tokens=50, ignore_eos=True, temperature=0.0)
    model = LLM(shallow, **SIZES)
    (whole,) = model.generate("def f", params, use_tqdm=False)
    stream, answers = model.stream("def f", params), []
    told = [next(stream)]
    thread = threading.Thread(
        target=lambda: answers.append(model.generate(["def f", "x"], params, use_tqdm=False))
    )
    thread.start()
    while not model.engine.scheduler.num_waiting:  # two are at work
        told.append(next(stream))
    model.close()
    told += stream
    thread.join(60)
    assert not thread.is_alive()
    ids = [token for part in told for token in part.outputs[0].token_ids]
    assert told[-1].finished and told[-1].outputs[0].finish_reason == "abort"
    assert ids == whole.outputs[0].token_ids[: len(ids)]
    assert [output.outputs[0].finish_reason for output in answers[0]] == ["abort"] * 2
    with pytest.raises(RuntimeError, match="this engine is closed: build another one"):
        next(model.stream("def f", params))


@pytest.mark.parametrize(
    ("owner", "name", "changes"),
    [
        (weights, "check_finite", dict(check_nan=True)),
        (loader, "_generation_defaults", {}),
        (worker, "plan_engine", {}),
        (model_runner.ModelRunner, "warm_up", dict(warm_up=True)),
        (llm, "Completions", {}),
    ],
)
def test_what_fails_to_open_leaves_nothing_on_the_device(
    monkeypatch, shallow, owner, name, changes
):
    """Whoever keeps the error, as a notebook does, keeps no memory with it."""
    before, real, count = live_bytes(), getattr(owner, name), itertools.count()

    def fails(*args: Any, **kwargs: Any) -> Any:
        if name == "check_finite" and next(count) < 5:
            return real(*args, **kwargs)
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")

    monkeypatch.setattr(owner, name, fails)
    with pytest.raises(jax.errors.JaxRuntimeError, match="Out of memory") as kept:
        LLM(shallow, **SIZES | changes)
    assert live_bytes() <= before and kept.value.__traceback__ is not None


@pytest.mark.slow
def test_python_forks_and_ends_with_an_engine_at_work():
    sizes = ", ".join(f"{name}={value!r}" for name, value in SIZES.items())
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", SCRIPT.format(sizes=sizes)],
        cwd=ROOT, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr[-2000:]
    *refused, child, tokens = done.stdout.splitlines()
    words = 'and JAX does not survive a fork: start processes with multiprocessing\'s "spawn"'
    assert len(refused) == 6 and all(words in line for line in refused)
    assert (child, tokens) == ("child 0", "tokens True 20")
