"""An engine that drafts compiles nothing after warm-up, and little more before it."""

from typing import Any

import jax
import numpy as np
import pytest

from jaxrunner.api.sampling_params import SamplingParams
from jaxrunner.device.buckets import GPU_SIZES
from jaxrunner.device.program_spec import program_keys
from jaxrunner.engine.engine import Engine
from jaxrunner.models.llama import llama
from jaxrunner.runner.build import build
from jaxrunner.runner.model_runner import ModelRunner
from tests.support import features, tiny
from tests.support.drafters import ADAPTIVE, DRAFTERS, with_itself_or_none, with_ngrams

KINDS = dict(eagle3=DRAFTERS["eagle3"], another=DRAFTERS["another"], ngram=with_ngrams)
KINDS["adaptive"] = with_itself_or_none
GPU: dict[str, Any] = dict(
    max_num_seqs=256, max_num_batched_tokens=8192, decode_buckets=GPU_SIZES, token_buckets=(),
    num_decode_steps=4, num_blocks=12,
)  # fmt: skip


def num_programs(model, config, params, *, all_rules: bool, **sizes: Any) -> int:
    """Returns how many programs a start compiles on a GPU, where admissions have three sizes."""
    built = build(model, config, tiny.engine_config(**GPU | sizes), params)
    runner = ModelRunner(built, params, trusted=True)
    keys = program_keys(runner.program, runner.buckets, all_rules=all_rules)
    return len(keys) + 3 - sum(key.name == "admit" for key in keys)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("all_rules", [False, True], ids=["usual", "all rules"])
@pytest.mark.parametrize("num_decode_steps", [1, 4])
def test_drafts_need_at_most_half_as_many_programs_more(kind, all_rules, num_decode_steps):
    rest: dict[str, Any] = dict(all_rules=all_rules, num_decode_steps=num_decode_steps)
    plain = num_programs(llama, *tiny.model_and_params(), **rest)
    most = 1.75 if kind == "adaptive" and all_rules else 1.5  # forward and draw are twice there
    assert plain <= num_programs(*KINDS[kind](), **rest) <= most * plain


@pytest.mark.slow
def test_no_request_compiles_anything_after_warm_up():
    model, config, params = KINDS["adaptive"]()  # whose programs are those of all drafts, and more
    sizes = tiny.engine_config(**ADAPTIVE)
    e = Engine(model, config, sizes, params, make_compiler=features.ParityCompiler)
    e.warm_up(all_rules=True)
    programs, rng, compiled = e.runner.programs, np.random.default_rng(0), []
    warm, programs.strict = len(programs.ledger), True
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, duration_secs, **_: compiled.append(event) if "compile" in event else None
    )
    try:
        for i in range(100):
            usual = SamplingParams(temperature=float(i % 4 == 0), max_tokens=12, seed=i)
            given = usual if i % 2 else features.random_params(rng)
            prompt = rng.integers(0, 9, rng.integers(1, 30)).tolist()
            e.add(f"{i}", prompt, given, priority=int(rng.integers(3)))
            e.step()
            if i % 20 == 3:
                e.abort([f"{i}"])
        while e.has_unfinished:
            e.step()
    finally:
        jax.monitoring.clear_event_listeners()
    assert (compiled, len(programs.ledger)) == ([], warm) and e.scheduler.num_preemptions
