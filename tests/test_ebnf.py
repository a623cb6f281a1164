"""Grammars in EBNF, and tags in free text: what vLLM's examples of structured outputs ask for."""

import json
from typing import Any

import pytest

from jaxrunner.api.ebnf import is_ebnf
from jaxrunner.api.structured_outputs import StructuredOutputsParams
from tests.support import grammars
from tests.support.grammars import is_alive

SQL = """
root ::= select_statement
select_statement ::= "SELECT " column " from " table " where " condition  # a comment
column ::= "col_1 " | "col_2 "
table ::= "table_1 " | "table_2 "
condition ::= column "= " number
number ::= "1 " | [<>2]+ " "
"""
TAG: dict[str, Any] = {
    "triggers": ["<call"],
    "structures": [
        {"begin": "<call=add>", "end": "</call>", "schema": {
            "type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"],
            "additionalProperties": False}},
        {"begin": "<call=stop>", "end": "", "schema": {"const": 0}},
    ],
}  # fmt: skip


vocab = pytest.fixture(scope="module")(grammars.small_vocab)


def test_a_grammar_in_ebnf_is_what_it_says(vocab):
    for text, fits in (
        ("SELECT col_1  from table_2  where col_2 = 1 ", True),
        ("SELECT col_1  from table_2  where col_1 = <2> ", True),
        ("SELECT col_1  from table_2 ", False),
        ("SELECT col_3  from table_2  where col_2 = 1 ", False),
    ):
        assert is_alive(vocab, text, grammar=SQL) is fits
    assert is_ebnf(SQL) and not is_ebnf('start: "::=" | a\na: "b"')
    assert is_alive(vocab, "::=", grammar='start: "::=" | a\na: "b"')


@pytest.mark.parametrize("grammar", ['rule ::= "a"', 'root ::= "a', "root ::= nothing",
                                     "root ::= " + "(" * 4000])  # fmt: skip
def test_a_bad_grammar_in_ebnf_says_so(vocab, grammar):
    message = r"structured_outputs\.grammar cannot be used: its EBNF cannot be read: "
    with pytest.raises(ValueError, match=message):
        vocab.grammar(grammar=grammar)


def test_text_is_free_until_a_trigger(vocab):
    for text, fits in (
        ("Some text, and no call.", True),
        ('I <call=add>{"x":5}</call> and <call=stop>0', True),
        ('I <call=add>{"x": 5}</call>', True),
        ('I <call=add>{"y":5}</call>', False),
        ('I <call=add>{"x":5}', False),
        ("I <call=sub>", False),
        ('I <call=add>{  "x":5}</call>', False),
    ):
        for tag in (TAG, json.dumps(TAG)):
            assert is_alive(vocab, text, structural_tag=tag) is fits, text
    compact: dict[str, Any] = dict(structural_tag=TAG, disable_any_whitespace=True)
    assert not is_alive(vocab, '<call=add>{"x": 5}</call>', **compact)
    params = StructuredOutputsParams(structural_tag=TAG)
    assert params == StructuredOutputsParams(structural_tag=json.dumps(TAG, indent=1))


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"triggers": []}, r"structural_tag\.triggers must be a list of texts, got \[\]"),
        ({"triggers": [""]}, r"structural_tag\.triggers must be a list of texts"),
        ({"triggers": ["<b"]}, r"structural_tag\.structures\[0\] begins with .*, which no trigger"),
        ({"structures": []}, r"structural_tag\.structures must be a list of dicts, got \[\]"),
        ({"structures": [{"begin": "<call"}]}, r"structures\[0\] must have a 'begin' and an 'end'"),
        ({"format": {}}, "structural_tag must be a dict with 'format', or with 'structures' and"),
    ],
)
def test_a_bad_tag_is_refused_by_place(changes, message):
    with pytest.raises((TypeError, ValueError), match=message):
        StructuredOutputsParams(structural_tag=TAG | changes)
