"""What a request may ask of its text: wrong fields are named, equal ones are equal."""

import re
from typing import Any

import pytest

from jaxrunner.api import structured_outputs
from jaxrunner.api.structured_outputs import MAX_SOURCE_BYTES, StructuredOutputsParams

SCHEMA = {"type": "object", "properties": {"b": {}, "a": {"enum": ["é", 1.5, None]}}}
TEXT = '{"type":"object","properties":{"b":{},"a":{"enum":["é",1.5,null]}}}'
GIVEN: dict[str, Any] = {
    "json": SCHEMA,
    "regex": "a+",
    "choice": ["a", "b"],
    "grammar": 'start: "a"',
    "json_object": True,
}


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(depth):
        schema = {"items": schema}
    return schema


@pytest.mark.parametrize("kind", GIVEN)
def test_one_constraint_is_enough(kind):
    params = StructuredOutputsParams(**{kind: GIVEN[kind]})
    assert params.kind == kind
    assert params == StructuredOutputsParams(**{kind: GIVEN[kind]}, disable_fallback=False)
    assert hash(params) == hash(StructuredOutputsParams(**{kind: GIVEN[kind]}))


def test_different_constraints_differ():
    every = [StructuredOutputsParams(**{kind: value}) for kind, value in GIVEN.items()]
    every += [
        StructuredOutputsParams(json=SCHEMA, disable_any_whitespace=True),
        StructuredOutputsParams(json=SCHEMA, whitespace_pattern=r"[ \n]{0,2}"),
        # Properties are generated in their order.
        StructuredOutputsParams(json={"properties": SCHEMA["properties"], "type": "object"}),
    ]
    assert len(set(every)) == len(every)


def test_a_schema_is_stored_as_one_spelling():
    assert StructuredOutputsParams(json=SCHEMA).json == TEXT
    spaced = TEXT.replace(":", " :\n").replace("é", r"\u00e9")
    assert StructuredOutputsParams(json=spaced) == StructuredOutputsParams(json=SCHEMA)


def test_a_schema_changed_later_changes_nothing():
    schema = {"type": "object", "properties": {}}
    params = StructuredOutputsParams(json=schema)
    schema["type"] = "array"
    assert params.json == '{"type":"object","properties":{}}'


def test_choices_are_kept_once_and_in_order():
    assert StructuredOutputsParams(choice=["b", "a", "b"]).choice == ("b", "a")


def test_what_is_not_given_is_off():
    params = StructuredOutputsParams(regex="a", json_object=None)
    assert params.json_object is False
    assert params == StructuredOutputsParams(regex="a", json_object=False)


@pytest.mark.parametrize("pattern", [" ?", r"[ \n]?", r"[ \t\n\r]*", r"(\n {0,8})| ?", "\\n+"])
def test_whitespace_patterns_of_whitespace_are_taken(pattern):
    params = StructuredOutputsParams(json_object=True, whitespace_pattern=pattern)
    assert params.whitespace_pattern == pattern


@pytest.mark.parametrize("pattern", ["a", ".*", r"\s", "[^a]", "[*]", "[(]", "{", r"[ \n", "1"])
def test_whitespace_patterns_of_more_are_refused(pattern):
    with pytest.raises(ValueError, match=r"whitespace_pattern=.* may match more than whitespace"):
        StructuredOutputsParams(json_object=True, whitespace_pattern=pattern)


def test_text_that_looks_like_a_token_is_text():
    grammar = 'start: "<a>" /<b>\\// A // <c>\nA: "\\"<" # temperature=\n'
    assert StructuredOutputsParams(grammar=grammar).grammar == grammar


@pytest.mark.parametrize("text", ['"\\', '"\\"', "/\\/", "/", '"'], ids=repr)
def test_odd_quotes_are_scanned_in_no_time(text):
    found = structured_outputs._LARK.findall((text * MAX_SOURCE_BYTES)[:MAX_SOURCE_BYTES])
    assert len(found) <= MAX_SOURCE_BYTES


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"json": 1}, "structured_outputs.json must be a JSON schema as a dict or a string"),
        ({"regex": b"a"}, "structured_outputs.regex must be a string, got b'a' of bytes"),
        ({"grammar": 3}, "structured_outputs.grammar must be a string"),
        ({"choice": "ab"}, "structured_outputs.choice must be a list of strings, got 'ab'"),
        ({"choice": 3}, "structured_outputs.choice must be a list of strings"),
        ({"choice": ["a", 3]}, "structured_outputs.choice[1] must be a string"),
        ({"json_object": 1}, "structured_outputs.json_object must be True or False, got 1"),
        (
            {"regex": "a", "disable_fallback": 0},
            "structured_outputs.disable_fallback must be True or False",
        ),
        ({"regx": "a"}, "no structured output is called 'regx': use json, regex, choice"),
    ],
)
def test_wrong_types_are_named(fields, message):
    with pytest.raises(TypeError, match=re.escape(message)):
        StructuredOutputsParams(**fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "structured_outputs needs exactly one of json, regex, choice"),
        ({"json_object": False}, "got none: give one"),
        ({"regex": "a", "choice": ["a"]}, "got regex and choice: give one"),
        ({"json": "{"}, "structured_outputs.json is not a JSON schema (Expecting property name"),
        ({"json": "[]"}, "json is not a JSON schema (an object is wanted): correct it"),
        ({"json": {"a": float("nan")}}, "structured_outputs.json is not a JSON schema (Out of"),
        ({"json": '{"a": NaN}'}, "structured_outputs.json is not a JSON schema (Out of range"),
        ({"json": {"a": {1, 2}}}, "structured_outputs.json is not a JSON schema ("),
        ({"json": nested(10**5)}, "structured_outputs.json is not a JSON schema ("),
        ({"json": "[" * 60000}, "structured_outputs.json is not a JSON schema ("),
        ({"json": {"const": "\ud800"}}, "structured_outputs.json has half a surrogate pair"),
        ({"regex": "a\udc00"}, "structured_outputs.regex has half a surrogate pair at character 1"),
        ({"json": ""}, "structured_outputs.json is empty"),
        ({"regex": ""}, "structured_outputs.regex is empty: say what to generate"),
        ({"grammar": ""}, "structured_outputs.grammar is empty"),
        ({"choice": ["a", ""]}, "structured_outputs.choice[1] is empty"),
        ({"choice": []}, "structured_outputs.choice has no string to choose: give at least one"),
        ({"json": {"title": "x" * 2**16}}, "structured_outputs.json has 65548 bytes or more"),
        ({"json": " " * 2**16 + "{}"}, "structured_outputs.json has 65538 bytes or more"),
        ({"regex": "é" * (2**15 + 1)}, "structured_outputs.regex has 65538 bytes or more"),
        ({"grammar": "a" * (2**16 + 1)}, "has 65537 bytes or more, the limit is 65536: shorten it"),
        ({"choice": map(str, range(20000))}, "structured_outputs.choice has 108890 bytes or more"),
        (
            {"structural_tag": "{}"},
            "structural_tag must be a dict with 'format', or with 'structures' and",
        ),
        ({"grammar": "root ::= " + "a " * 2**13}, "bytes of EBNF, the limit is 8192: shorten it"),
        (
            {"json": {}, "disable_additional_properties": True},
            "structured_outputs.disable_additional_properties is not supported: set "
            '"additionalProperties": false in the objects',
        ),
        (
            {"regex": "a", "disable_any_whitespace": True},
            "structured_outputs.disable_any_whitespace has an effect on JSON only",
        ),
        (
            {"choice": ["a"], "whitespace_pattern": " "},
            "structured_outputs.whitespace_pattern has an effect on JSON only",
        ),
        (
            {"json": {}, "whitespace_pattern": " ", "disable_any_whitespace": True},
            "structured_outputs.whitespace_pattern contradicts disable_any_whitespace: give one",
        ),
        (
            {"grammar": "start: <|end|>"},
            "structured_outputs.grammar has '<' at character 7, which would name a token",
        ),
        (
            {"grammar": 'start: a\na[temperature=1]: "<"'},
            "structured_outputs.grammar has 'temperature=' at character 11, which would name",
        ),
    ],
)
def test_wrong_values_are_named(fields, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        StructuredOutputsParams(**fields)
