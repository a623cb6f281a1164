"""Formats of structural tags: what each lets through, and how bad ones are refused."""

from typing import Any

import pytest

from jaxrunner.api.structured_outputs import StructuredOutputsParams
from tests.support import grammars
from tests.support.grammars import is_alive

DIGIT: dict[str, Any] = dict(type="regex", pattern="[0-9]")
THINK = dict(type="tag", begin="<think>", content=dict(type="any_text"), end="</think>")
ADD = dict(type="tag", begin="<call=add>", content=DIGIT, end=["</call>", "</c>"])
SUB = dict(begin="<call=sub>", content=dict(type="const_string", value="!"), end="")
CALLS: dict[str, Any] = dict(type="triggered_tags", triggers=["<call="], tags=[ADD, SUB])
LIST: dict[str, Any] = dict(type="tags_with_separator", tags=[ADD, SUB], separator="; ")
SCHEMA = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}


def sequence(*elements: Any) -> dict[str, Any]:
    return dict(type="sequence", elements=list(elements))


vocab = pytest.fixture(scope="module")(grammars.small_vocab)


@pytest.mark.parametrize(
    "given, good, bad",
    [
        (dict(type="const_string", value='a "b"\n'), ['a "b"\n'], ["a", ""]),
        (dict(type="const_string", value="a\x7f"), ["a\x7f"], ["a"]),
        (dict(type="regex", pattern="a/b|\\/\n"), ["a/b", "/\n"], ["a", "a/b/"]),
        (dict(type="grammar", grammar='root ::= "}" x\nx ::= [0-9]+'), ["}12"], ["12", "}"]),
        (dict(type="grammar", grammar="start: /[a-z]/"), ["q"], ["qq"]),
        (dict(type="json_schema", json_schema=SCHEMA), ['{"x": 1}'], ['{"y": 1}', "{}"]),
        (dict(type="any_text"), ["", "any\nthing"], []),
        (sequence(DIGIT, DIGIT), ["12"], ["1", "123"]),
        (dict(type="or", elements=[DIGIT, THINK]), ["1", "<think>x</think>"], ["<think>x"]),
        (dict(type="optional", content=DIGIT), ["", "1"], ["12"]),
        (dict(type="star", content=DIGIT), ["", "123"], ["a"]),
        (dict(type="plus", content=DIGIT), ["1", "12"], [""]),
        (dict(type="repeat", content=DIGIT, min=2, max=3), ["12", "123"], ["1", "1234"]),
        (sequence(THINK, DIGIT), ["<think>a < b</think>1"], ["<think>1", "<think></think>"]),
        (
            CALLS,
            ["", "free", "a <call=add>1</call> b <call=sub>! c", "<call=add>1</c>"],
            ["<call=add>x", "<call=mul>", "<call=add>1"],
        ),
        (
            CALLS | dict(stop_after_first=True),
            ["free", "a <call=add>1</c>"],
            ["<call=add>1</c> b"],
        ),
        (CALLS | dict(at_least_one=True), ["<call=sub>! and <call=sub>!"], ["", "a <call=sub>!"]),
        (
            CALLS | dict(at_least_one=True, stop_after_first=True),
            ["<call=sub>!"],
            ["", "<call=sub>! and"],
        ),
        (LIST, ["", "<call=sub>!", "<call=sub>!; <call=add>1</c>"], ["<call=sub>!<call=sub>!"]),
        (LIST | dict(at_least_one=True), ["<call=sub>!; <call=sub>!"], [""]),
        (LIST | dict(stop_after_first=True), ["", "<call=sub>!"], ["<call=sub>!; <call=sub>!"]),
        (
            sequence(dict(type="tag", begin="<q>", content=CALLS, end="</q>"), DIGIT),
            ["<q></q>1", "<q>a <call=add>2</call> b</q>1"],
            ["<q>a</q>", "<q><call=add>2</q>1"],
        ),
        (
            dict(type="tag", begin="(", end=")", content=sequence(DIGIT, SUB | {"content": CALLS})),
            ["(1<call=sub>x <call=add>2</c>)"],
            ["(1)", "(1<call=sub>x"],
        ),
    ],
)  # fmt: skip
def test_a_format_is_what_it_says(vocab, given, good, bad):
    tag = dict(type="structural_tag", format=given)
    for text in good + bad:
        assert is_alive(vocab, text, structural_tag=tag) is (text in good), text


def nested(depth: int) -> dict[str, Any]:
    return DIGIT if not depth else dict(type="star", content=nested(depth - 1))


@pytest.mark.parametrize(
    "given, message",
    [
        ({}, r"structural_tag\.format must be a dict whose type is one of any_text, .*, got {}"),
        (dict(type=[]), r"format must be a dict whose type is one of"),
        (dict(type="qwen_xml_parameter"), r"whose type is one of"),
        (dict(type="regex"), r"format of type 'regex' must have pattern, str, got"),
        (dict(type="regex", pattern=""), r"format\.pattern is empty: give it something"),
        (dict(type="any_text", excludes=[]), r"format of type 'any_text' must have no fields, got"),
        (THINK | dict(end=3), r"must have begin, str; content, dict; end, str or list, got"),
        (THINK | dict(end=[""]), r"format\.end must be a list of texts, got"),
        (THINK | dict(end=[]), r"format\.end is empty"),
        (sequence(THINK, {"type": "x"}), r"format\.elements\[1\] must be a dict whose type"),
        (sequence(dict(type="any_text"), DIGIT), r"elements\[0\] ends in free text, and what"),
        (dict(type="star", content=CALLS), r"format\.content ends in free text, and what follows"),
        (CALLS | dict(tags=[DIGIT]), r"format\.tags\[0\] must be of type 'tag', got 'regex'"),
        (CALLS | dict(triggers=["<x"]), r"tags\[0\]\.begin must start with one of the triggers"),
        (CALLS | dict(triggers=[""]), r"format\.triggers must be a list of texts, got"),
        (CALLS | dict(at_least_one=1), r"perhaps at_least_one, bool; perhaps stop_after_first, bo"),
        (dict(type="repeat", content=DIGIT, min=3, max=2), r"must repeat from min to max times, 0"),
        (nested(40), r"is nested over 32 deep: make it flatter"),
    ],
)  # fmt: skip
def test_a_bad_format_is_refused_by_place(given, message):
    with pytest.raises((TypeError, ValueError), match=message):
        StructuredOutputsParams(structural_tag=dict(type="structural_tag", format=given))
