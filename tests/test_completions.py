"""Several completions of a prompt, beams, logits functions, and logits that are not numbers."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from jaxrunner import LLM, SamplingParams, embedded
from jaxrunner.beam import BeamSearchParams
from jaxrunner.engine import Engine
from jaxrunner.models.llama import llama
from jaxrunner.sampling import RULES
from jaxrunner.sampling.custom import host_logits_fn, logits_fn, with_logits_fn

SIZES: dict[str, Any] = dict(
    dtype="float32", max_model_len=128, max_num_seqs=8, max_num_batched_tokens=64,
    token_buckets=(64,), decode_buckets=(8,), block_size=16, use_tqdm=False, warm_up=False,
)  # fmt: skip
TEXT = "def read(path):\n    with open(path) as f:\n        "


@pytest.fixture(scope="module")
def llm():
    with LLM(str(embedded.PATH), num_blocks=64, **SIZES) as llm:
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
            assert sum([t.token_ids for t in told], []) == completion.token_ids


def test_all_completions_of_an_aborted_request_end(llm):
    stream = llm.stream([TEXT], SamplingParams(n=3, max_tokens=60, ignore_eos=True))
    first = next(stream)
    llm.abort(first.request_id)
    rest = list(stream)
    assert rest[-1].finished and not llm.engine.has_unfinished
    assert {p.outputs[0].finish_reason for p in rest} >= {"abort"}


@pytest.mark.parametrize("width,penalty", [(1, 1.0), (3, 1.0), (4, 0.0), (4, 2.0)])
@pytest.mark.parametrize("eos", [None, 199])  # 199 is a line break: it occurs
def test_beams_are_those_of_transformers(llm, width, penalty, eos):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        embedded.PATH, dtype=torch.float32
    )
    llm.completions.eos_token_ids, kept = frozenset({eos} - {None}), llm.completions.eos_token_ids
    params = BeamSearchParams(
        beam_width=width, max_tokens=10, length_penalty=penalty, ignore_eos=eos is None,
        include_stop_str_in_output=True,
    )  # fmt: skip
    try:
        (got,) = llm.beam_search([TEXT], params, use_tqdm=False)
    finally:
        llm.completions.eos_token_ids = kept
    prompt = llm.tokenizer.encode(TEXT)
    with torch.no_grad():
        want = reference.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            num_beams=width, num_return_sequences=width, max_new_tokens=10, do_sample=False,
            length_penalty=penalty, early_stopping=False, eos_token_id=eos, pad_token_id=0,
            return_dict_in_generate=True, output_scores=True, temperature=None, top_p=None,
        )  # fmt: skip
    rows = [row[: len(s.tokens)].tolist() for row, s in zip(want.sequences, got.sequences)]
    assert [s.tokens for s in got.sequences] == rows
    if width > 1:
        scores = [s.score for s in got.sequences]
        np.testing.assert_allclose(scores, want.sequences_scores.numpy(), atol=1e-4)
    ends = {s.finish_reason for s in got.sequences}
    assert ends <= {"stop", "length"} and (eos is not None or ends == {"length"})


def test_a_beam_computes_one_token_a_step(llm):
    llm.reset_prefix_cache()
    computed = []
    launch = llm.engine.runner.step

    def spy(scheduled):
        computed.append(scheduled.total_num_scheduled_tokens)
        return launch(scheduled)

    llm.engine.runner.step = spy
    try:
        params = BeamSearchParams(beam_width=3, max_tokens=8, ignore_eos=True)
        llm.beam_search([TEXT], params, use_tqdm=False)
    finally:
        llm.engine.runner.step = launch
    first, *rest = [n for n in computed if n]
    assert first == len(llm.tokenizer.encode(TEXT)) and rest == [3] * 7


@pytest.mark.parametrize(
    "changes,message",
    [
        (dict(beam_width=0), "beam_width=0 is out of range"),
        (dict(temperature=0.5), "temperature=0.5 has no effect on a beam search"),
    ],
)
def test_bad_beams_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        BeamSearchParams(**dict(beam_width=2, max_tokens=3) | changes)


def test_a_beam_without_room_is_refused(llm):
    params = BeamSearchParams(beam_width=2, max_tokens=127)
    with pytest.raises(ValueError, match="prompt 0 has .* max_tokens=127 more exceed max_model_len"):
        llm.beam_search([TEXT], params, use_tqdm=False)


def engine(rules=RULES, params=None, **changes) -> Engine:
    config, default = tiny.model_and_params()
    sizes = tiny.engine_config(**changes)
    return Engine(llama, config, sizes, params or default, rules=rules)


def answer(e: Engine, **params) -> list[int]:
    request = e.add("a", [3, 1, 4, 1, 5], SamplingParams(**dict(max_tokens=8) | params))
    while e.has_unfinished:
        e.step()
    assert request.error is None, request.error
    return request.output_token_ids


def only_successors(logits, row):
    """Allows the token after the last one alone, `step` further."""
    last = row.token_ids[row.position - 1]
    wanted = (last + row.args["step"].astype(jnp.int32)) % logits.size
    return jnp.where(jnp.arange(logits.size) == wanted, logits, -jnp.inf)


def host_successors(logits, token_ids, args):
    out = np.full_like(logits, -np.inf)
    wanted = (token_ids[-1] + int(args["step"])) % len(logits)
    out[wanted] = logits[wanted]
    return out


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("make,fn", [(logits_fn, only_successors),
                                     (host_logits_fn, host_successors)])  # fmt: skip
def test_a_logits_function_decides(make, fn, temperature):
    e = engine(with_logits_fn(RULES, make(fn, extra_args={"step": 1})))
    assert answer(e, temperature=temperature) == [6, 7, 8, 9, 10, 11, 12, 13]
    e2 = answer(e, temperature=temperature, extra_args={"step": 2}, logit_bias={7: 100.0})
    assert e2 == [7, 9, 11, 13, 15, 17, 19, 21]


def test_a_logits_function_that_changes_nothing_changes_nothing():
    rules = with_logits_fn(RULES, lambda logits, row: logits)
    for params in (dict(temperature=0.0), dict(seed=3), dict(seed=3, top_k=5)):
        assert answer(engine(rules), **params) == answer(engine(), **params)


def test_a_host_function_that_raises_ends_its_request_alone(caplog):
    def picky(logits, token_ids, args):
        if token_ids[0] == 9:
            raise KeyError("no")
        return logits

    e = engine(with_logits_fn(RULES, host_logits_fn(picky)))
    good = e.add("a", [3, 1, 4], SamplingParams(max_tokens=5, seed=1))
    bad = e.add("b", [9, 1, 4], SamplingParams(max_tokens=5, seed=1))
    while e.has_unfinished:
        e.step()
    assert bad.finish_reason == "error" and bad.output_token_ids == []
    assert len(good.output_token_ids) == 5
    assert "a host logits function failed" in caplog.text


@pytest.mark.parametrize(
    "make,error,message",
    [
        (lambda: logits_fn(3), TypeError, "logits_fn must be a function, got int: pass one"),
        (lambda: host_logits_fn(3), TypeError, "host_logits_fn must be a function, got int"),
        (
            lambda: logits_fn(only_successors, extra_args=dict.fromkeys(map(str, range(17)), 0)),
            ValueError, "extra_args of a logits_fn are 17, it may have 16",
        ),
        (
            lambda: answer(engine(with_logits_fn(RULES, lambda logits, row: logits[:5]))),
            ValueError, r"logits_fn must return float32\[61\], got float32\[5\]: return one logit",
        ),
        (
            lambda: answer(engine(), extra_args={"heat": 1.0}),
            ValueError, r"extra_args has 'heat', this engine's rules read \[\]: name it",
        ),
        (
            lambda: answer(engine(), bad_words=["word"]),
            ValueError, "bad_words has the text 'word', an engine takes token ids",
        ),
    ],
)  # fmt: skip
def test_a_bad_function_is_refused(make, error, message):
    with pytest.raises(error, match=message):
        make()


def poisoned(token: int, value: float):
    """Returns weights that make logits `value` once a request has said `token`."""
    _, params = tiny.model_and_params()
    embed = params.embed.at[token].set(value)
    return replace(params, embed=embed)


@pytest.mark.parametrize("value", [jnp.nan, jnp.inf])
@pytest.mark.parametrize("params", [dict(temperature=0.0), dict(seed=1), dict(seed=1, logprobs=2)])
def test_logits_that_are_no_numbers_end_their_request_alone(value, params):
    asked = SamplingParams(max_tokens=6, **params)
    prompts = [[3, 1, 4, 1], [5, 9, 2, 6, 5], [7, 33, 8], [2, 2]]  # the third has the token 33
    want = [answer_of(engine(), p, asked).output_token_ids for p in prompts]
    e = engine(params=poisoned(33, value), async_depth=2)
    requests = [e.add(str(i), p, asked) for i, p in enumerate(prompts)]
    while e.has_unfinished:
        e.step()
    assert requests[2].finish_reason == "error" and requests[2].output_token_ids == []
    assert requests[2].error.startswith("the model gave NaN or infinite logits")
    for i in (0, 1, 3):
        if 33 not in want[i]:
            assert requests[i].output_token_ids == want[i]
    # The blocks that held NaN serve others.
    for i in range(12):
        again = answer_of(e, prompts[0], asked, name=f"again {i}")
        assert again.output_token_ids == requests[0].output_token_ids


def answer_of(e: Engine, prompt, params, name="a"):
    request = e.add(name, prompt, params)
    while e.has_unfinished:
        e.step()
    return request


def test_nan_may_raise_and_then_the_engine_goes_on():
    e = engine(params=poisoned(33, jnp.nan), nan_policy="raise")
    bad = e.add("bad", [33, 1], SamplingParams(max_tokens=3))
    good = e.add("good", [3, 1], SamplingParams(max_tokens=3, temperature=0))
    with pytest.raises(FloatingPointError, match="request 'bad': the model gave NaN or infinite"):
        for _ in range(9):
            e.step()
    while e.has_unfinished:
        e.step()
    assert bad.finish_reason == "error" and len(good.output_token_ids) == 3


def test_nan_may_be_ignored():
    e = engine(params=poisoned(33, jnp.nan), nan_policy="ignore")
    request = answer_of(e, [33, 1], SamplingParams(max_tokens=3))
    assert request.finish_reason == "length" and len(request.output_token_ids) == 3
    with pytest.raises(ValueError, match="nan_policy must be one of .*, got 'hope'"):
        tiny.engine_config(nan_policy="hope")


def test_no_step_holds_a_table_of_slots_by_vocabulary():
    e = engine()
    sizes = [x.shape for x in jax.tree.leaves((e.runner.state.sampling, e.runner.state.requests))]
    assert not [s for s in sizes if 61 in s]
