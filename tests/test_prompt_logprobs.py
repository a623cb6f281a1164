"""Logprobs of prompts: over chunks, modes, the cache and preemption; and scores as arrays."""

from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxrunner import LLM, SamplingParams
from jaxrunner.engine.beam import BeamSearchParams
from jaxrunner.engine.engine import Engine
from jaxrunner.models.llama import llama
from jaxrunner.programs.program_table import Key, ProgramTable
from jaxrunner.text.prompts import ParsedPrompt
from tests.support import tiny
from tests.support.tiny import dense_logits

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]
SIZES: dict[str, Any] = dict(
    dtype="float32", max_model_len=128, max_num_seqs=4, max_num_batched_tokens=64,
    token_buckets=(64,), decode_buckets=(4,), block_size=16, use_tqdm=False, warm_up=False,
)  # fmt: skip


def engine(**changes) -> Engine:
    config, params = tiny.model_and_params()
    return Engine(llama, config, tiny.engine_config(**changes), params)


def entries(request) -> dict[int, tuple[float, int, list[int]]]:
    """Returns logprob, rank and the likeliest ids of each prompt token that was told."""
    found = {}
    for positions, part in request.prompt_logprobs:
        rows = zip(positions.tolist(), part.value, part.rank, part.top_ids, strict=True)
        for position, value, rank, ids in rows:
            assert position not in found or request.request_id == "preempted"
            found[position] = float(value), int(rank), ids[:3].tolist()
    return found


def run(e: Engine, name: str, prompt=PROMPT, **params: Any):
    params = {"temperature": 0, "max_tokens": 2, "prompt_logprobs": 3} | params
    request = e.add(name, prompt, SamplingParams(**params))
    while e.has_unfinished:
        e.step()
    return request


def oracle(prompt) -> dict[int, tuple[float, int, list[int]]]:
    """Returns the same from float64 softmaxes of a forward pass without a cache."""
    logits = dense_logits(*tiny.model_and_params(), prompt).astype(np.float64)
    logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    return {
        p: (
            logprobs[p - 1, token],
            int((logprobs[p - 1] >= logprobs[p - 1, token]).sum()),
            np.argsort(-logprobs[p - 1], kind="stable")[:3].tolist(),
        )
        for p, token in list(enumerate(prompt))[1:]
    }


def assert_close(got, want) -> None:
    assert got.keys() == want.keys()
    for position, (value, rank, ids) in want.items():
        assert got[position][1:] == (rank, ids)
        assert got[position][0] == pytest.approx(value, abs=1e-4)


# Sizes of an engine that computes prompts in chunks, and preempts: of two tests, so of one program.
CHUNKS: dict[str, Any] = dict(
    num_blocks=14, policy="priority", max_num_batched_tokens=8, token_buckets=(8,)
)


@pytest.mark.parametrize(("changes", "num_parts"), [({}, 1), (CHUNKS, 2)], ids=["whole", "chunks"])
def test_chunks_tell_what_the_whole_would(changes, num_parts):
    request = run(engine(**changes), "a")
    assert len(request.prompt_logprobs) == num_parts
    assert_close(entries(request), oracle(PROMPT))


def test_a_prompt_of_one_token_has_none():
    assert run(engine(), "a", [7]).prompt_logprobs == []


def test_widths_differ_within_a_batch():
    e = engine()
    asked = [e.add(str(k), PROMPT, SamplingParams(max_tokens=2, prompt_logprobs=k))
             for k in (0, 3, -1)]  # fmt: skip
    plain = e.add("none", PROMPT, SamplingParams(max_tokens=2))
    while e.has_unfinished:
        e.step()
    for request in asked:
        assert {p: e[:2] for p, e in entries(request).items()} == {
            p: e[:2] for p, e in entries(asked[0]).items()
        }
    assert plain.prompt_logprobs == []
    assert asked[2].prompt_logprobs[0][1].top_ids.shape[1] == 61


def test_preemption_in_a_prompt_starts_anew():
    long = [*PROMPT, *range(20), *PROMPT]
    e = engine(**CHUNKS)
    first = e.add("first", range(8), SamplingParams(max_tokens=36, temperature=0), priority=0)
    e.step()
    params = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=3)
    request = e.add("preempted", long, params, priority=9)
    while e.has_unfinished:
        e.step()
    assert e.scheduler.num_preemptions > 0 and len(first.output_token_ids) == 36
    assert_close(entries(request), oracle(long))


@pytest.mark.parametrize(
    "mode",
    ["processed_logits", *(pytest.param(mode, marks=pytest.mark.slow)
                           for mode in ("raw_logits", "processed_logprobs"))],
)  # fmt: skip
def test_prompts_honour_the_mode(mode):  # vLLM gives raw logprobs whatever the mode
    e = engine(logprobs_mode=mode)
    request = run(e, "a", temperature=0.5, top_k=4, seed=1, logit_bias={7: 2.0})
    logits = dense_logits(*tiny.model_and_params(), PROMPT).astype(np.float64)
    if mode.startswith("processed"):
        logits[:, 7] += 2
        logits /= 0.5
        for row in logits:
            row[np.argsort(-row, kind="stable")[4:]] = -np.inf
    if mode.endswith("logprobs"):
        logits -= np.log(np.exp(logits).sum(-1, keepdims=True))
    got = entries(request)
    for p, token in list(enumerate(PROMPT))[1:]:
        assert got[p][0] == pytest.approx(logits[p - 1, token], abs=1e-4)


def test_rules_of_outputs_leave_prompts_alone():
    """Stop ids may stand in a prompt, and a token is penalised for those before it alone."""
    logits = dense_logits(*tiny.model_and_params(), PROMPT).astype(np.float64)
    for p in range(1, len(PROMPT)):
        row, seen = logits[p - 1], PROMPT[:p]
        row[seen] = np.where(row[seen] > 0, row[seen] / 1.7, row[seen] * 1.7)
    for least in (0, 2):
        e = engine(logprobs_mode="processed_logits")
        asked = dict(repetition_penalty=1.7, min_tokens=least, stop_token_ids=[1, 4])
        got = entries(run(e, "a", **asked))
        want = [logits[p - 1, token] for p, token in list(enumerate(PROMPT))[1:]]
        np.testing.assert_allclose([got[p][0] for p in range(1, len(PROMPT))], want, atol=1e-4)


def test_ids_that_outputs_name_are_not_those_of_prompts():
    assert_close(entries(run(engine(), "a", logprob_token_ids=[7, 8, 9])), oracle(PROMPT))


def test_the_head_runs_on_the_tokens_that_ask_alone():  # vLLM runs it on all of all requests
    e = engine()
    launched = []

    class Spy(ProgramTable):
        def __getitem__(self, key: Key):
            launched.append(key)
            return super().__getitem__(key)

    e.runner.programs.__class__ = Spy
    e.add("long", range(25), SamplingParams(max_tokens=1))
    e.add("asks", PROMPT[:5], SamplingParams(max_tokens=1, prompt_logprobs=0))
    while e.has_unfinished:
        e.step()
    assert [key.name for key in launched].count("prompt_logprobs") == 1
    launched.clear()
    e.add("none", range(25), SamplingParams(max_tokens=1))
    while e.has_unfinished:
        e.step()
    assert "prompt_logprobs" not in [key.name for key in launched]


def test_a_prompt_with_logprobs_reads_no_cache_but_fills_it():
    e = engine()
    run(e, "a", prompt_logprobs=None)
    request = run(e, "b")
    assert request.num_cached_tokens == 0
    assert_close(entries(request), oracle(PROMPT))
    again = run(e, "c", prompt_logprobs=None)
    assert again.num_cached_tokens == 9
    assert again.output_token_ids == request.output_token_ids
    assert run(e, "d", prompt_logprobs=None, skip_reading_prefix_cache=True).num_cached_tokens == 0


@pytest.fixture(scope="module")
def llm(shallow):
    with LLM(shallow, num_blocks=64, **SIZES) as llm:
        yield llm


def test_entries_are_vllms(llm):
    params = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=2, logprobs=1)
    (output,) = llm.generate(["def f(x):"], params, use_tqdm=False)
    first, *rest = output.prompt_logprobs
    assert first is None and len(rest) == len(output.prompt_token_ids) - 1
    for token, entry in zip(output.prompt_token_ids[1:], rest, strict=True):
        assert next(iter(entry)) == token and 2 <= len(entry) <= 3
        assert entry[token].decoded_token == llm.tokenizer.decode([token])
        assert all(one.rank >= 1 and one.logprob <= 0 for one in entry.values())
    completion = output.outputs[0]
    assert completion.cumulative_logprob == pytest.approx(completion.raw_logprobs.sum(), abs=1e-5)


def scored(llm, ids: list[int]) -> np.ndarray:
    """Returns the logprob of each token from `generate`, as dicts."""
    params = SamplingParams(max_tokens=1, prompt_logprobs=0)
    (output,) = llm.generate([{"prompt_token_ids": ids}], params, use_tqdm=False)
    rest = zip(ids[1:], output.prompt_logprobs[1:], strict=True)
    return np.array([entry[token].logprob for token, entry in rest])


def test_scores_are_arrays_of_the_same_numbers(llm):
    text = 'def main():\n    """Run the tests."""\n    return unittest.main()\n'
    ids = llm.tokenizer.encode(text)
    (scores,) = llm.score_tokens([text], use_tqdm=False)
    np.testing.assert_allclose(scores.logprobs, scored(llm, ids), atol=1e-4)
    assert scores.token_ids.tolist() == ids[1:]
    assert ((scores.ranks == 1) == scores.is_likeliest).all()
    (tail,) = llm.score_tokens([text], start=7, use_tqdm=False)
    np.testing.assert_allclose(tail.logprobs, scores.logprobs[6:], atol=1e-4)


def test_loglikelihood_takes_contexts_from_the_cache(llm):
    llm.reset_prefix_cache()
    context = (
        "import os\nimport sys\n\n\ndef read(path):\n    with open(path) as f:\n        return"
    )
    found = llm.loglikelihood([(context, " f"), (context, " self"), (context, "")][:2],
                              use_tqdm=False)  # fmt: skip
    ids = llm.tokenizer.encode(context)
    whole: list[int] = []
    for i, rest in enumerate((" f", " self")):
        whole = [*ids, *llm.tokenizer.encode(rest, add_special_tokens=False)]
        want = scored(llm, whole)[len(ids) - 1 :]
        assert found.logprob[i] == pytest.approx(want.sum(), abs=1e-4)
        greedy = llm.generate(
            [{"prompt_token_ids": ids}],
            SamplingParams(temperature=0, max_tokens=len(want)), use_tqdm=False,
        )[0].outputs[0]  # fmt: skip
        assert found.is_greedy[i] == (greedy.token_ids == whole[len(ids) :])
    assert found.logprob.dtype == np.float64 and found.is_greedy.dtype == np.bool_
    states: list[Any] = []
    llm.completions.add(
        ParsedPrompt(token_ids=whole), SamplingParams(max_tokens=1, prompt_logprobs=0),
        into=states, prompt_logprobs_start=len(ids),
    )  # fmt: skip
    llm.completions.run(states)
    assert states[0].request.num_cached_tokens > 16


def test_a_space_belongs_to_the_continuation_and_no_context_is_bos(llm):
    a, b = llm.loglikelihood([("return ", "x"), ("return", " x")], use_tqdm=False).logprob
    assert a == b
    (empty,) = llm.loglikelihood([("", "import os")], use_tqdm=False).logprob
    bos = llm.tokenizer.bos_token_id
    rest = llm.tokenizer.encode("import os", add_special_tokens=False)
    (ids,) = llm.loglikelihood([([bos], rest)], use_tqdm=False).logprob
    assert empty == pytest.approx(ids, abs=1e-5)


@pytest.mark.parametrize(
    "pairs,error,message",
    [
        (["ab"], TypeError, r"pair 0 must be \(context, continuation\), got 'ab'"),
        ([("a", "b", "c")], TypeError, r"pair 0 must be \(context, continuation\)"),
        ([("a", "b"), ("a", "")], ValueError, "pair 1 has an empty continuation: give at least"),
    ],
)
def test_a_bad_pair_is_named(llm, pairs, error, message):
    with pytest.raises(error, match=message):
        llm.loglikelihood(pairs, use_tqdm=False)
    assert not llm.engine.has_unfinished


def test_a_prompt_whose_logits_are_nan_cannot_be_scored(llm):
    embed = llm.engine.runner.params.embed
    llm.engine.runner.params = replace(llm.engine.runner.params, embed=embed.at[33].set(jnp.nan))
    try:
        with pytest.raises(ValueError, match="prompt 0 cannot be scored: the model gave NaN"):
            llm.score_tokens([{"prompt_token_ids": ids} for ids in ([33, 6], [5, 6])],
                             use_tqdm=False)  # fmt: skip
        with pytest.raises(ValueError, match="a beam failed: the model gave NaN"):
            params = BeamSearchParams(beam_width=2, max_tokens=3)
            llm.beam_search([{"prompt_token_ids": [33, 6]}], params, use_tqdm=False)
    finally:
        llm.engine.runner.params = replace(llm.engine.runner.params, embed=embed)
        llm.reset_prefix_cache()


def test_without_a_tokenizer_an_empty_context_needs_a_token(shallow):
    with LLM(shallow, num_blocks=64, skip_tokenizer_init=True, **SIZES) as llm:
        message = "pair 0 has an empty context and the model no BOS: give a token"
        with pytest.raises(ValueError, match=message):
            llm.loglikelihood([([], [5])], use_tqdm=False)
        found = llm.loglikelihood([([0], [5, 6])], use_tqdm=False)
        assert len(found.tokens[0].logprobs) == 2
