"""Structured outputs through the engine: whatever the model wants to say, the text is valid."""

from concurrent.futures import Future
import json
import re
from typing import Any

import numpy as np
import pytest

from jaxrunner import LLM, SamplingParams, embedded
from jaxrunner.api.structured_outputs import StructuredOutputsParams
from jaxrunner.engine.engine import Engine
from jaxrunner.engine.structured_output_manager import StructuredOutputManager
from jaxrunner.models.llama import llama
from jaxrunner.scheduling.request import GrammarOutput
from tests.support import features, tiny

pytest.importorskip("llguidance")
SIZES: dict[str, Any] = dict(
    dtype="float32", max_model_len=128, max_num_seqs=4, max_num_batched_tokens=64,
    token_buckets=(64,), decode_buckets=(4,), block_size=16, use_tqdm=False, warm_up=False,
)  # fmt: skip
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
KINDS = {
    "json": dict(json=SCHEMA),
    "json_object": dict(json_object=True),
    "regex": dict(regex=r"[a-c]{3}-\d{2}"),
    "choice": dict(choice=["yes", "no", "maybe so"]),
    "grammar": dict(grammar='start: "<" word ">"\nword: /[a-z]{1,5}/'),
}


@pytest.fixture(scope="module")
def llm():
    with LLM(str(embedded.PATH), num_blocks=64, **SIZES) as llm:
        yield llm


def ask(llm, kind: str, prompts=("x = ",), **params: Any):
    wanted = StructuredOutputsParams(**KINDS[kind])
    params = dict(temperature=1.0, seed=3, max_tokens=120) | params
    return llm.generate(
        list(prompts), SamplingParams(structured_outputs=wanted, **params), use_tqdm=False
    )


def check(kind: str, text: str) -> None:
    if kind == "json":
        value = json.loads(text)
        assert list(value) == ["name", "age", "tags"] and 0 <= value["age"] <= 150
        assert len(value["name"]) <= 8 and set(value["tags"]) <= {"a", "b"}
    elif kind == "regex":
        assert re.fullmatch(r"[a-c]{3}-[0-9]{2}", text)
    elif kind == "choice":
        assert text in KINDS["choice"]["choice"]
    elif kind == "grammar":
        assert re.fullmatch("<[a-z]{1,5}>", text)


@pytest.mark.parametrize("temperature", [0.0, 1.5])
@pytest.mark.parametrize("kind", ["json", "regex", "choice", "grammar"])
def test_texts_are_valid(llm, kind, temperature):
    outputs = ask(llm, kind, ["x = ", "def f():\n", ""], temperature=temperature)
    for output in outputs[:2]:
        assert output.outputs[0].finish_reason == "stop", output
        check(kind, output.outputs[0].text)
    assert llm.generate(["x = "], SamplingParams(max_tokens=3), use_tqdm=False)[0].error is None


def test_an_object_that_does_not_end_is_cut(llm):
    (output,) = ask(llm, "json_object", max_tokens=9)
    assert output.outputs[0].text.startswith("{")
    assert (output.outputs[0].finish_reason, len(output.outputs[0].token_ids)) == ("length", 9)


def test_a_grammar_changes_nothing_of_its_neighbours(llm):
    free = SamplingParams(temperature=1.0, seed=9, max_tokens=24)
    ruled = SamplingParams(
        seed=1, max_tokens=60, structured_outputs=StructuredOutputsParams(**KINDS["json"])
    )
    alone = [llm.generate([p], s, use_tqdm=False)[0].outputs[0].token_ids
             for p, s in (("x = ", free), ("y = ", ruled))]  # fmt: skip
    both = llm.generate(["x = ", "y = ", "z"], [free, ruled, free], use_tqdm=False)
    assert [o.outputs[0].token_ids for o in both[:2]] == alone


def test_completions_of_one_prompt_have_their_own_state(llm):
    (output,) = ask(llm, "regex", n=3)
    texts = [c.text for c in output.outputs]
    assert len(set(texts)) > 1
    for text in texts:
        check("regex", text)


@pytest.mark.parametrize(
    "bad", [dict(regex="(a"), dict(json={"type": "strange"}), dict(grammar="start: nothing")]
)
def test_a_bad_grammar_fails_alone(llm, bad):
    wrong = SamplingParams(structured_outputs=StructuredOutputsParams(**bad))
    fine = SamplingParams(max_tokens=4, seed=1)
    good, failed = llm.generate(["a", "b"], [fine, wrong], use_tqdm=False)
    (kind,) = bad
    assert failed.error.startswith(f"structured_outputs.{kind} cannot be used: ")
    assert failed.outputs[0].finish_reason == "error" and failed.outputs[0].token_ids == []
    assert good.outputs[0].finish_reason == "length"
    assert not llm.engine.has_unfinished


def test_rules_that_contradict_the_grammar_give_way(llm):  # vLLM gives token 0
    """The choice is said and min_tokens forbids EOS: the grammar wins, the request ends well."""
    params = dict(min_tokens=40, max_tokens=50, temperature=0.0)
    (output,) = ask(llm, "choice", **params)
    assert output.outputs[0].text in KINDS["choice"]["choice"]
    assert (output.outputs[0].finish_reason, output.error) == ("stop", None)
    other = llm.tokenizer.encode("zzz", add_special_tokens=False)
    (output,) = ask(llm, "choice", allowed_token_ids=other)
    assert output.outputs[0].finish_reason == "error" and output.outputs[0].token_ids == []
    assert output.error.startswith("its rules leave no token to sample: allowed_token_ids")


def test_without_a_tokenizer_there_are_no_grammars():
    config, params = tiny.model_and_params()
    engine = Engine(llama, config, tiny.engine_config(), params)
    asked = SamplingParams(structured_outputs=StructuredOutputsParams(regex="a"))
    with pytest.raises(ValueError, match="structured_outputs needs the tokenizer of the model"):
        engine.add("a", [1, 2], asked)
    assert not engine.has_unfinished


def test_a_missing_library_fails_the_request_alone():
    def missing():
        raise ImportError("llguidance is missing")

    waiting = StructuredOutputManager(missing)
    config, params = tiny.model_and_params()
    engine = Engine(llama, config, tiny.engine_config(), params, make_compiler=missing)
    message = "structured_outputs cannot be used: llguidance is missing"
    with pytest.raises(ValueError, match=message):
        engine.add("a", [1], SamplingParams(structured_outputs=features.GRAMMAR))
    assert waiting.num_waiting == 0 and not engine.has_unfinished


def parity_engine(**changes) -> Engine:
    config, params = tiny.model_and_params()
    sizes = tiny.engine_config(**changes)
    return Engine(llama, config, sizes, params, make_compiler=features.ParityCompiler)


def test_a_request_that_waits_for_its_grammar_has_its_id():
    class Never(features.ParityCompiler):
        def submit(self, params):
            return Future()

    config, params = tiny.model_and_params()
    engine = Engine(llama, config, tiny.engine_config(), params, make_compiler=Never)
    asked = SamplingParams(structured_outputs=features.GRAMMAR, max_tokens=3)
    waiting = engine.add("a", [1], asked)
    with pytest.raises(ValueError, match="request 'a' is unfinished: give each live request"):
        engine.add("a", [1], asked)
    free = engine.add("b", [1], SamplingParams(max_tokens=3))
    while free.finish_reason is None:
        engine.step()
    engine.abort(["a"])
    assert waiting.finish_reason == "abort" and not engine.has_unfinished


def test_a_preempted_request_keeps_its_place_in_the_grammar():
    engine = parity_engine(num_blocks=13, async_depth=3)
    asked = SamplingParams(structured_outputs=features.GRAMMAR, max_tokens=14, seed=2)
    requests = [engine.add(str(i), range(i, i + 11), asked, eos_token_ids=[60]) for i in range(4)]
    while engine.has_unfinished:
        engine.step()
    assert engine.scheduler.num_preemptions > 0
    for request in requests:
        said = [t for t in request.output_token_ids if t != 60]
        assert [t % 2 for t in said] == [i % 2 for i in range(len(said))] and said


def test_a_refused_token_ends_its_request_with_an_error():
    class Fickle(features.Parity):
        def accept(self, token_ids) -> bool:
            return len(self.tokens) < 2 and super().accept(token_ids)

    class Compiler(features.ParityCompiler):
        def submit(self, params):
            future = super().submit(params)
            future.result().__class__ = Fickle
            return future

    config, params = tiny.model_and_params()
    engine = Engine(llama, config, tiny.engine_config(), params, make_compiler=Compiler)
    asked = SamplingParams(structured_outputs=features.GRAMMAR, max_tokens=9, seed=2)
    request = engine.add("a", [1, 2, 3], asked)
    free = engine.add("b", [1, 2, 3], SamplingParams(max_tokens=9))
    while engine.has_unfinished:
        engine.step()
    assert request.finish_reason == "error" and len(free.output_token_ids) == 9
    assert "structured_outputs: the grammar refuses a token of [" in str(request.error)


def test_masks_find_their_rows_and_bits():
    runner = tiny.runner()
    prompts = {"a": [3, 1, 4, 1, 5], "b": [9, 2], "c": [6, 5, 3]}
    drawn: dict[str, Any] = dict(params=SamplingParams(seed=1), seed=3)
    new = [tiny.new_request(n, p, blocks=range(4 * i, 4 * i + 4), **drawn)
           for i, (n, p) in enumerate(prompts.items())]  # fmt: skip
    runner.execute_model(tiny.scheduled({n: len(p) for n, p in prompts.items()}, new))
    # Not the order of rows, which is b, c, a. 61 is no multiple of 32; 31 is a sign bit.
    words = np.zeros((2, 2), np.uint32)
    words[0, 31 // 32] |= np.uint32(1 << 31)
    words[1, 60 // 32] |= np.uint32(1 << 60 % 32)
    output = runner.sample_tokens(GrammarOutput(("a", "c"), words.view(np.int32))).get()
    said = dict(zip(output.req_ids, output.sampled_token_ids, strict=True))
    assert output.req_ids == ("b", "c", "a")
    assert (said["a"], said["c"]) == ([31], [60]) and said["b"] not in ([31], [60])
