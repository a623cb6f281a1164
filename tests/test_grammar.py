"""Constrained text: any walk along the masks ends, and is what was asked for."""

from collections.abc import Iterator
import json
import re
from typing import Any

import numpy as np
import pytest

from tests.support import grammars
from tests.support.grammars import EOS, SPECIAL, Vocab, allowed, walk

SIZES = (1000, 4096, 32000)
TREE = {
    "type": "object",
    "properties": {
        "value": {"type": "integer", "minimum": 0, "maximum": 9},
        "children": {"type": "array", "items": {"$ref": "#/$defs/tree"}, "maxItems": 2},
    },
    "required": ["value", "children"],
    "additionalProperties": False,
}
SCHEMAS: dict[str, dict[str, Any]] = {
    "nested object": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 12},
            "age": {"type": "integer", "minimum": 0, "maximum": 150},
            "home": {
                "type": "object",
                "properties": {"zip": {"type": "integer", "minimum": -5, "maximum": 99999}},
                "required": ["zip"],
                "additionalProperties": False,
            },
        },
        "required": ["name", "age", "home"],
        "additionalProperties": False,
    },
    "enum array": {
        "type": "array",
        "items": {"enum": ["red", "green", 3, None, "blé"]},
        "minItems": 1,
        "maxItems": 4,
    },
    "anyOf": {
        "anyOf": [
            {"type": "string", "maxLength": 5},
            {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
            {"type": "null"},
        ]
    },
    "pattern": {"type": "string", "pattern": "^[A-Z][a-z]{1,8}-[0-9]{2,4}$"},
    "recursive": {"$defs": {"tree": TREE}, "$ref": "#/$defs/tree"},
}


@pytest.fixture(scope="module")
def vocabs() -> Iterator[dict[Any, Vocab]]:
    pytest.importorskip("llguidance")
    made: dict[Any, Vocab] = {size: grammars.vocab_of(grammars.byte_level(size)) for size in SIZES}
    made["blocks"] = grammars.vocab_of(grammars.sentencepiece())
    yield made
    for vocab in made.values():
        vocab.compiler.close()


@pytest.fixture
def vocab(vocabs) -> Vocab:
    return vocabs[SIZES[0]]


def satisfies(value: Any, schema: dict[str, Any], root: dict[str, Any]) -> bool:
    """Returns whether a value is what a schema says, of the keywords of `SCHEMAS`."""
    if "$ref" in schema:
        return satisfies(value, root["$defs"][schema["$ref"].split("/")[-1]], root)
    if "anyOf" in schema:
        return any(satisfies(value, option, root) for option in schema["anyOf"])
    if "enum" in schema:
        return any(value == e and type(value) is type(e) for e in schema["enum"])
    kinds = {"object": dict, "array": list, "string": str, "integer": int, "boolean": bool}
    if type(value) is not kinds.get(schema["type"], type(None)):
        return False
    if isinstance(value, dict):
        parts = schema["properties"]
        return set(schema["required"]) <= set(value) <= set(parts) and all(
            satisfies(v, parts[name], root) for name, v in value.items()
        )
    if isinstance(value, list):
        return schema.get("minItems", 0) <= len(value) <= schema["maxItems"] and all(
            satisfies(v, schema["items"], root) for v in value
        )
    if isinstance(value, str):
        return len(value) <= schema.get("maxLength", 99) and bool(
            re.search(schema.get("pattern", ""), value)
        )
    return schema["type"] != "integer" or schema["minimum"] <= value <= schema["maximum"]


@pytest.mark.parametrize("name", SCHEMAS)
@pytest.mark.parametrize("size", [*SIZES, "blocks"])
def test_every_walk_along_a_schema_satisfies_it(vocabs, size, name):
    vocab, rng, schema = vocabs[size], np.random.default_rng(7), SCHEMAS[name]
    for i in range(100):
        grammar = vocab.grammar(json=schema, disable_any_whitespace=i % 2 == 0)
        text = walk(vocab, grammar, rng)
        assert satisfies(json.loads(text), schema, schema), text
        assert i % 2 or not re.search(r"\s", re.sub(r'"(\\.|[^"\\])*"', "", text))


@pytest.mark.parametrize("size", [*SIZES, "blocks"])
def test_every_walk_is_what_was_asked_for(vocabs, size):
    vocab, rng = vocabs[size], np.random.default_rng(8)
    choices = ['a"\\\n\x00\x7f', "é😀/", "ab", "a b", "a", "<s>", "#//"]
    lark = 'start: pair ("," pair)*\npair: NAME "=" /[0-9]{1,3}/\nNAME: /[a-z]/ | "é" "!"?'
    for _ in range(30):
        assert isinstance(json.loads(walk(vocab, vocab.grammar(json_object=True), rng)), dict)
        text = walk(vocab, vocab.grammar(regex=r"[A-Fé]{2,9}(-[0-9]+){0,3}x?"), rng)
        assert re.fullmatch(r"[A-Fé]{2,9}(-[0-9]+){0,3}x?", text)
        assert walk(vocab, vocab.grammar(choice=choices), rng) in choices
        text = walk(vocab, vocab.grammar(grammar=lark), rng)
        assert all(re.fullmatch("([a-z]|é!?)=[0-9]{1,3}", pair) for pair in text.split(","))


def test_every_choice_can_be_walked(vocab):
    rng, choices = np.random.default_rng(9), ["yes", "no", "no way"]
    assert {walk(vocab, vocab.grammar(choice=choices), rng) for _ in range(60)} == set(choices)


@pytest.mark.parametrize(
    ("fields", "most"),
    [
        ({"disable_any_whitespace": True}, 0),
        ({"whitespace_pattern": "[ ]{0,2}"}, 2),
        ({}, 34),
    ],
)
def test_whitespace_is_bounded(vocab, fields, most):
    encode, grammar = vocab.tokenizer.encode, vocab.grammar(json_object=True, **fields)
    assert grammar.accept(encode("{"))
    grammar.accept(encode("\n"))
    while grammar.accept(encode(" ")):
        assert grammar.num_tokens <= 1 + most
    assert grammar.accept(encode("}")) and grammar.is_accepting
    # What a schema says of whitespace changes nothing.
    schema = {"type": "object", "x-guidance": {"whitespace_pattern": "x", "item_separator": "x"}}
    grammar = vocab.grammar(json=schema, **fields)
    assert grammar.accept(encode("{")) and not grammar.accept(encode("x"))


def test_ids_that_no_grammar_may_use_are_refused_and_change_nothing(vocab):
    grammar = vocab.grammar(regex="[^b]{1,9}")
    before = vocab.mask(grammar)
    assert not set(allowed(before)) & set(range(len(SPECIAL)))
    for token_id in (-1, 0, 1, 2, 3, len(vocab.tokenizer), vocab.width, 10**6, 2**40):
        assert not grammar.accept([token_id])
    assert grammar.error is None and grammar.num_tokens == 0
    np.testing.assert_array_equal(vocab.mask(grammar), before)


def test_accepting_stops_at_the_token_that_is_refused(vocab):
    grammar, (a, b) = (
        vocab.grammar(regex="aab"),
        vocab.tokenizer.encode("a b".replace(" ", "\n"))[::2],
    )
    assert not grammar.accept([a, b, a]) and grammar.num_tokens == 1
    assert grammar.accept([a, b]) and grammar.is_accepting and not grammar.finished
    assert grammar.accept([EOS[1]]) and grammar.finished
    np.testing.assert_array_equal(allowed(vocab.mask(grammar)), EOS)
    assert not grammar.accept([a]) and not grammar.accept([EOS[0]]) and grammar.num_tokens == 4


def test_the_last_bit_of_a_word_is_a_token_like_others(vocab):
    token_id = next(i for i in range(31, 320, 32) if vocab.text([i]).isascii())
    grammar = vocab.grammar(choice=[vocab.text([token_id])])
    row = vocab.mask(grammar)
    assert row.dtype == np.int32 and row[token_id // 32] < 0
    assert grammar.accept([token_id]) and grammar.is_accepting


@pytest.mark.parametrize("name", SCHEMAS)
def test_rolling_back_restores_the_mask(vocab, name):
    rng = np.random.default_rng(10)
    for _ in range(20):
        grammar, masks, taken = vocab.grammar(json=SCHEMAS[name]), [], []
        while not grammar.finished:
            masks.append(vocab.mask(grammar))
            taken.append(grammars.choose(vocab, allowed(masks[-1]), rng, len(taken) > 30))
            assert grammar.accept(taken[-1:])
        for _ in range(10):
            n = int(rng.integers(0, grammar.num_tokens + 1))
            grammar.rollback(n)
            assert not (n and grammar.finished)
            if n:
                np.testing.assert_array_equal(vocab.mask(grammar), masks[-n])
            assert grammar.accept(taken[len(taken) - n :]) and grammar.finished


def test_copies_are_independent(vocab):
    grammar, rng = vocab.grammar(json=SCHEMAS["recursive"]), np.random.default_rng(11)
    for _ in range(8):
        assert grammar.accept([rng.choice(allowed(vocab.mask(grammar)))])
    before, copy = vocab.mask(grammar), grammar.copy()
    np.testing.assert_array_equal(vocab.mask(copy), before)
    walk(vocab, copy, rng)
    copy.rollback(copy.num_tokens)
    np.testing.assert_array_equal(vocab.mask(grammar), before)
    assert grammar.num_tokens == 8 and not grammar.finished


@pytest.mark.parametrize("third", [None, -1, SPECIAL.index("<pad>")], ids=str)
def test_masks_of_drafts_are_those_of_steps(vocab, third):
    rng = np.random.default_rng(12)
    for start in range(20):
        grammar = vocab.grammar(json=SCHEMAS["enum array"])
        for _ in range(start):
            grammar.accept([rng.choice(allowed(vocab.mask(grammar)))])
        ahead, masks, drafts = grammar.copy(), [vocab.mask(grammar)], []
        for j in range(5):
            drafts.append(int(rng.choice(allowed(masks[-1]))))
            if j == 2 and third is not None:
                drafts[2:], follows = [third], False
            else:
                follows = len(masks) == len(drafts) and ahead.accept(drafts[-1:])
            if follows:
                masks.append(vocab.mask(ahead))
        # Past a draft that is not there the last mask holds, so the bonus row has it too.
        masks += [masks[-1]] * (6 - len(masks))
        rows, before = (
            np.zeros((6, len(masks[0])), np.int32),
            (grammar.num_tokens, grammar.finished),
        )
        grammar.fill_drafts(rows, drafts)
        np.testing.assert_array_equal(rows, masks)
        np.testing.assert_array_equal(vocab.mask(grammar), masks[0])
        assert before == (grammar.num_tokens, grammar.finished)


def test_misuse_is_named(vocab):
    grammar = vocab.grammar(regex="a")
    with pytest.raises(
        ValueError, match="num_tokens=1 to roll back, 0 were accepted: roll back at"
    ):
        grammar.rollback(1)
    with pytest.raises(ValueError, match="2 rows for 2 drafts: give one a draft and one more"):
        grammar.fill_drafts(np.zeros((2, 33), np.int32), [1, 2])
