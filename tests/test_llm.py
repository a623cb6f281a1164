"""The Python API on the embedded model: text, stops, streams, chat, bad input."""

import itertools
import json
import threading
from typing import Any

import jax
import numpy as np
import pytest

from jaxrunner import LLM, SamplingParams, embedded
from jaxrunner.text.tokenizer import Tokenizer

PROMPTS = [
    "def fibonacci(n):\n",
    "class Stack:\n",
    "import os\n\ndef walk(",
    "# naïve café 日本語 🎉\n",
    "with open(",
]
SIZES: dict[str, Any] = dict(
    dtype="float32", max_model_len=128, max_num_seqs=4, max_num_batched_tokens=64,
    token_buckets=(64,), decode_buckets=(4,), block_size=16, use_tqdm=False,
)  # fmt: skip
GREEDY = SamplingParams(temperature=0.0, max_tokens=20)


@pytest.fixture(scope="module")
def llm(shallow):
    with LLM(shallow, num_blocks=64, **SIZES) as llm:
        llm.engine.runner.programs.strict = True
        yield llm


@pytest.fixture(autouse=True)
def nothing_is_left(request):
    yield
    if "llm" in request.fixturenames:
        llm = request.getfixturevalue("llm")
        assert not llm.completions._states and not llm.engine.has_unfinished
        while llm.engine.step():
            pass
        assert [pool.num_free for pool in llm.engine.pools] == [64]


def texts(outputs):
    return [output.outputs[0].text for output in outputs]


def test_a_report_says_what_runs_and_why(llm):
    assert "layers and sampling: " in llm.report() and ", because " in llm.report()
    assert str(llm.memory_plan) in llm.report()
    if jax.default_backend() == "cpu":
        assert "reference, because mosaic_gpu wants a Hopper GPU" in llm.report()
    decode, prompts = llm.operations().values()
    assert {"attention", "linear", "mlp"} <= {one.operation for one in decode}
    assert {one.operation for one in decode} == {one.operation for one in prompts}


def test_outputs_come_in_the_order_of_their_prompts(llm):
    many = llm.generate(PROMPTS * 2, GREEDY, use_tqdm=False)
    assert [output.prompt for output in many] == PROMPTS * 2
    for output, prompt in zip(many, PROMPTS * 2, strict=True):
        completion = output.outputs[0]
        assert output.prompt_token_ids == llm.tokenizer.encode(prompt)
        assert completion.text == llm.tokenizer.decode(completion.token_ids)
        assert (output.finished, completion.finish_reason) == (True, "length")
        assert len(completion.token_ids) == 20
    assert texts(many)[:5] == texts(many)[5:]
    assert texts(many)[:5] == [texts(llm.generate(p, GREEDY, use_tqdm=False))[0] for p in PROMPTS]


def test_a_prompt_may_be_text_or_ids(llm):
    text, ids = PROMPTS[0], llm.tokenizer.encode(PROMPTS[0])
    outputs = llm.generate(
        [text, {"prompt": text}, {"prompt_token_ids": ids}, {"prompt_token_ids": np.array(ids)}],
        GREEDY, use_tqdm=False,
    )  # fmt: skip
    assert len(set(texts(outputs))) == 1
    assert [o.prompt for o in outputs] == [text, text, None, None]


def test_a_stream_tells_what_generate_returns(llm):
    params = [SamplingParams(seed=i, max_tokens=20 + i, stop=["self", "\n\n"]) for i in range(5)]
    whole = llm.generate(PROMPTS, params, use_tqdm=False)
    told: dict[str, list] = {}
    for output in llm.stream(PROMPTS, params):
        told.setdefault(output.request_id, []).append(output)
    assert max(len(parts) for parts in told.values()) > 2
    for parts, output in zip(told.values(), whole, strict=True):
        assert "".join(texts(parts)) == output.outputs[0].text
        ids = [token for part in parts for token in part.outputs[0].token_ids]
        assert ids == output.outputs[0].token_ids
        assert [p.finished for p in parts] == [False] * (len(parts) - 1) + [True]
        assert parts[-1].outputs[0].finish_reason == output.outputs[0].finish_reason


def test_a_stream_that_is_dropped_aborts_its_requests(llm):
    stream = llm.stream(PROMPTS, GREEDY)
    next(stream)
    stream.close()
    assert not llm.engine.has_unfinished


def test_streams_share_the_engine(llm):
    alone = texts(llm.generate(PROMPTS[:2], GREEDY, use_tqdm=False))
    streams = [llm.stream(p, GREEDY) for p in PROMPTS[:2]]
    parts = ["", ""]
    for pair in itertools.zip_longest(*streams):
        for i, output in enumerate(pair):
            parts[i] += output.outputs[0].text if output else ""
    assert parts == alone


def test_threads_share_the_engine(llm):
    alone = texts(llm.generate(PROMPTS, GREEDY, use_tqdm=False))
    got: dict[int, str] = {}

    def work(i: int) -> None:
        got[i] = texts(llm.generate(PROMPTS[i], GREEDY, use_tqdm=False))[0]

    threads = [threading.Thread(target=work, args=(i,)) for i in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [got[i] for i in range(5)] == alone


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_cuts_the_text(llm, include):
    free = llm.generate(PROMPTS[0], GREEDY, use_tqdm=False)[0].outputs[0]
    stop = free.text[9:14]
    params = SamplingParams(temperature=0.0, max_tokens=20, stop=["no such text", stop],
                            include_stop_str_in_output=include)  # fmt: skip
    got = llm.generate(PROMPTS[0], params, use_tqdm=False)[0].outputs[0]
    end = free.text.index(stop) + len(stop) * include
    assert (got.text, got.finish_reason, got.stop_reason) == (free.text[:end], "stop", stop)
    assert got.token_ids == free.token_ids[: len(got.token_ids)]


def test_eos_ends_a_request_unless_ignored(llm):
    free = llm.generate(PROMPTS[0], GREEDY, use_tqdm=False)[0].outputs[0].token_ids
    eos, llm.completions.eos_token_ids = llm.completions.eos_token_ids, frozenset([free[3]])
    try:
        for params, count, reason in (
            (GREEDY, free.index(free[3]) + 1, "stop"),
            (SamplingParams(temperature=0.0, max_tokens=free.index(free[3]) + 1), None, "stop"),
            (SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True), 20, "length"),
        ):
            got = llm.generate(PROMPTS[0], params, use_tqdm=False)[0].outputs[0]
            assert (got.finish_reason, got.stop_reason) == (reason, None)
            assert count is None or len(got.token_ids) == count
    finally:
        llm.completions.eos_token_ids = eos


def test_a_request_ends_at_max_model_len(llm):
    params = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True)
    got = llm.generate(PROMPTS[0], params, use_tqdm=False)[0]
    assert len(got.prompt_token_ids) + len(got.outputs[0].token_ids) == 128


def test_defaults_come_from_the_generation_config(llm):
    assert llm.get_default_sampling_params() == SamplingParams(temperature=0.7, top_p=0.95)


def test_a_seed_repeats_and_no_seed_does_not(llm):
    seeded, free = SamplingParams(seed=3), SamplingParams(max_tokens=30)
    twice = [texts(llm.generate(PROMPTS, seeded, use_tqdm=False)) for _ in range(2)]
    assert twice[0] == twice[1]
    twice = [texts(llm.generate(PROMPTS, free, use_tqdm=False)) for _ in range(2)]
    assert twice[0] != twice[1]


def test_detokenize_false_gives_ids_alone(llm):
    params = SamplingParams(temperature=0.0, max_tokens=20, detokenize=False)
    got = llm.generate(PROMPTS[0], params, use_tqdm=False)[0].outputs[0]
    want = llm.generate(PROMPTS[0], GREEDY, use_tqdm=False)[0].outputs[0]
    assert (got.text, got.token_ids) == ("", want.token_ids)


BAD = {
    "empty": ({"prompt_token_ids": []}, "prompt has 0 tokens"),
    "too long": ("x " * 200, "max_model_len=128 leaves room for 127"),
    "id out of range": ({"prompt_token_ids": [5, 4096]}, r"prompt_token_ids[1]=4096"),
    "negative id": ({"prompt_token_ids": [-1]}, r"prompt_token_ids[0]=-1"),
    "wrong type of id": ({"prompt_token_ids": [1.5]}, "must be an integer"),
    "wrong type": (17.5, "a prompt must be"),
    "unknown key": ({"promt": "x"}, "unknown keys ['promt']"),
    "half a surrogate": ("\ud83d", "surrogate"),
}


@pytest.mark.parametrize("bad,message", BAD.values(), ids=BAD)
def test_a_bad_prompt_fails_alone(llm, bad, message):
    outputs = llm.generate([PROMPTS[0], bad, PROMPTS[1]], GREEDY, use_tqdm=False)
    assert outputs[1].outputs[0].finish_reason == "error" and message in outputs[1].error
    assert outputs[1].finished
    good = llm.generate(PROMPTS[:2], GREEDY, use_tqdm=False)
    assert [texts(outputs)[0], texts(outputs)[2]] == texts(good)
    with pytest.raises((TypeError, ValueError)) as error:
        llm.generate([PROMPTS[0], bad], GREEDY, use_tqdm=False, on_error="raise")
    assert message in str(error.value)


def test_bad_calls_raise(llm):
    for wrong in ([GREEDY] * 3, []):
        with pytest.raises(ValueError, match="sampling_params must be one, or one for each of 2"):
            llm.generate(PROMPTS[:2], wrong)
    with pytest.raises(ValueError, match="priority must be one, or one for each of 2 prompts"):
        llm.generate(PROMPTS[:2], GREEDY, priority=[1])
    with pytest.raises(ValueError, match="on_error must be 'return' or 'raise', got 'ignore'"):
        llm.generate(PROMPTS, GREEDY, on_error="ignore")
    with pytest.raises(TypeError, match="sampling_params must be a SamplingParams, got dict"):
        llm.generate(PROMPTS[:1], {"temperature": 0.0})


def test_abort_ends_a_request(llm):
    outputs = []
    for output in llm.stream(PROMPTS[:2], GREEDY):
        outputs.append(output)
        for request_id in [output.request_id, "unknown"] * (len(outputs) == 1):
            llm.abort(request_id)
    ends = {o.request_id: o.outputs[0].finish_reason for o in outputs if o.finished}
    assert sorted(ends.values()) == ["abort", "length"]


def test_chat_renders_the_template(llm):
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}" \
               "{% if add_generation_prompt %}assistant:{% endif %}"  # fmt: skip
    message = [{"role": "user", "content": "hello"}]
    got = llm.chat(message, GREEDY, chat_template=template, use_tqdm=False)
    ids = llm.tokenizer.encode("user: hello\nassistant:", add_special_tokens=False)
    want = llm.generate({"prompt_token_ids": ids}, GREEDY, use_tqdm=False)
    assert texts(got) == texts(want)
    two = llm.chat([message, message], GREEDY, chat_template=template, use_tqdm=False)
    assert texts(two) == texts(want) * 2
    with pytest.raises(ValueError, match="chat_template"):
        llm.chat(message, GREEDY, use_tqdm=False)


def test_a_closed_llm_refuses_and_closes_twice():
    llm = LLM(str(embedded.PATH), num_blocks=64, warm_up=False, **SIZES)
    llm.generate(PROMPTS[0], GREEDY, use_tqdm=False)
    llm.close()
    llm.close()
    with pytest.raises(RuntimeError, match="this engine is closed: build another one"):
        llm.generate(PROMPTS[0])


def test_a_model_without_a_tokenizer_takes_ids(tmp_path):
    config = json.loads((embedded.PATH / "config.json").read_text()) | {"num_hidden_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with LLM(str(tmp_path), load_format="dummy", skip_tokenizer_init=True, warm_up=False,
             kv_cache_memory_bytes=1 << 20, **SIZES) as llm:  # fmt: skip
        ids, text = llm.generate([{"prompt_token_ids": [1, 2, 3]}, "x"], GREEDY, use_tqdm=False)
        assert len(ids.outputs[0].token_ids) == 20 and ids.outputs[0].text == ""
        assert "leaves no tokenizer" in str(text.error)
        with pytest.raises(ValueError, match="there is no tokenizer: leave skip_tok"):
            llm.chat([{"role": "user", "content": "x"}])
        params = SamplingParams(bad_words=["x"])
        (bad,) = llm.generate([{"prompt_token_ids": [1]}], params, use_tqdm=False)
        assert "bad_words has the text 'x' and there is no tokenizer: give token ids" == bad.error


BAD_SETTINGS = [
    (dict(dtype="int8"), "dtype must be one of"),
    (dict(load_format="pt"), "load_format must be one of"),
    (dict(generation_config="hf"), "generation_config must be one of"),
    (dict(max_model_len=4096), "max_model_len=4096 is over the model's 2048 positions"),
    (dict(num_blocks=7), "num_blocks=7 holds 112 tokens, one request of max_model_len=128"),
    (
        dict(num_blocks=8, kv_cache_memory_bytes=1),
        "num_blocks and kv_cache_memory_bytes each set the size of the KV cache: give one",
    ),
    (dict(gpu_memory_utilization=1.5), "gpu_memory_utilization=1.5 is out of range"),
    (dict(max_num_seqs=0), "max_num_seqs=0 is out of range: take an integer from 1"),
    (dict(decode_buckets=(4, 2)), "decode_buckets must be ascending sizes over 0"),
    (dict(kv_cache_dtype="int4"), "kv_cache_dtype must be one of"),
    (dict(policy="lifo"), "policy must be one of"),
    (dict(hf_overrides={"hidden_act": "gelu"}), "hidden_act='gelu' is not supported"),
]


@pytest.mark.parametrize("changes,message", BAD_SETTINGS)
def test_bad_settings_are_named(changes, message):
    with pytest.raises(ValueError) as error:
        LLM(str(embedded.PATH), **SIZES | dict(warm_up=False) | changes)
    assert message in str(error.value)
    with pytest.raises(TypeError, match="tensor_parallel"):
        LLM(str(embedded.PATH), tensor_parallel=2, **SIZES)


def test_a_tokenizer_of_ones_own_is_used():
    tokenizer = Tokenizer.from_folder(embedded.PATH)
    with LLM(str(embedded.PATH), tokenizer=tokenizer, warm_up=False, num_blocks=64, **SIZES) as llm:
        assert llm.tokenizer is tokenizer
