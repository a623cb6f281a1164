"""What requests of vLLM's programs ask for beside sampling, and the modules that they import."""

from typing import Any

import pytest
from tokenizers import AddedToken, decoders, models
from tokenizers import Tokenizer as Inner

from jaxrunner import LLM, SamplingParams, embedded
from jaxrunner.api.logprobs import FlatLogprobs, Logprob
from jaxrunner.api.outputs import CompletionOutput, RequestOutput
from jaxrunner.inputs import TextPrompt, TokensPrompt
from jaxrunner.sampling_params import (
    BeamSearchParams,
    RequestOutputKind,
    StructuredOutputsParams,
)
from jaxrunner.text.detokenizer import Detokenizer
from jaxrunner.text.tokenizer import Tokenizer
from tests.support.small_llm import SIZES

TEXT = "def fibonacci(n):\n    if n < 2:\n        return n\n    return"
GREEDY: dict[str, Any] = dict(temperature=0.0, max_tokens=6)


@pytest.fixture(scope="module")
def llm():
    with LLM(str(embedded.PATH), **SIZES) as llm:
        yield llm


def ask(llm, prompt: Any, **fields: Any) -> Any:
    return llm.generate(prompt, SamplingParams(**GREEDY | fields), use_tqdm=False)[0]


def test_the_modules_of_vllm_are_there():
    prompts = TextPrompt(prompt="x"), TokensPrompt(prompt_token_ids=[1])
    assert [list(p) for p in prompts] == [["prompt"], ["prompt_token_ids"]]
    for name in (BeamSearchParams, RequestOutputKind, StructuredOutputsParams, CompletionOutput):
        assert name.__module__.startswith("jaxrunner.")
    assert RequestOutput.__name__ == "RequestOutput"


def test_a_salt_keeps_prefixes_apart(llm):
    """Blocks are found by prompts of the same salt alone, and no salt is another one."""
    assert llm.reset_prefix_cache()
    free = ask(llm, TEXT)
    assert free.num_cached_tokens == 0 < ask(llm, TEXT).num_cached_tokens
    for salt in ("a", "b", "\0", "0  "):
        prompt = {"prompt": TEXT, "cache_salt": salt}
        first, second = ask(llm, prompt), ask(llm, prompt)
        assert first.num_cached_tokens == 0 < second.num_cached_tokens
        assert free.outputs[0].token_ids == first.outputs[0].token_ids
    two = ask(llm, {"prompt": TEXT, "cache_salt": "c"}, n=2, temperature=1.0, seed=1)
    assert len(two.outputs) == 2 and two.num_cached_tokens == 0
    params = BeamSearchParams(beam_width=2, max_tokens=2)
    (salted,) = llm.beam_search({"prompt": TEXT, "cache_salt": "d"}, params, use_tqdm=False)
    (plain,) = llm.beam_search(TEXT, params, use_tqdm=False)
    assert [s.tokens for s in salted.sequences] == [s.tokens for s in plain.sequences]
    hashes = {blocks[0] for blocks in llm.engine.pools[0]._blocks_of.values() if blocks}
    assert len(hashes) >= 5  # first blocks of so many salts; others are given to the last ones


@pytest.mark.parametrize("salt", ["", 3, b"a", ["a"], "\ud800"])
def test_a_bad_salt_is_refused_by_name(llm, salt):
    output = ask(llm, {"prompt": TEXT, "cache_salt": salt})
    assert "cache_salt of a prompt" in output.error
    if not isinstance(salt, str):
        with pytest.raises(TypeError, match="cache_salt must be a string or None, got"):
            llm.engine.add("x", [1], SamplingParams(), cache_salt=salt)
    with pytest.raises(TypeError, match="cache_salt of a prompt must be a text that is not empty"):
        llm.generate({"prompt": "x", "cache_salt": 3}, on_error="raise")


def test_a_prompt_is_cut_to_its_last_tokens(llm):
    ids = llm.tokenizer.encode(TEXT)
    cut = ask(llm, TEXT, truncate_prompt_tokens=5)
    assert cut.prompt == TEXT and cut.prompt_token_ids == ids[-5:]
    want = ask(llm, {"prompt_token_ids": ids[-5:]})
    assert cut.outputs[0].token_ids == want.outputs[0].token_ids
    assert ask(llm, TEXT, truncate_prompt_tokens=10**6).prompt_token_ids == ids
    whole = ask(llm, {"prompt_token_ids": ids * 9}, truncate_prompt_tokens=-1)
    assert whole.prompt_token_ids == (ids * 9)[-63:] and len(whole.outputs[0].token_ids) == 1
    long = "x = 1\n" * 50_000  # longer than `max_model_len` tokens can be
    assert len(ask(llm, long, truncate_prompt_tokens=-1).prompt_token_ids) == 63
    assert "max_model_len" in ask(llm, long).error
    params = SamplingParams(truncate_prompt_tokens=2, max_tokens=1)
    request = llm.engine.add("x", ids, params)
    params.max_tokens = 9  # of the user's own object
    assert request.prompt_token_ids == ids[-2:] and request.params.max_tokens == 1
    llm.engine.abort(["x"])


def test_flat_logprobs_read_like_the_others(llm):
    fields: dict[str, Any] = dict(logprobs=3, prompt_logprobs=2)
    plain, flat = (ask(llm, TEXT, **fields, flat_logprobs=flat) for flat in (False, True))
    assert isinstance(flat.outputs[0].logprobs, FlatLogprobs)
    assert list(flat.outputs[0].logprobs) == plain.outputs[0].logprobs
    assert flat.outputs[0].logprobs[1:3][0] == plain.outputs[0].logprobs[1]
    assert flat.prompt_logprobs[0] == {} and plain.prompt_logprobs[0] is None
    assert list(flat.prompt_logprobs)[1:] == plain.prompt_logprobs[1:]
    told = flat.outputs[0].logprobs
    assert len(told.token_ids) == len(told.ranks) == told.end_indices[-1] >= 6 * 3
    streamed = FlatLogprobs()
    for part in llm.stream(TEXT, SamplingParams(**GREEDY | fields, flat_logprobs=True)):
        streamed += part.outputs[0].logprobs
    assert streamed == told
    assert ask(llm, TEXT, flat_logprobs=True).outputs[0].logprobs is None


def test_a_flat_list_grows_and_is_cut():
    flat, entry = FlatLogprobs(), {5: Logprob(-1.0, 1, "a"), 6: Logprob(-2.0, None, None)}
    flat.extend([None, entry])
    flat.append_fast([7], [-3.0], [4], ["b"])
    assert list(flat) == [{}, entry, {7: Logprob(-3.0, 4, "b")}] and flat[-1] == flat[2]
    assert flat[::2].start_indices == [0, 0] and len(flat[5:]) == 0


def test_added_tokens_stand_apart_or_not():
    inner = Inner(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    inner.decoder = decoders.WordPiece()
    inner.add_tokens([AddedToken("<x>", special=True), AddedToken("<y>")])
    tokenizer = Tokenizer(inner)

    def text(ids: list[int], skip: bool, spaces: bool) -> str:
        detokenizer = Detokenizer(tokenizer, [0], skip, spaces)
        shown = "".join(detokenizer.append([i]) for i in ids) + detokenizer.flush()
        assert shown == detokenizer.text
        return shown

    ids = [2, 3, 2, 1, 3, 0, 2]
    assert text(ids, False, True) == " <x> <y> <x> b <y> a <x>"
    assert text(ids, False, False) == " <x><y><x> b <y> a <x>"
    assert text(ids, True, False) == text(ids, True, True) == " <y> b <y> a"
