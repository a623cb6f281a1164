"""Several decode steps of one launch, by an engine."""

import jax
import jax.numpy as jnp
import pytest

from jaxrunner.api.sampling_params import SamplingParams
from jaxrunner.device import multi_step as device
from jaxrunner.device.program_key import Key
from jaxrunner.device.program_spec import program_spec
from jaxrunner.engine.engine import Engine
from jaxrunner.models.llama import llama
from jaxrunner.program.bucket import MultiStepBucket, SampleSize
from tests.support import tiny
from tests.support.jaxprs import traced
from tests.support.tiny import poisoned
from tests.support.tiny_engine import PROMPTS, engine, run


def test_nothing_is_compiled_after_warm_up():
    e = engine(num_decode_steps=4)
    e.warm_up()
    e.runner.programs.strict = True
    params = [SamplingParams(temperature=t, max_tokens=9) for t in (0.0, 1.0, 0.0)]
    run(e, PROMPTS[:3], params)
    steps = [c.key.size for c in e.runner.programs.ledger if c.key.name == "multi_step"]
    assert {size.sample for size in steps} == {SampleSize(5)}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_steps_of_a_launch_need_no_rules_that_few_want(temperature):
    plain = SamplingParams(temperature=temperature, max_tokens=13, seed=3)
    want = run(engine(), PROMPTS[:3], [plain] * 3)
    e = engine(num_decode_steps=4)
    assert run(e, PROMPTS[:3], [plain] * 3) == want
    sizes = [c.key.size for c in e.runner.programs.ledger if c.key.name == "multi_step"]
    assert sizes == [MultiStepBucket(4, SampleSize(5))]


def test_a_launch_ends_when_all_its_requests_have(monkeypatch):
    """The first token is of the prefill; a launch has six steps at most, of which two are here."""
    steps, step = [], device.step

    def counted(*args, **kwargs):
        jax.debug.callback(lambda: steps.append(1))
        return step(*args, **kwargs)

    monkeypatch.setattr(device, "step", counted)
    e = engine(num_decode_steps=6, async_depth=1, enable_prefix_caching=False)  # of this test alone
    for lengths, count in (((2, 5), 4), ((9, 9), 6)):
        for i, n in enumerate(lengths):
            rule = SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True)
            e.add(str(i), PROMPTS[i][:2], rule)
        e.step()
        del steps[:]
        e.step()
        jax.effects_barrier()
        assert len(steps) == count
        while e.has_unfinished:
            e.step()


def test_the_condition_of_the_loop_computes():
    """A CUDA graph reads a condition without kernels beside the step, which then never ends."""
    e = engine(num_decode_steps=4)
    key = Key("multi_step", MultiStepBucket(4, SampleSize(5)))
    spec = program_spec(e.runner.program, e.runner.params_spec, key)
    conditions = [
        eqn.params["cond_jaxpr"].jaxpr for eqn in traced(spec).eqns if eqn.primitive.name == "while"
    ]
    assert conditions and all(condition.eqns for condition in conditions)


def test_many_steps_are_few_launches():
    e = engine(num_decode_steps=4, async_depth=1)
    request = e.add("a", [3, 1, 4], SamplingParams(temperature=0.0, max_tokens=11, ignore_eos=True))
    gains = []
    while e.has_unfinished:
        gains.append([len(tokens) for _, tokens in e.step()])
    assert gains == [[1], [4], [4], [2]]
    assert (len(request.output_token_ids), request.finish_reason) == (11, "length")


def test_steps_after_a_prefill_are_launched_before_it_is_read():
    e = engine(num_decode_steps=4, async_depth=2)
    e.add("a", [3, 1, 4], SamplingParams(temperature=0.0, max_tokens=11, ignore_eos=True))
    assert [len(tokens) for _, tokens in e.step()] == [1]
    assert [scheduled.num_steps for scheduled, _ in e._in_flight] == [4]
    while e.has_unfinished:
        e.step()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_request_that_fails_keeps_what_it_had(temperature):
    """Its tokens up to the failure, and those of others, are as in steps of one launch each."""
    config, _ = tiny.model_and_params()
    params = [
        SamplingParams(temperature=temperature, max_tokens=14, seed=i, ignore_eos=True)
        for i in range(3)
    ]
    whole = run(engine(), PROMPTS[:3], params)
    weights = poisoned(whole[0][5], jnp.nan)  # one that the first request says in mid-launch
    seen = []
    for n in (1, 4):
        e = Engine(llama, config, tiny.engine_config(num_decode_steps=n), weights)
        requests = [
            e.add(str(i), p, s) for i, (p, s) in enumerate(zip(PROMPTS[:3], params, strict=True))
        ]
        while e.has_unfinished:
            e.step()
        seen.append([(r.output_token_ids, r.finish_reason, r.error) for r in requests])
    assert seen[0] == seen[1]
    assert seen[0][0][1] == "error" and 0 < len(seen[0][0][0]) < 14
