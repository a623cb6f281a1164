"""No compilation after warm-up: the ledger of programs, and JAX's own count."""

from collections import Counter
from dataclasses import fields, replace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxrunner.api.sampling_params import SamplingParams
from jaxrunner.device.buckets import GPU_SIZES
from jaxrunner.device.program_spec import program_keys
from jaxrunner.engine.engine import Engine
from jaxrunner.models.llama import llama
from jaxrunner.programs.program_table import Key, ProgramTable
from jaxrunner.runner.model_runner import ModelRunner
from jaxrunner.sampling import RULES
from jaxrunner.sampling.custom import logits_fn, with_logits_fn
from tests.support import features, tiny
from tests.support.compilations import compilations

NUM_REQUESTS = 120
# What `LLM` alone acts on.
OF_TEXT = {
    "stop", "flat_logprobs", "detokenize", "skip_special_tokens", "spaces_between_special_tokens",
    "include_stop_str_in_output", "output_kind", "n", "truncate_prompt_tokens",
}  # fmt: skip
NAMES = {field.name for field in fields(SamplingParams)} - OF_TEXT
USUAL = SamplingParams()


def tilted(logits, row):
    return logits + row.args["slope"] * jnp.linspace(0, 1, logits.size)


def any_params(rng: np.random.Generator) -> SamplingParams:
    """Returns short outputs, half of them of usual requests; a tenth tells a logits function."""
    extra: dict[str, Any] = dict(extra_args={"slope": 2.0}) if rng.random() < 0.1 else {}
    if rng.random() < 0.5:
        return SamplingParams(temperature=float(rng.choice([0, 1])), max_tokens=3, **extra)
    return features.random_params(rng, **extra)


@pytest.mark.slow
def test_hundreds_of_requests_compile_nothing():
    rng, changed = np.random.default_rng(0), set()
    config, weights = tiny.model_and_params()
    # Several steps a launch are those of the test of this kind in `test_drafts_driver.py`.
    sizes = tiny.engine_config(num_blocks=30, policy="priority")
    engine = Engine(
        llama, config, sizes, weights, make_compiler=features.ParityCompiler,
        rules=with_logits_fn(RULES, logits_fn(tilted, extra_args={"slope": 0.0})),
    )  # fmt: skip
    engine.warm_up(all_rules=True)
    programs = engine.runner.programs
    warm, programs.strict = len(programs.ledger), True
    requests, aborted = [], set()
    with compilations() as compiled:
        for i in range(NUM_REQUESTS):
            params = any_params(rng)
            changed |= {name for name in NAMES if getattr(params, name) != getattr(USUAL, name)}
            prompt = rng.integers(0, features.V, rng.integers(1, 12 if i % 9 else 40)).tolist()
            priority = int(rng.integers(3))
            requests.append(engine.add(f"{i}", prompt, params, priority=priority))
            if i % 20 == 3:
                gone = requests[-3]
                aborted |= {gone.request_id} if gone.finish_reason is None else set()
                engine.abort([gone.request_id])
            if i % 3 == 0:
                engine.step()
        while engine.has_unfinished:
            engine.step()
    assert (compiled, len(programs.ledger)) == ([], warm)
    assert changed == NAMES
    reasons = Counter(request.finish_reason for request in requests)
    assert reasons.keys() == {"length", "stop", "abort", "repetition"}
    assert {r.request_id for r in requests if r.finish_reason == "abort"} == aborted != set()
    for request in requests:
        num_left = request.max_len - len(request.prompt_token_ids) - len(request.output_token_ids)
        assert num_left == 0 or request.finish_reason != "length", request
    assert reasons["length"] + reasons["stop"] > 0.9 * NUM_REQUESTS


GPU: dict[str, Any] = dict(
    max_num_seqs=256, max_num_batched_tokens=8192, decode_buckets=GPU_SIZES, token_buckets=(),
    num_decode_steps=4, num_blocks=12,
)  # fmt: skip
NUMBERS = (1, 2, 8, 9, 15, 16, 17, 32, 33, 64, 200, 255, 256)  # of requests


def launched(runner: ModelRunner, monkeypatch) -> list[Key]:
    """Returns a list that gains the key of each program; none is compiled, none runs."""
    keys, state = [], runner.state

    def spy(_: ProgramTable, key: Key) -> Any:
        keys.append(key)
        if key.name in ("admit", "copy"):
            return lambda *_: state
        return lambda *_: (state, *[None] * (6 if key.name == "forward" else 1))

    monkeypatch.setattr(ProgramTable, "__getitem__", spy)
    return keys


def decode(runner: ModelRunner, num_steps: int, params: SamplingParams) -> None:
    """Has requests decode, few and many at once."""
    for i in range(256):
        runner.requests.add(tiny.new_request(f"{i}", [1], blocks=[0], params=params))
    for number in NUMBERS:
        counts = {f"{i}": num_steps for i in range(number)}
        runner.step(tiny.scheduled(counts, num_steps=num_steps))


@pytest.mark.parametrize("num_steps", [1, 4])
@pytest.mark.parametrize("logprobs", [None, 0, 9])
def test_any_number_of_decodes_runs_what_warm_up_compiles(num_steps, logprobs, monkeypatch):
    runner = tiny.runner(trusted=True, **GPU)
    keys = launched(runner, monkeypatch)
    decode(runner, num_steps, SamplingParams(logprobs=logprobs))
    all_rules = logprobs is not None
    assert len(keys) >= len(NUMBERS)
    assert set(keys) <= set(program_keys(runner.program, runner.buckets, all_rules=all_rules))


@pytest.mark.parametrize("num_steps", [1, 4])
def test_any_number_of_decodes_runs_while_small_sizes_are_pending(num_steps, monkeypatch):
    pending, waited_for = set(), set()

    def start(_: ProgramTable, keys: list[Key], first: list[Key]) -> None:
        pending.update(set(keys) - set(first))
        waited_for.update(first)

    monkeypatch.setattr(ProgramTable, "start", start)
    monkeypatch.setattr(ProgramTable, "is_pending", lambda _, key: key in pending)
    runner = tiny.runner(trusted=True, **GPU)
    runner.prepare(background=True)
    keys = launched(runner, monkeypatch)
    decode(runner, num_steps, SamplingParams())
    assert len(keys) == len(NUMBERS) and set(keys) <= waited_for


def test_a_random_load_runs_what_warm_up_compiles(monkeypatch):
    runner, rng = tiny.runner(trusted=True, **GPU), np.random.default_rng(0)
    keys = launched(runner, monkeypatch)
    for i in range(40):
        fixed: dict[str, Any] = {} if i % 2 else dict(structured_outputs=None)
        new = []
        for n in range(rng.integers(1, 150 if i % 3 else 12)):
            params = features.random_params(rng, **fixed) if i % 4 else USUAL
            prompt = rng.integers(0, 61, rng.integers(1, 40)).tolist()
            one = tiny.new_request(f"{n}", prompt, blocks=[0], params=params)
            start = 1 if params.prompt_logprobs else one.prompt_logprobs_start
            new.append(replace(one, prompt_logprobs_start=start))
        counts = {r.request_id: int(rng.integers(1, 1 + len(r.token_ids))) for r in new}
        runner.step(tiny.scheduled(counts, new))
        some = [r.request_id for r in new if rng.random() < 0.7]
        several = 1 if runner.requests.need_single_steps else 4
        runner.step(tiny.scheduled(dict.fromkeys(some, several), num_steps=several))
        runner.step(tiny.scheduled({}, finished_req_ids=counts.keys()))
    known = set(program_keys(runner.program, runner.buckets, all_rules=True))
    assert set(keys) <= known and len({key.name for key in keys}) == 6
