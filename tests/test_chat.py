"""Chat templates: rendered as Hugging Face does, and bounded in time and size."""

import re
import time
from typing import Any

import pytest

from jaxrunner.text import jinja_guard, jinja_sandbox
from jaxrunner.text.chat import TAG, render_chat

MESSAGES = [
    {"role": "system", "content": "Be <b>brief</b> & kind."},
    {"role": "user", "content": "  what is 1+1?\n"},
    {"role": "assistant", "content": "It is "},
]
TOOLS = [{"type": "function", "function": {"name": "añadir", "parameters": {"a": [1, None]}}}]
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] "
    "+ '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA = """{{- bos_token }}
{%- if tools is not none %}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
        {{- "\\n\\n" }}
    {%- endfor %}
{%- endif %}
{%- macro head(role) %}<|start|>{{ role }}<|end|>{% endmacro %}
{%- set ns = namespace(count=0) %}
{%- for message in messages if message.role != 'system' %}
    {%- if loop.index0 % 2 == 1 and not loop.last %}{% continue %}{% endif %}
    {%- set ns.count = ns.count + 1 %}
    {{- head(message.role) ~ message['content'] | trim ~ eos_token ~ ns.count }}
    {%- generation %}{{ loop.length }}{{ mood | default('calm') | upper }}{% endgeneration %}
{%- endfor %}
{{- messages | map(attribute='role') | join(', ') }}{{ "%s%%" | format(3) }}
{{- "a\\n\\nb" | indent(2) }}{{ {'k': '<'} | tojson }}{{ 'aab' | replace('a', 'x') }}
{%- if add_generation_prompt %}{{ head('assistant') }}{% endif %}
"""
BOMBS = {
    "a long range": "{% for i in range(10**9) %}{% endfor %}",
    "a long text": "{{ 'x' * 10**9 }}",
    "a long list": "{{ [1] * 10**9 }}",
    "a large number": "{{ 10 ** (10**9) }}",
    "ranges in ranges": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}"
    "{% endfor %}",
    "lists in lists": "{% set l = 'x' * 9999 %}{% for a in l %}{% for b in l %}{% endfor %}"
    "{% endfor %}",
    "much data": "{% for i in range(99999) %}" + "y" * 1000 + "{% endfor %}",
    "much captured data": "{% set x %}{% for i in range(99999) %}" + "y" * 999 + "{% endfor %}"
    "{% endset %}",
    "doubled text": "{% set n = namespace(x='abc') %}{% for i in range(60) %}"
    "{% set n.x = n.x ~ n.x %}{% endfor %}",
    "doubled sums": "{% set n = namespace(x='abc') %}{% for i in range(60) %}"
    "{% set n.x = n.x + n.x %}{% endfor %}",
    "nested lists": "{% set n = namespace(x=[1]) %}{% for i in range(60) %}"
    "{% set n.x = [n.x, n.x] %}{% endfor %}{{ n.x }}",
    "nested JSON": "{% set n = namespace(x=[1]) %}{% for i in range(60) %}"
    "{% set n.x = {1: n.x, 2: n.x} %}{% endfor %}{{ n.x | tojson }}",
    "recursion": "{% macro m(a) %}{{ m(a) }}{% endmacro %}{{ m(1) }}",
    "recursion that branches": "{% macro m(a) %}{% if a %}{% set _ = [m(a[1:]), m(a[1:])] %}"
    "{% endif %}{% endmacro %}{% set _ = m('x' * 99) %}",
    "a loop that calls itself": "{% for m in messages recursive %}{{ loop(messages) }}{% endfor %}",
    "a method that pads": "{{ 'x'.center(10**9) }}",
    "a number's bytes": "{{ (5).to_bytes(10**9, 'big') }}",
    "a filter that pads": "{{ 'x' | center(1000000000) }}",
    "a width": "{{ '%1000000000d' % 1 }}",
    "a width of format": "{{ '{:1000000000}'.format(1) }}",
    "an indented text": "{{ ('a\n' * 1000) | indent(10**6) }}",
    "indented JSON": "{{ [1] | tojson(indent=10**9) }}",
    "replaced text": "{{ ('a' * 10**6) | replace('a', 'b' * 10**6) }}",
    "replaced by a method": "{{ ('a' * 10**6).replace('a', 'b' * 10**6) }}",
    "joined text": "{{ ('a' * 10**4) | join('x' * 10**5) }}",
    "joined by a method": "{{ ('x' * 10**5).join('a' * 10**4) }}",
    "random words": "{{ lipsum(n=10**6) }}",
}


def render(template, messages=MESSAGES, **kwargs):
    return render_chat(template, messages, bos_token="<s>", eos_token="</s>", **kwargs)


def render_bare(*args: Any, **kwargs: Any) -> str:
    return render_chat(*args, **kwargs)


@pytest.mark.parametrize("mode", ["new message", "as it is", "continued"])
@pytest.mark.parametrize("template", [CHATML, LLAMA], ids=["chatml", "llama"])
def test_text_is_that_of_transformers(template, mode):
    tokenizers = pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")
    inner = tokenizers.Tokenizer(tokenizers.models.BPE())
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token="<s>", eos_token="</s>"
    )
    flags = {
        "add_generation_prompt": mode == "new message",
        "continue_final_message": mode == "continued",
    }
    for extra in ({}, {"tools": TOOLS, "mood": "glad"}):
        want = theirs.apply_chat_template(
            MESSAGES, chat_template=template, tokenize=False, **flags, **extra
        )
        got = render(template, **flags, **extra)
        assert got == want


def test_parts_of_text_are_joined():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    text = render("{{ messages[0].content }}", [{"role": "user", "content": parts}])
    assert text == "a\nb"


def test_a_continued_message_ends_where_it_ended():
    def text(content, template=CHATML):
        messages = [{"role": "assistant", "content": content}]
        return render(template, messages, add_generation_prompt=False, continue_final_message=True)

    assert text("end") == "<|im_start|>assistant\nend"  # which the template writes as well
    assert text("so ") == "<|im_start|>assistant\nso "
    assert text("so ", CHATML.replace("message['content']", "message['content']|trim")).endswith(
        "so"
    )
    with pytest.raises(ValueError, match="does not write the final message out"):
        text("a", "{{ messages | length }}")
    with pytest.raises(ValueError, match="needs a final message with content, got none"):
        text("")
    with pytest.raises(ValueError, match="leaves no room for a new message"):
        render(CHATML, continue_final_message=True)
    assert TAG not in text(TAG)[: -len(TAG)]


def test_the_users_messages_stay_as_they_are():
    messages = [{"role": "user", "content": "a"}]
    for change in (
        "messages.append(1)",
        "messages[0].update(role=1)",
        "dict.update(messages[0], role=1)",
    ):
        with pytest.raises(ValueError, match="chat template failed with "):
            render("{{ " + change + " }}", messages)
    assert messages == [{"role": "user", "content": "a"}]


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_is_defused(name, monkeypatch):
    monkeypatch.setattr(jinja_guard, "MAX_SECONDS", 0.2)
    start = time.monotonic()
    with pytest.raises(ValueError, match=r"^chat template"):
        render(BOMBS[name])
    assert time.monotonic() - start < 2


@pytest.mark.parametrize(
    "template, message",
    [
        ("{% if %}", "chat template, line 1: Expected an expression"),
        ("{{ messages[7].role.x }}", "chat template failed with UndefinedError"),
        ("{{ raise_exception('no system role') }}", "failed with TemplateError: no system role"),
        ("{{ ''.__class__.__mro__ }}", "chat template failed with SecurityError"),
        ("{{ messages.append(1) }}", "chat template failed with SecurityError"),
        ("{% include 'a' %}", "chat template failed with TypeError: no loader"),
        ("{{" + "(" * 5000 + "1" + ")" * 5000 + "}}", "failed with RecursionError"),
        ("x" * (jinja_sandbox.MAX_TEMPLATE + 1), "characters, the limit is 131072: shorten it"),
        (BOMBS["a long range"], "range has 1000000000 numbers, the limit is 100000: shorten it"),
        (BOMBS["a long text"], "makes a value of 1000000000 characters or items, the limit is"),
        (BOMBS["doubled text"], "characters or items, the limit is 16777216: simplify"),
        (BOMBS["indented JSON"], "tojson has indent=1000000000, the limit is 100: lower it"),
        (BOMBS["a width"], "formats to a width, which is not in the sandbox: leave it out"),
        (BOMBS["a width of format"], "takes str.format, which is not in the sandbox: use ~"),
        (BOMBS["a method that pads"], "calls center, which is not in the sandbox: replace it"),
        ("{{ namespace(a=1) }}", "chat template writes out a namespace: write its fields"),
        (None, "chat_template is missing from the checkpoint: pass chat_template="),
    ],
)
def test_a_template_that_fails_says_why(template, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        render(template)


def test_a_template_that_takes_too_long_says_so(monkeypatch):
    monkeypatch.setattr(jinja_guard, "MAX_SECONDS", 0.1)
    with pytest.raises(ValueError, match=r"rendering takes longer than 0.1 s: simplify"):
        render(BOMBS["ranges in ranges"])


def test_a_template_must_be_text():
    with pytest.raises(TypeError, match="chat_template must be a str, got bytes: pass its text"):
        render(b"abc")


@pytest.mark.parametrize("name", ["messages", "template", "range", "raise_exception", "the guard"])
def test_a_variable_cannot_replace_ours(name):
    with pytest.raises(ValueError, match=f"chat_template_kwargs has the reserved name '{name}'"):
        render_bare(CHATML, MESSAGES, **{name: 1})


@pytest.mark.parametrize(
    "messages, error, message",
    [
        ("hi", TypeError, "messages must be a list of dicts, got str"),
        ({"role": "user"}, TypeError, "messages must be a list of dicts, got dict"),
        ([], ValueError, "messages is empty, a conversation needs one: add a message"),
        (["hi"], TypeError, r"messages\[0\] must be a dict with role and content, got str"),
        ([{"content": "a"}], TypeError, r"messages\[0\] must have a role that is a str"),
        ([{"role": "user"}], TypeError, r"messages\[0\] must have a content that is a str"),
        ([{"role": "user", "content": 3}], TypeError, "must have a content .* got int"),
        (
            [{"role": "user", "content": [{"type": "image_url"}]}],
            ValueError,
            "must be a part of type 'text', the only one read, got 'image_url'",
        ),
        ([{"role": "user", "content": [3]}], ValueError, "must be a part of type 'text'"),
        (
            [{"role": "user", "content": [{"type": "text", "text": 3}]}],
            TypeError,
            r"messages\[0\].content\[0\] must have a text that is a str, got int",
        ),
    ],
)
def test_a_bad_message_is_refused_by_place(messages, error, message):
    with pytest.raises(error, match=message):
        render(CHATML, messages)


def test_a_tool_call_needs_no_content():
    message = {"role": "assistant", "content": None, "tool_calls": [{"name": "add"}]}
    assert render("{{ messages[0].tool_calls[0].name }}", [message]) == "add"
