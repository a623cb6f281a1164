"""Several completions of a prompt: their seeds, what they share, how a stream tells them."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from jaxrunner import LLM, SamplingParams, embedded
from jaxrunner.api.sampling_params import RequestOutputKind
from jaxrunner.engine.completions import BEGIN_AFTER
from jaxrunner.engine.engine import Engine
from jaxrunner.text.bad_word_ids import encode_words

SIZES: dict[str, Any] = dict(
    dtype="float32", max_model_len=128, max_num_seqs=4, max_num_batched_tokens=64,
    token_buckets=(64,), decode_buckets=(4,), block_size=16, use_tqdm=False, warm_up=False,
)  # fmt: skip
TEXT = "def read(path):\n    with open(path) as f:\n        "


@pytest.fixture(scope="module")
def llm(shallow):
    with LLM(shallow, num_blocks=64, **SIZES) as llm:
        yield llm


def ids(llm, prompt, params) -> list[int]:
    return llm.generate([prompt], params, use_tqdm=False)[0].outputs[0].token_ids


@pytest.mark.parametrize("caching", [True, False])
def test_completions_are_those_of_requests_with_the_next_seeds(llm, caching):
    params = SamplingParams(n=4, seed=2**64 - 2, max_tokens=12, temperature=1.2)
    llm.reset_prefix_cache()
    params = replace(params, skip_reading_prefix_cache=not caching)
    (output,) = llm.generate([TEXT], params, use_tqdm=False)
    assert [c.index for c in output.outputs] == [0, 1, 2, 3] and output.finished
    seeds = [2**64 - 2, 2**64 - 1, 0, 1]
    want = [ids(llm, TEXT, replace(params, n=1, seed=seed)) for seed in seeds]
    assert [c.token_ids for c in output.outputs] == want and len(set(map(tuple, want))) > 1


@pytest.mark.parametrize("prompt_len", [2, 16, 17, 33, 40])
def test_a_prompt_is_computed_once_for_all_its_completions(llm, prompt_len):
    """Whole blocks are shared and the last one is copied: one token each is computed again."""
    llm.reset_prefix_cache()
    prompt = {"prompt_token_ids": list(range(100, 100 + prompt_len))}
    computed = []
    launch = llm.engine.runner.step

    def spy(scheduled):
        computed.extend(scheduled.num_scheduled_tokens.values())
        return launch(scheduled)

    llm.engine.runner.step = spy
    try:
        params = SamplingParams(n=3, max_tokens=1, seed=5)
        (output,) = llm.generate([prompt], params, use_tqdm=False)
    finally:
        llm.engine.runner.step = launch
    assert sorted(computed) == [1, 1, prompt_len]
    alone = [ids(llm, prompt, SamplingParams(max_tokens=1, seed=5 + i)) for i in range(3)]
    assert [c.token_ids for c in output.outputs] == alone


def test_a_stream_tells_completions_apart(llm):
    params = SamplingParams(n=3, max_tokens=6, seed=1, temperature=1.0)
    whole = llm.generate([TEXT, "x"], params, use_tqdm=False)
    parts = list(llm.stream([TEXT, "x"], params))
    for output in whole:
        mine = [p for p in parts if p.prompt == output.prompt]
        assert [p.finished for p in mine] == [False] * (len(mine) - 1) + [True]
        for completion in output.outputs:
            told = [p.outputs[0] for p in mine if p.outputs[0].index == completion.index]
            assert "".join(t.text for t in told) == completion.text
            assert [i for t in told for i in t.token_ids] == completion.token_ids


def test_a_stream_reads_its_arguments_when_it_is_called(llm):
    params = SamplingParams(max_tokens=6, ignore_eos=True)
    stream = llm.stream("import ", params)
    params.max_tokens = 1
    assert sum(len(output.outputs[0].token_ids) for output in stream) == 6
    with pytest.raises(TypeError, match="sampling_params must be a SamplingParams"):
        llm.stream("import ", 3)


def test_all_completions_of_an_aborted_request_end(llm):
    stream = llm.stream([TEXT], SamplingParams(n=3, max_tokens=60, ignore_eos=True))
    first = next(stream)
    llm.abort(first.request_id)
    rest = list(stream)
    assert rest[-1].finished and not llm.engine.has_unfinished
    assert {p.outputs[0].finish_reason for p in rest} >= {"abort"}


def test_a_stream_tells_as_its_kind_says(llm):
    params = SamplingParams(n=2, max_tokens=5, seed=1, ignore_eos=True)
    (whole,) = llm.generate([TEXT], params, use_tqdm=False)
    texts = [completion.text for completion in whole.outputs]

    def told(kind):
        return list(llm.stream([TEXT], replace(params, output_kind=kind)))

    (final,) = told(RequestOutputKind.FINAL_ONLY)
    assert [c.text for c in final.outputs] == texts and final.finished
    growing = told(RequestOutputKind.CUMULATIVE)
    assert len(growing) >= 5 and growing[-1].finished
    for i, text in enumerate(texts):
        mine = [p.outputs[0].text for p in growing if p.outputs[0].index == i]
        assert mine[-1] == text and all(text.startswith(part) for part in mine)
        deltas = [p.outputs[0] for p in told(RequestOutputKind.DELTA) if p.outputs[0].index == i]
        assert "".join(d.text for d in deltas) == text
    with pytest.raises(ValueError, match=r"output_kind=DELTA is for LLM\.stream, and generate"):
        llm.generate([TEXT], replace(params, output_kind=RequestOutputKind.DELTA))


def test_only_some_kinds_of_warm_up_there_are():
    wrong: dict[str, Any] = SIZES | {"warm_up": "some"}
    with pytest.raises(ValueError, match=r"warm_up must be False, True, .*, got 'some'"):
        LLM(str(embedded.PATH), num_blocks=64, **wrong)


def test_stop_ids_and_their_reason(llm):
    greedy = SamplingParams(temperature=0.0, max_tokens=20)
    free = llm.generate(TEXT, greedy, use_tqdm=False)[0].outputs[0].token_ids
    stop = free[5]
    first = free.index(stop)
    for least in (0, first + 1):
        params = SamplingParams(temperature=0.0, max_tokens=20, stop_token_ids=[stop],
                                min_tokens=least)  # fmt: skip
        got = llm.generate(TEXT, params, use_tqdm=False)[0].outputs[0]
        if least:
            assert stop not in got.token_ids[:least] and len(got.token_ids) > least
        else:
            assert got.token_ids == free[: first + 1]
            assert (got.finish_reason, got.stop_reason) == ("stop", stop)


@pytest.mark.parametrize("word", ["return", " return", "  return"])
def test_a_bad_word_is_banned_with_a_space_and_without(llm, word):
    tokenizer = llm.get_tokenizer()
    words = encode_words(SamplingParams(bad_words=[word, "\n"]), tokenizer).bad_words
    want = [tokenizer.encode(w, add_special_tokens=False) for w in ("return", " return", "\n")]
    assert words == tuple(map(tuple, want))


def test_longest_answers_start_first_and_no_token_differs(llm):
    lengths, drawn = (3, 30, 3, 16, 30, 16, 1, 9, 30), np.random.default_rng(7)
    params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in lengths]
    prompts = [f"def f{i}(x):\n" for i in range(len(lengths))]
    llm.engine._seeds = np.random.default_rng(7)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert [output.prompt for output in outputs] == prompts
    started = sorted(range(len(lengths)), key=lambda i: outputs[i].metrics.first_token_s)
    assert [lengths[i] for i in started] == sorted(lengths, reverse=True)
    for prompt, one, output in zip(prompts, params, outputs, strict=True):
        one.seed = int(drawn.integers(2**63))  # seeds are drawn in the order of prompts
        assert ids(llm, prompt, one) == output.outputs[0].token_ids


@pytest.mark.parametrize("replicas", [1, 2])
def test_devices_begin_while_prompts_are_queued(shallow, replicas, monkeypatch):
    prompts = [f"def f{i}(x):\n" for i in range(40)]
    greedy = SamplingParams(temperature=0.0, max_tokens=8)
    with LLM(shallow, num_blocks=64, data_parallel_size=replicas, **SIZES) as llm:
        alone = [ids(llm, prompt, greedy) for prompt in prompts]
        events, add, launch = [], llm.completions.add, Engine.launch

        def launched(engine: Engine, *, block: bool = True) -> None:
            events.append("launch")
            launch(engine, block=block)

        monkeypatch.setattr(
            llm.completions, "add", lambda *a, **k: (events.append("add"), add(*a, **k))
        )
        monkeypatch.setattr(Engine, "launch", launched)
        bad = [{"prompt_token_ids": [-1]}] * 3
        outputs = llm.generate([*bad, *prompts], greedy, use_tqdm=False)[3:]
        assert [output.outputs[0].token_ids for output in outputs] == alone
        # Prompts that are refused do not count, so that they change no step of others.
        first = ["add"] * BEGIN_AFTER + ["launch"] * replicas
        assert (
            events[:3] == ["add"] * 3
            and events[3:][: 2 * len(first) + 8] == first * 2 + ["add"] * 8
        )
