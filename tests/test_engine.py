"""What must hold of an engine, whatever the batch, the chunks, the cache or the order."""

import functools
import itertools

import jax
import numpy as np
import pytest

from jaxrunner.api.sampling_params import SamplingParams
from jaxrunner.engine.engine import Engine
from jaxrunner.models.llama import llama
from tests.support import tiny
from tests.support.tiny_engine import KINDS, PROMPTS, drain, engine, params_of, run

slow = pytest.mark.slow


@functools.cache
def alone(kind: str) -> list[list[int]]:
    """Each prompt's tokens when nothing else is in the engine."""
    outputs, e = [], engine(enable_prefix_caching=False)
    for i, prompt in enumerate(PROMPTS):
        outputs += run(e, [prompt], [params_of(kind, i)])
    assert len({tuple(o) for o in outputs}) == len(outputs)
    return outputs


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="batched"),
        pytest.param(dict(async_depth=1), id="sync", marks=slow),
        pytest.param(
            dict(max_num_batched_tokens=5, token_buckets=(5,), block_size=16, num_blocks=15),
            id="chunks of 5, large blocks",
        ),
        pytest.param(dict(num_blocks=13), id="preempted"),
        pytest.param(dict(num_blocks=13, policy="priority"), id="by priority", marks=slow),
        pytest.param(
            dict(max_num_seqs=2, decode_buckets=(1, 2), token_buckets=(8, 32)), id="queued, buckets"
        ),
        pytest.param(dict(num_decode_steps=3, num_blocks=13), id="3 steps, preempted"),
        pytest.param(dict(num_decode_steps=8, async_depth=3), id="3 launches ahead", marks=slow),
    ],
)  # fmt: skip
def test_tokens_depend_on_the_request_alone(changes):
    e = engine(**changes)
    for kind in KINDS:
        params, preempted = [params_of(kind, i) for i in range(6)], e.scheduler.num_preemptions
        assert run(e, PROMPTS, params) == alone(kind), kind
        assert changes.get("num_blocks") != 13 or e.scheduler.num_preemptions > preempted
        assert e.scheduler.reset_prefix_cache()
    names = {compilation.key.name for compilation in e.runner.programs.ledger}
    assert ("multi_step" in names) == ("num_decode_steps" in changes)


def test_a_long_prompt_takes_no_more_of_a_step_than_it_may():
    e, params = engine(long_prefill_token_threshold=3), params_of("greedy", 0)
    assert run(e, PROMPTS[:1], [params]) == alone("greedy")[:1]
    assert max(e.runner.traffic[0]) == 3


@pytest.mark.parametrize("seed", range(2))
def test_the_order_of_arrival_changes_nothing(seed):
    order = np.random.default_rng(seed).permutation(len(PROMPTS)).tolist()
    params = [params_of("sampled", i) for i in range(len(PROMPTS))]
    assert run(engine(), PROMPTS, params, order) == alone("sampled")


def test_a_cached_prefix_changes_nothing():
    e = engine()
    for kind, expected_hits in itertools.product(KINDS, (False, True)):
        params = [params_of(kind, i) for i in range(len(PROMPTS))]
        requests = [
            e.add(f"{i}", p, s) for i, (p, s) in enumerate(zip(PROMPTS, params, strict=True))
        ]
        drain(e)
        assert [r.output_token_ids for r in requests] == alone(kind)
        assert (requests[0].num_cached_tokens > 0) == expected_hits
        assert not expected_hits or e.scheduler.reset_prefix_cache()


def test_a_prefix_computed_in_the_same_step_is_shared():
    e = engine()
    first, second = PROMPTS[0], PROMPTS[3]
    a = e.add("a", first, params_of("greedy", 0))
    b = e.add("b", second, params_of("greedy", 3))
    e.step()
    assert (a.num_cached_tokens, b.num_cached_tokens) == (0, 8)
    assert a.blocks[0][:2] == b.blocks[0][:2]
    drain(e)
    assert b.output_token_ids == alone("greedy")[3]


def test_greedy_is_the_argmax_of_a_full_forward():
    config, weights = tiny.model_and_params()
    for i, output in enumerate(alone("greedy")):
        ids = PROMPTS[i] + output
        logits = tiny.dense_logits(config, weights, ids)
        free = SamplingParams(temperature=0.0, max_tokens=len(output), ignore_eos=True)
        got = run(engine(), [PROMPTS[i]], [free])[0]
        want = tiny.dense_logits(config, weights, PROMPTS[i] + got)
        assert got == want[len(PROMPTS[i]) - 1 : -1].argmax(-1).tolist()
        assert logits.shape == (len(ids), config.vocab_size)


def test_greedy_ignores_the_seed():
    outputs = [
        run(engine(), [PROMPTS[0]], [SamplingParams(temperature=0.0, seed=s)]) for s in (1, 2)
    ]
    assert outputs[0] == outputs[1]


def test_an_aborted_request_leaves_nothing_behind():
    e = engine()
    params = [params_of("sampled", i) for i in range(len(PROMPTS))]
    kept = [e.add(f"{i}", p, s) for i, (p, s) in enumerate(zip(PROMPTS, params, strict=True))]
    for steps, name in enumerate(("waiting", "just launched", "decoding")):
        e.add(name, [8, 8, 8, 8, 8, steps], SamplingParams(max_tokens=20))
        for _ in range(steps):
            e.step()
        e.abort([name, "unknown"])
    drain(e)
    assert [r.output_token_ids for r in kept] == alone("sampled")


def test_a_drawn_seed_survives_preemption():
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    free, tight = engine(), engine(num_blocks=13)
    want = run(free, PROMPTS, [params] * len(PROMPTS))
    assert run(tight, PROMPTS, [params] * len(PROMPTS)) == want
    assert tight.scheduler.num_preemptions > 0


def test_the_length_limit_comes_before_min_tokens():
    params = SamplingParams(temperature=0.0, max_tokens=None, min_tokens=1000)
    prompt = PROMPTS[0]
    (output,) = run(engine(), [prompt], [params])
    assert len(prompt) + len(output) == 48


def test_a_preempted_request_gives_its_slot_back():
    e = engine(num_blocks=13)
    for i, prompt in enumerate(PROMPTS):
        e.add(f"{i}", prompt, params_of("greedy", i))
    preempted = 0
    while e.has_unfinished:
        e.step()
        owners = set(e.runner.requests._slots)
        live = {r.request_id for r in e.scheduler.running} | e.scheduler._finished
        assert owners <= live | {name for so, _ in e._in_flight for name in so.requests}
        preempted = max(preempted, e.scheduler.num_preemptions)
    assert preempted > 0


def test_a_compilation_after_warm_up_names_what_differs():
    e = engine()
    e.warm_up()
    e.runner.programs.strict = True
    e.runner.buckets = tuple(b._replace(num_rows=4) for b in e.runner.buckets)
    e.add("a", PROMPTS[0], KINDS["greedy"])
    with pytest.raises(RuntimeError, match=r"no compilation is allowed after warm-up: step, "
                                           r"num_rows=4, not 5"):  # fmt: skip
        e.step()
    fresh = engine()
    fresh.runner.programs.strict = True
    fresh.add("a", PROMPTS[0], KINDS["greedy"])
    with pytest.raises(RuntimeError, match="program 'admit' was never compiled"):
        fresh.step()


@pytest.mark.parametrize(
    "prompt,params,message",
    [
        ([], {}, "prompt"),
        ([1, 61], {}, "61"),
        ([1, -1], {}, "-1"),
        ([1] * 48, {}, "max_model_len=48"),
        ([1], dict(stop_token_ids=[61]), "stop_token_ids has 61"),
    ],
)
def test_bad_requests_change_nothing(prompt, params, message):
    e = engine()
    kept = e.add("kept", PROMPTS[0], params_of("greedy", 0))
    with pytest.raises(ValueError, match=message):
        e.add("bad", prompt, SamplingParams(**params))
    with pytest.raises(ValueError, match="'kept' is unfinished"):
        e.add("kept", [1], SamplingParams())
    drain(e)
    assert kept.output_token_ids == alone("greedy")[0]


def test_too_many_stop_ids_are_refused():
    params = SamplingParams(stop_token_ids=range(16))
    with pytest.raises(
        ValueError, match="stop_token_ids and EOS are 145 ids, a request may have 144"
    ):
        engine().add("a", [1], params, eos_token_ids=range(20, 149))


def test_a_pool_too_small_for_one_request_is_refused():
    with pytest.raises(ValueError, match="num_blocks=11 holds 44 tokens, one request of "
                                         "max_model_len=48 needs 48"):  # fmt: skip
        engine(num_blocks=11)


def test_closing_gives_the_state_back():
    e = engine()
    e.close()  # before there is any, and after
    e = engine()
    state = jax.tree.leaves(e.runner.state)
    e.close()
    assert state and all(x.is_deleted() for x in state)


@pytest.mark.parametrize(
    "dtype,kv_dtype,tolerance",
    [
        pytest.param("float16", "float16", 0.01, marks=slow),
        ("float32", "bfloat16", 0.05),
    ],
)
def test_tokens_of_lower_precision_are_nearly_the_likeliest(dtype, kv_dtype, tolerance):
    """The tolerance is a part of the largest logit, by which float32 may prefer another token."""
    config, params = tiny.model_and_params()
    lower = jax.tree.map(lambda x: x.astype(dtype), params)
    e = Engine(llama, config, tiny.engine_config(dtype=dtype, kv_dtype=kv_dtype), lower)
    free = SamplingParams(temperature=0.0, max_tokens=20)
    for prompt, output in zip(PROMPTS, run(e, PROMPTS, [free] * len(PROMPTS)), strict=True):
        logits = tiny.dense_logits(config, params, prompt + output)[len(prompt) - 1 : -1]
        chosen = logits[np.arange(len(output)), output]
        assert (logits.max(-1) - chosen).max() < tolerance * np.abs(logits).max()
