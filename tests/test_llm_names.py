"""What programs written for vLLM find on an `LLM`, and what newcomers are told."""

from typing import Any

import jax
import pytest

from jaxrunner import LLM, SamplingParams, embedded
from jaxrunner.device.program_key import Key
from jaxrunner.engine.metrics import Counter, Gauge
from jaxrunner.program.bucket import Bucket, MultiStepBucket, SampleSize
from tests.support.small_llm import SIZES

GREEDY = SamplingParams(temperature=0.0, max_tokens=8)
TEXT = "def f(x):\n    return"
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"


@pytest.fixture(scope="module")
def llm():
    with LLM(str(embedded.PATH), **SIZES) as llm:
        yield llm


def figures(llm) -> dict[str, float]:
    return {m.name: m.value for m in llm.get_metrics() if isinstance(m, Counter | Gauge)}


def test_figures_count_what_has_ended(llm):
    before = figures(llm)
    outputs = llm.generate([TEXT, TEXT], GREEDY, use_tqdm=False)
    grown = {name: value - before.get(name, 0) for name, value in figures(llm).items()}
    assert grown["vllm:generation_tokens"] == 16 == 8 * grown["vllm:request_success"]
    assert grown["vllm:prompt_tokens"] == sum(len(o.prompt_token_ids) for o in outputs)
    assert grown["vllm:num_requests_running"] == 0 <= grown["vllm:prefix_cache_hits"]
    stream = llm.stream(TEXT, GREEDY)
    next(stream)
    assert figures(llm)["vllm:num_requests_running"] == 1
    assert figures(llm)["vllm:kv_cache_usage_perc"] > 0
    stream.close()
    ends = [m.labels.get("finished_reason") for m in llm.get_metrics() if "success" in m.name]
    assert {"length", "abort"} <= set(ends)


def test_requests_at_work_start_again_when_prefixes_are_forgotten(llm):
    want = llm.generate(TEXT, GREEDY, use_tqdm=False)[0].outputs[0].token_ids
    stream = llm.stream(TEXT, GREEDY)
    got = list(next(stream).outputs[0].token_ids)
    assert not llm.reset_prefix_cache()
    assert llm.reset_prefix_cache(reset_running_requests=True)
    assert not any(pool.filled() for pool in llm.engine.pools)
    for part in stream:
        got += part.outputs[0].token_ids
    assert got == want and llm.reset_prefix_cache()


def test_functions_reach_the_worker_and_the_model(llm):
    assert llm.llm_engine is llm.engine and llm.model_config.vocab_size == 4096
    assert llm.collective_rpc("is_sleeping") == [False]
    assert llm.collective_rpc(lambda worker, a, b: (worker, a, b), args=(1,), kwargs={"b": 2}) == [
        (llm, 1, 2)
    ]
    (count,) = llm.apply_model(lambda params: sum(x.size for x in jax.tree.leaves(params)))
    assert count == sum(x.size for x in jax.tree.leaves(llm.params)) > 7e6
    with pytest.raises(AttributeError, match="LLM has no 'qqq'"):
        llm.collective_rpc("qqq")
    with pytest.raises(TypeError, match="method must be a name or a function, got 3"):
        llm.collective_rpc(3)
    with pytest.raises(TypeError, match="args must be a list or a tuple, got 'ab'"):
        llm.collective_rpc(print, args="ab")
    for bad in (0, {1: 2}):
        with pytest.raises(TypeError, match="kwargs must be a dict by names of arguments, got"):
            llm.collective_rpc(print, kwargs=bad)
    with pytest.raises(TypeError, match="func must be a function of the weights, got 3"):
        llm.apply_model(3)
    with pytest.raises(TypeError, match="reset_running_requests must be True or False, got 1"):
        llm.reset_prefix_cache(1)


@pytest.mark.parametrize(
    "name, words",
    [("save_tensorized_model", "save_sharded_state writes"), ("enqueue", "Engine.add queues one")],
)
def test_a_method_of_vllm_that_is_not_here_says_what_to_do(llm, name, words):
    assert not hasattr(llm, name)
    with pytest.raises(AttributeError, match=f"LLM has no '{name}': .*{words}"):
        getattr(llm, name)("x")


def test_an_llm_says_what_it_is(llm):
    assert repr(llm).startswith(f"LLM({str(embedded.PATH)!r}: LlamaForCausalLM in float32, 2 req")


def test_chat_keeps_the_text_that_was_rendered(llm):
    messages: Any = [{"role": "user", "content": "x = "}]
    (output,) = llm.chat(messages, GREEDY, chat_template=TEMPLATE, use_tqdm=False)
    assert output.prompt == "x = "
    assert output.prompt_token_ids == llm.tokenizer.encode("x = ", add_special_tokens=False)


def test_failures_are_told_once(llm, caplog):
    bad = {"prompt_token_ids": [10**6]}
    llm.generate([TEXT, bad, bad], GREEDY, use_tqdm=False)
    (record,) = [r for r in caplog.records if r.name == "jaxrunner.engine.progress"]
    assert record.getMessage().startswith(
        "2 of 3 prompts failed, each with its `error`; the first: prompt_token_ids[0]=1000000 is"
    )
    caplog.clear()
    llm.generate([TEXT], GREEDY, use_tqdm=False)
    assert not caplog.records


def test_a_bar_of_the_users_own_is_drawn(llm):
    seen = []

    class Bar:
        n = 0

        def __init__(self, **kwargs):
            seen.append(kwargs)

        def update(self, count):
            self.n += count
            seen.append(self.n)

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

    llm.generate([TEXT] * 2, GREEDY, use_tqdm=Bar)
    assert seen[0]["total"] == 2 == seen[-1]


def test_a_late_program_is_told_once_in_words(caplog):
    sizes: Any = SIZES | dict(warm_up=True, max_num_seqs=1, decode_buckets=(1,))
    with LLM(str(embedded.PATH), **sizes) as llm:
        assert not [r for r in caplog.records if r.name == "jaxrunner.programs.program_table"]
        for _ in range(2):
            llm.generate(TEXT, SamplingParams(logprobs=1, max_tokens=2), use_tqdm=False)
        assert "the largest takes" not in llm.report() or "Bucket(" not in llm.report()
    (record,) = [r for r in caplog.records if r.name == "jaxrunner.programs.program_table"]
    assert "Compiling (forward, 32 tokens, 1 requests), which warm-up" in record.getMessage()


def test_sizes_are_told_in_words():
    assert str(Key("step", Bucket(512, 8))) == "step, 512 tokens, 8 requests"
    assert (
        str(Key("multi_step", MultiStepBucket(4, SampleSize(8))))
        == "multi_step, 4 steps, 8 requests"
    )
    assert (
        str(Key("sample", SampleSize(8, True, 20))) == "sample, 8 requests, all rules, 20 logprobs"
    )
