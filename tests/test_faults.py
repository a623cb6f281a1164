"""Steps, grammars, tokenizers and callbacks that fail: who is told, and that all else goes on."""

from dataclasses import replace
import functools
import random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrunner import RequestOutput, SamplingParams
from jaxrunner.engine.completions import Completions
from jaxrunner.engine.engine import Engine
from jaxrunner.models.llama import llama
from jaxrunner.runner import model_runner
from jaxrunner.sampling import RULES
from jaxrunner.sampling.custom import with_logits_fn
from jaxrunner.scheduling.request import Request
from jaxrunner.text.prompts import ParsedPrompt
from tests.support import failing, features, tiny
from tests.support.failing import HOWS, OUT_OF_MEMORY, nth
from tests.support.tiny_engine import KINDS, PROMPTS, drain, run

GREEDY = KINDS["greedy"]
SIZES = tiny.engine_config(
    num_blocks=16, max_num_batched_tokens=13, token_buckets=(13,), num_decode_steps=3
)
PLAIN = dict(logprobs=None, prompt_logprobs=None, logprob_token_ids=None)  # compile less


@pytest.fixture(autouse=True, scope="module")
def quick_compilation():
    """What fails and what goes on does not depend on how good the code is."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture
def fail(monkeypatch):
    return functools.partial(failing.programs, monkeypatch)


def engine(**changes: Any) -> Engine:
    """Returns an engine of sizes that all of these share, so that they compile once."""
    config, params = tiny.model_and_params()
    e = Engine(llama, config, SIZES, params, make_compiler=features.ParityCompiler)
    e.config = replace(e.config, **dict(num_decode_steps=1) | changes)  # what the host reads
    return e


@functools.cache
def answers() -> list[list[int]]:
    """Returns what `PROMPTS` are answered where nothing fails."""
    return run(engine(), PROMPTS, [GREEDY] * len(PROMPTS))


def check_whole(e: Engine) -> None:
    """Asserts that nothing is left behind, and that the engine answers as ever."""
    drain(e)
    assert run(e, PROMPTS, [GREEDY] * len(PROMPTS)) == answers()


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize(
    ("name", "n", "changes", "lens"),
    [
        ("step", 0, {}, [0]),
        ("step", 3, dict(async_depth=1), [2, 2, 2, 1, 1]),
        ("step", 3, dict(async_depth=3), [2, 2, 2, 1, 1]),
        ("multi_step", 1, dict(num_decode_steps=3), [7, 1]),
    ],
    ids=["the first", "sync", "three ahead", "3 steps a launch"],
)
def test_a_step_that_fails_ends_its_requests_alone(fail, how, name, n, changes, lens, caplog):
    e, want = engine(**changes), answers()
    failed = fail(nth(n, name), lambda: how)
    requests = [e.add(str(i), prompt, GREEDY) for i, prompt in enumerate(PROMPTS)]
    drain(e)
    assert caplog.records[0].message == "a step failed"
    ended = [request for request in requests if request.finish_reason == "error"]
    # What the steps before it gave is kept.
    assert failed == [name] and [len(r.output_token_ids) for r in ended] == lens
    words = "JaxRuntimeError: INTERNAL: ptxas died ... of a signal"
    if how != "no compilation":
        words = f"{OUT_OF_MEMORY}: lower gpu_memory_utilization, max_num_seqs or max_num_batched"
    for request, tokens in zip(requests, want, strict=True):
        got = request.output_token_ids
        if request in ended:
            assert words in str(request.error) and got == tokens[: len(got)]
        else:
            assert (request.error, got) == (None, tokens)
    check_whole(e)


@pytest.mark.parametrize("name", ["admit", "forward", "sample", "prompt_logprobs"])
@pytest.mark.parametrize("how", HOWS)
def test_whatever_program_fails(fail, name, how):
    e = engine()
    params = replace(KINDS["sampled"], seed=3, prompt_logprobs=1)
    first = [e.add(str(i), PROMPTS[i], params) for i in range(2)]
    failed = fail(nth(1, name), lambda: how)
    drain(e)
    late = [e.add(str(i), PROMPTS[i], params) for i in range(2)]
    drain(e)
    assert failed == [name] and {r.finish_reason for r in first + late} == {"error", "length"}
    check_whole(e)


def random_request(rng: np.random.Generator) -> tuple[list[int], SamplingParams]:
    return rng.integers(0, 60, rng.integers(1, 20)).tolist(), features.random_params(rng, **PLAIN)


@pytest.mark.parametrize(
    "depth", [2, *(pytest.param(depth, marks=pytest.mark.slow) for depth in (1, 3))]
)
def test_faults_at_random_change_no_token(fail, depth):
    """Each request has a prefix of its tokens; all of them, unless a step of it failed."""
    rng, dice, asked = np.random.default_rng(4), random.Random(depth), []
    solo, told, want = engine(), dict[str, Request](), []
    for _ in range(40):
        asked.append(random_request(rng))
        want.append(solo.add("a", *asked[-1], eos_token_ids=[features.EOS]))
        drain(solo)
    e = engine(async_depth=depth)
    failed = fail(lambda key: dice.random() < 0.05, lambda: dice.choice(HOWS))
    while len(told) < len(asked) or e.has_unfinished:
        if len(told) < len(asked) and e.scheduler.num_waiting < 3:
            name = str(len(told))
            told[name] = e.add(name, *asked[len(told)], eos_token_ids=[features.EOS])
        e.step()
        for pool in e.pools:
            pool.check(r.blocks[pool.group] for r in e.scheduler.running)
    drain(e)
    num_whole = 0
    for request, other in zip(told.values(), want, strict=True):
        tokens = request.output_token_ids
        if str(request.error).startswith("a step failed: JaxRuntimeError"):
            assert tokens == other.output_token_ids[: len(tokens)]
            continue
        num_whole += 1
        assert (tokens, request.finish_reason) == (other.output_token_ids, other.finish_reason)
    assert len(failed) >= 4 and 10 <= num_whole < len(asked)


def test_a_callback_that_raises_within_a_program_ends_its_step():
    def picky(logits: Any) -> np.ndarray:
        if not armed:
            return np.asarray(logits)
        raise KeyError("the callback's own words")

    def fn(logits: Any, row: Any) -> Any:
        shape = jax.ShapeDtypeStruct(logits.shape, logits.dtype)
        return jax.pure_callback(picky, shape, logits, vmap_method="sequential")

    config, params = tiny.model_and_params()
    rules = with_logits_fn(RULES, fn)
    e = Engine(llama, config, SIZES, params, rules=rules)
    armed, want = [True], answers()[1]
    bad = e.add("a", PROMPTS[1], GREEDY)
    drain(e)
    assert bad.finish_reason == "error" and "the callback's own words" in str(bad.error)
    armed.clear()
    assert run(e, PROMPTS[1:2], [GREEDY]) == [want]


def test_an_engine_without_a_state_says_so_and_hangs_nowhere(fail, monkeypatch):
    e = engine()
    requests = [e.add(str(i), p, GREEDY) for i, p in enumerate(PROMPTS)]
    fail(nth(2, "step"), lambda: "after the donation")

    def full(*_: Any) -> None:
        raise jax.errors.JaxRuntimeError(OUT_OF_MEMORY)

    monkeypatch.setattr(model_runner, "make_state", full)
    words = r"the device state was lost \(Jax.*\) and cannot be made anew \(Jax.*\): close this"
    told = [request for _ in range(9) if e.has_unfinished for request, _ in e.step()]
    assert set(requests) <= set(told) and not e.has_unfinished
    assert {request.finish_reason for request in requests} == {"error"}
    assert "cannot be made anew" in str(requests[-1].error)
    with pytest.raises(RuntimeError, match=words):
        e.add("b", PROMPTS[0], KINDS["greedy"])
    with pytest.raises(RuntimeError, match=words):
        e.step()
    e.close()
    e.close()
    with pytest.raises(RuntimeError, match="this engine is closed: build another one"):
        e.step()


@pytest.mark.parametrize("method", ["fill", "accept", "is_accepting"])
def test_a_grammar_that_fails_ends_its_request_alone(monkeypatch, method):
    class Panic(BaseException):
        """As Rust's, which is no `Exception`."""

    def panics(self: features.Parity, *args: Any) -> Any:
        if len(self.tokens) == 2 or method == "is_accepting":
            raise Panic("of Rust")
        return real(self, *args)

    real: Any = getattr(features.Parity, method)
    params = SamplingParams(seed=1, max_tokens=8, structured_outputs=features.GRAMMAR)
    # No token is left, so that it matters whether the grammar may end.
    none = replace(params, allowed_token_ids=[1, 3]) if method == "is_accepting" else params
    e = engine()
    monkeypatch.setattr(
        features.Parity, method, property(panics) if method == "is_accepting" else panics
    )
    bad = e.add("bad", PROMPTS[0], none)
    kept = [e.add(str(i), PROMPTS[i], GREEDY) for i in range(3)]
    drain(e)
    assert bad.finish_reason == "error" and len(bad.output_token_ids) <= 3
    assert "structured_outputs: the grammar failed: Panic: of Rust" in str(bad.error)
    assert [request.output_token_ids for request in kept] == answers()[:3]
    monkeypatch.undo()
    check_whole(e)


def test_nan_that_raises_loses_no_step_in_between():
    _, params = tiny.model_and_params()
    e = engine(nan_policy="raise")
    e.update_params(replace(params, embed=params.embed.at[33].set(jnp.nan)))
    kept = e.add(
        "kept", [3, 1], SamplingParams(max_tokens=6, structured_outputs=features.GRAMMAR, seed=1)
    )
    bad = e.add("bad", [33, 2], GREEDY)
    raised = 0
    while e.has_unfinished:
        try:
            e.step()
        except FloatingPointError:
            raised += 1
    assert raised == 1 and bad.error and kept.error is None and kept.output_token_ids


def answer(prompts: list[Any], params: SamplingParams, character: str) -> list[RequestOutput]:
    tokenizer: Any = tiny.tokenizer()
    tokenizer.inner = failing.Tokenizer(tokenizer.inner, character)
    completions = Completions(e := engine(), tokenizer, ())
    asked = [(ParsedPrompt(*prompt), params, {}) for prompt in prompts]
    outputs = completions.answer(asked, on_error="return", use_tqdm=False)
    assert not completions._states
    check_whole(e)
    return outputs


def test_a_text_that_the_tokenizer_cannot_encode_fails_alone():
    params = SamplingParams(temperature=0, max_tokens=5, detokenize=False)
    good, bad = answer([("ABC", None), ("AxC", None)], params, "x")
    assert good.error is None and len(good.outputs[0].token_ids) == 5
    assert bad.error == "the tokenizer cannot encode the text: Exception: no such character"
    assert (bad.outputs[0].finish_reason, bad.prompt) == ("error", "AxC")


@pytest.mark.parametrize("changes", [{}, dict(logprobs=2), dict(stop=["?"])])
def test_tokens_that_the_tokenizer_cannot_decode_end_their_request_alone(changes):
    prompts = [(None, prompt) for prompt in PROMPTS[:3]]
    params = SamplingParams(temperature=0, max_tokens=9, **changes)
    plain = answer(prompts, params, "~")
    ids = [output.outputs[0].token_ids for output in plain]
    token = next(t for t in ids[1][2:] if t not in ids[0] + PROMPTS[0] + PROMPTS[1])
    outputs = answer(prompts, replace(params, logprobs=None), chr(ord("A") + token))
    assert outputs[0].outputs[0].token_ids == ids[0]
    bad = outputs[1].outputs[0]
    assert bad.finish_reason == "error" and bad.token_ids == ids[1][: len(bad.token_ids)]
    assert outputs[1].error == "the tokenizer cannot decode its tokens: Exception: no such token"
    assert plain[1].outputs[0].text.startswith(bad.text)


def test_prompt_tokens_that_cannot_be_decoded_cost_the_logprobs_alone():
    params = SamplingParams(temperature=0, max_tokens=1, detokenize=False, prompt_logprobs=0)
    bad, good = answer([(None, [5, 6, 7]), (None, [5, 8])], params, chr(ord("A") + 7))
    assert bad.prompt_logprobs is None and "cannot decode its tokens" in str(bad.error)
    assert good.error is None and len(good.prompt_logprobs or ()) == 2
