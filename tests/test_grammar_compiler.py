"""Grammars of strangers: wrong or huge ones fail alone, within their time and memory."""

from collections.abc import Iterator
from concurrent.futures import Future
import contextlib
import sys
import threading
import time
from typing import Any
import weakref

import numpy as np
import pytest

from jaxrunner.api.structured_outputs import StructuredOutputsParams
from jaxrunner.text.grammar_compiler import GrammarCompiler
from tests.support import grammars
from tests.support.grammars import EOS, Vocab, allowed

TIMEOUT_S = 1.0
MARGIN_S = 10.0  # to start a process, and for a machine that is busy


def chained(num: int, link: str, name: str = "r") -> str:
    """Returns a Lark grammar whose rules need each other, one after the other."""
    rules = [f"{name}{i}:" + link.format(f"{name}{i + 1}") for i in range(num)]
    return "\n".join([f"start: {name}0", *rules, f'{name}{num}: "a"'])


def referring(num: int) -> dict[str, Any]:
    """Returns a schema whose definitions need each other, one after the other."""
    defs = {f"d{i}": {"properties": {"a": {"$ref": f"#/$defs/d{i + 1}"}}} for i in range(num)}
    return {"$defs": {**defs, f"d{num}": {}}, "$ref": "#/$defs/d0"}


def any_of(**schema: Any) -> dict[str, Any]:
    return {"anyOf": [{**schema, "title": title} for title in "ab"]}


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "type": ({"json": {"type": "strin"}}, "json cannot be used: Invalid type: strin"),
    "keyword": ({"json": {"not": {}}}, "json cannot be used: Unimplemented keys: .*not"),
    "bounds": ({"json": {"type": "integer", "minimum": 2, "maximum": 1}}, "json cannot be used: U"),
    "far away": ({"json": {"$ref": "http://a.b/c"}}, "json cannot be used: .* does not fetch"),
    "itself": ({"json": {"$ref": "#"}}, "json cannot be used: "),
    "option": ({"json": {"x-guidance": {"a": 1}}}, "json cannot be used: unknown field `a`"),
    "regex": ({"regex": "(a"}, "regex cannot be used: error: unclosed group"),
    "look-ahead": ({"regex": "(?=a)b"}, "regex cannot be used: error: look-around"),
    "rule": ({"grammar": "start: x"}, 'grammar cannot be used: .*unknown name: "x"'),
    "syntax": ({"grammar": "start: ["}, "grammar cannot be used: .*Expected token"),
    "no text": ({"grammar": "start: a\na: start"}, "grammar cannot be used: no text satisfies it"),
}
# Some compile; none may take longer than its limit, or anything else with it.
BOMBS: dict[str, dict[str, Any]] = {
    "quantifiers": {"regex": "((a{1,1000}){1,1000}){1,1000}"},
    "optional letters": {"regex": ".?" * 30000},
    "parentheses": {"regex": "(" * 30000 + ")" * 30000},
    "alternatives": {"regex": "|".join(map(str, range(10**4)))},
    "doubling": {
        "grammar": "start: T0\n"
        + "".join(f"T{i}: T{i + 1} T{i + 1}\n" for i in range(14))
        + "T14: /.?/"
    },
    "conjunctions": {
        "grammar": "start: A\nA: " + " & ".join(f"/(.|\\n)*{i}(.|\\n)*/" for i in range(90))
    },
    "ambiguity": {"grammar": 'start: e\ne: e e e | e e | "a" | "b"*'},
    "huge Lark": {"grammar": "start: " + '"a"? ' * 13000},
    "Lark's nesting": {"grammar": "start: " + "(" * 32000 + ")" * 32000},
    "chained rules": {"grammar": chained(4000, "{}")},
    "chained terminals": {"grammar": chained(4000, "{}", "T")},
    "chained definitions": {"json": referring(1100)},
    "nested schema": {"json": '{"items":' * 400 + "{}" + "}" * 400},
    "patterns": {
        "json": {"allOf": [{"type": "string", "pattern": f"a.{{{i}}}b"} for i in range(60)]}
    },
    "multiples": {
        "json": {"anyOf": [{"type": "integer", "multipleOf": 99991 + i} for i in range(99)]}
    },
    "combinations": {"json": {"allOf": [any_of(minLength=i) for i in range(90)]}},
    "many properties": {"json": {"properties": {f"p{i}": {"pattern": "a*b"} for i in range(1500)}}},
}


@pytest.fixture(scope="module")
def vocab() -> Iterator[Vocab]:
    pytest.importorskip("llguidance")
    made = grammars.vocab_of(grammars.byte_level(1000), timeout_s=TIMEOUT_S)
    yield made
    made.compiler.close()


def reason(future: Future) -> str:
    """Returns why a compilation failed, "" if it did not."""
    error = future.exception()
    assert error is None or isinstance(error, ValueError)
    assert "\n" not in str(error) and len(str(error)) < 500
    return str(error or "")


def failure(vocab: Vocab, **fields: Any) -> str:
    return reason(vocab.compiler.submit(StructuredOutputsParams(**fields)))


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_grammar_says_why_and_soon(vocab, name):
    fields, message = WRONG[name]
    start = time.monotonic()
    with pytest.raises(ValueError, match=rf"^structured_outputs\.{message}"):
        vocab.grammar(**fields)
    assert time.monotonic() - start < TIMEOUT_S + MARGIN_S
    assert failure(vocab, **fields)


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_harms_its_own_request_alone(vocab, name):
    start = time.monotonic()
    bomb = vocab.compiler.submit(StructuredOutputsParams(**BOMBS[name]))
    choice = f"after {name}"
    assert len(allowed(vocab.mask(vocab.grammar(choice=[choice]))))
    message = reason(bomb)
    assert not message or message.startswith("structured_outputs.")
    assert time.monotonic() - start < 3 * TIMEOUT_S + MARGIN_S
    for _ in range(0 if message else 20):  # those that compile are stepped through within limits
        grammar = bomb.result()
        step = time.monotonic()
        ids = [i for i in allowed(vocab.mask(grammar)) if i not in EOS]
        assert time.monotonic() - step < 0.5
        if not ids or not grammar.accept(ids[-1:]):
            break


def test_a_grammar_that_takes_too_long_is_given_up(vocab):
    doubling = BOMBS["doubling"]
    assert f"compiling took longer than {TIMEOUT_S} s: simplify it" in failure(vocab, **doubling)
    assert not failure(vocab, choice=["after it"])


def test_a_grammar_that_takes_too_much_memory_is_given_up(vocab):
    small = grammars.vocab_of(vocab.tokenizer.inner, timeout_s=30, max_bytes=2**25)
    doubling = BOMBS["doubling"]
    message = "compiling crashed, or took more than 32 MiB: simplify it"
    assert message in failure(small, **doubling)
    assert not failure(small, choice=["after it"])
    small.compiler.close()


def test_a_grammar_that_gets_too_complex_ends_its_request(vocab):
    grammar = vocab.grammar(regex="(" * 7 + "a" + "{1,10})" * 7)
    (a,) = vocab.tokenizer.encode("a")
    row = vocab.mask(grammar)
    while grammar.accept([a]):
        row = vocab.mask(grammar)
    np.testing.assert_array_equal(allowed(row), EOS)
    assert grammar.error and "\n" not in grammar.error and not grammar.is_accepting
    assert not grammar.accept([a]) and not grammar.accept(EOS[:1])
    assert vocab.grammar(regex="(" * 7 + "a" + "{1,10})" * 7).error is None


def test_text_that_no_token_spells_ends_its_request(vocab):
    inner = grammars.sentencepiece()
    inner.add_special_tokens(["<0x07>"])
    spelt = grammars.vocab_of(inner)
    grammar = spelt.grammar(choice=["a\x07"])
    assert grammar.accept([inner.get_vocab()["a"]])
    np.testing.assert_array_equal(allowed(spelt.mask(grammar)), EOS)
    assert grammar.error == "no token of the vocabulary continues the text"
    grammar.rollback(1)
    assert grammar.error is None
    spelt.compiler.close()


def test_the_cache_is_bounded_and_keeps_what_was_used_last(vocab):
    small = grammars.vocab_of(vocab.tokenizer.inner, cache_size=3)
    for i in range(6):
        assert not failure(small, choice=["first"]) and not failure(small, choice=[f"no {i}"])
        assert len(small.compiler) <= 3
    assert small.compiler.submit(StructuredOutputsParams(choice=["first"])).done()
    assert not small.compiler.submit(StructuredOutputsParams(choice=["no 0"])).done()
    small.compiler.close()


class Met(list):
    """Idle trials, where two threads that look for one have looked before either takes it."""

    both = threading.Barrier(2)

    def __bool__(self) -> bool:
        found = len(self) > 0
        with contextlib.suppress(threading.BrokenBarrierError):  # the other one is kept away
            self.both.wait(0.5)
        return found


class Left(list):
    """Idle trials, whose compiler is closed while one is put back."""

    closing = threading.Thread()

    def append(self, trial: Any) -> None:
        self.closing.start()
        self.closing.join(0.5)
        super().append(trial)


def watched(vocab: Vocab, kind: type[list]) -> Vocab:
    """Returns a compiler that keeps its trials, of which one is idle, in a list of a kind."""
    made = grammars.vocab_of(vocab.tokenizer.inner)
    assert not failure(made, choice=["first"])
    found: Any = made.compiler._close.detach()
    _, close, (pool, idle), _ = found
    made.compiler._idle = kind(idle)
    made.compiler._close = weakref.finalize(made.compiler, close, pool, made.compiler._idle)
    return made


def test_two_compilations_never_take_one_trial(vocab):
    small = watched(vocab, Met)
    futures = [small.compiler.submit(StructuredOutputsParams(choice=[text])) for text in "ab"]
    assert [reason(future) for future in futures] == ["", ""]
    small.compiler.close()


def test_no_trial_outlives_its_compiler(vocab):
    small = watched(vocab, Left)
    Left.closing = threading.Thread(target=small.compiler.close)
    assert not failure(small, choice=["last"])
    Left.closing.join()
    assert not small.compiler._idle


def test_requests_with_one_grammar_share_no_state(vocab):
    params = StructuredOutputsParams(regex="[ab]{3}")
    first = vocab.compiler.submit(params).result()
    start = vocab.mask(first)
    (a,) = vocab.tokenizer.encode("a")
    assert first.accept([a, a, a, EOS[0]])
    second = vocab.compiler.submit(params)
    assert second.done()
    np.testing.assert_array_equal(vocab.mask(second.result()), start)
    assert second.result().accept([a]) and first.finished


def test_logits_may_be_narrower_than_the_tokenizer(vocab):
    inner = vocab.tokenizer.inner
    compiler = GrammarCompiler(vocab.tokenizer, vocab_size=300, eos_token_ids=[1])
    grammar = compiler.submit(StructuredOutputsParams(regex="(.|\n)+")).result()
    row = np.zeros(10, np.int32)
    grammar.fill(row)
    assert 200 < len(allowed(row)) and allowed(row)[-1] < 300
    assert not grammar.accept([310]) and inner.id_to_token(310)
    compiler.close()


def test_a_token_that_ends_is_no_text(vocab):
    ends = vocab.tokenizer.inner.get_vocab()["in"]
    compiler = GrammarCompiler(vocab.tokenizer, vocab_size=1037, eos_token_ids=[1, ends])
    grammar = compiler.submit(StructuredOutputsParams(regex="[a-z]{2}")).result()
    assert ends not in allowed(vocab.mask(grammar)) and not grammar.accept([ends])
    assert grammar.accept(vocab.tokenizer.encode("i")) and not grammar.is_accepting
    assert grammar.accept(vocab.tokenizer.encode("n"))
    assert allowed(vocab.mask(grammar)).tolist() == [1, ends]
    assert grammar.accept([ends]) and grammar.finished
    compiler.close()


@pytest.mark.parametrize("ids", [[], [1, 1037], [-1]])
def test_ends_that_the_logits_lack_are_refused(vocab, ids):
    with pytest.raises(
        ValueError, match="must be one or more of the model's ids, which end at 1036"
    ):
        GrammarCompiler(vocab.tokenizer, vocab_size=1037, eos_token_ids=ids)


def test_a_missing_llguidance_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(ImportError, match="structured_outputs needs llguidance, which is not inst"):
        grammars.vocab_of(grammars.sentencepiece())
