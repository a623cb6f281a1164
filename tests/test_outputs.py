"""What a user sees of an output, in a terminal and in a notebook."""

import dataclasses
from html.parser import HTMLParser
import math
import re
from typing import Any

import numpy as np
import pytest

from jaxrunner.api.html import MAX_ROWS, HeatMap, heat_map, request_html, requests_html, visible
from jaxrunner.api.outputs import (
    CompletionOutput,
    Logprob,
    RequestMetrics,
    RequestOutput,
    RequestOutputs,
)

HOSTILE = {
    "script": "<script>alert(1)</script>",
    "handler": '" onmouseover="alert(1)" x="',
    "single quotes": "' onclick='alert(1)' y='",
    "image": "<img src=javascript:alert(1) onerror=alert(1)>",
    "closing tags": "</span></div></td></table><style>*{display:none}</style><!-- ",
    "entities": "&lt;b&gt; &amp; &#60;script&#62; &",
    "bidi": "a\u202egpj.exe\u2066\u200f\u2069",
    "surrogates": "a\ud83d \udc00b",
    "ANSI": "\x1b[31mred\x1b[0m\x07\x00\x9b1m",
    "lines": "a\r\n\tb\u2028c\x0bd\n",
    "invisible": "hi\U000e0041\ufeff\u200b",
}


class Page(HTMLParser):
    """Checks as it reads that tags balance and that nothing can act or load."""

    def __init__(self, source: str):
        super().__init__(convert_charrefs=True)
        self.text, self.open = "", []
        self.tags: list[str] = []
        self.hovers: list[str] = []
        self.feed(source)
        self.close()
        assert not self.open and "<!" not in source and "<?" not in source
        source.encode()  # a lone surrogate could not be saved

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in {"div", "span", "table", "tr", "th", "td", "b", "br"}
        names = [name for name, _ in attrs]
        assert len(names) == len(set(names)) and set(names) <= {"style", "title", "dir"}
        for name, value in attrs:
            assert value is not None
            if name == "style":
                assert re.fullmatch(r"[-\w:;%.,()/ ]*", value) and "url" not in value
            if name == "title":
                self.hovers.append(value)
        self.tags.append(tag)
        if tag != "br":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def completion(**fields: Any) -> CompletionOutput:
    """Returns two tokens, ` cat` and one without text, the first with alternatives."""
    told = [
        {5: Logprob(math.log(0.25), 2, " cat"), 6: Logprob(math.log(0.5), 1, " dog")},
        {7: Logprob(-9.0, 40)},
    ]
    known = CompletionOutput(0, " cat!", [5, 7], math.log(0.25) - 9.0, told, "length")
    return dataclasses.replace(known, **fields)


def request(*outputs: CompletionOutput, **fields: Any) -> RequestOutput:
    metrics = RequestMetrics(100.0, 100.25, 104.0)
    ids, logprobs = [1, 2, 3], [None, {2: Logprob(-1.0)}, {3: Logprob(-2.0)}]
    known = RequestOutput("r7", "The", ids, logprobs, list(outputs), True, metrics, 2)
    return dataclasses.replace(known, **fields)


def test_an_output_reads_well():
    long = CompletionOutput(0, "x" * 1000, list(range(1000)), finish_reason="length")
    assert long.finished() and not CompletionOutput(0, "", []).finished()
    output = RequestOutput("7", "hi", [1, 2], None, [long], True, RequestMetrics(1.0))
    assert output.num_cached_tokens == 0 and output.error is None
    assert repr(output).startswith(
        "RequestOutput(request_id='7', prompt='hi', prompt_token_ids=[1, 2], "
        "outputs=[CompletionOutput(index=0, text='xxx"
    )
    assert "token_ids=[0, 1, 2, 3, 4, 5, 6, 7, ... 998, 999] (1000)" in repr(output)
    assert "finish_reason='length'" in repr(output) and len(repr(output)) < 600


def test_arrays_and_lists_are_short_in_a_repr():
    array = np.zeros(1000, np.float32)
    many = completion(raw_logprobs=array, processed_logprobs=array, kept_mass=array)
    want = "raw_logprobs=<1000 values>, processed_logprobs=<1000 values>, kept_mass=<1000 values>"
    assert f"{want})" in repr(many) and "logprobs=<2 entries>" in repr(many)
    assert "kept_mass" not in repr(completion())
    output = request(*[many] * 1000, error="e" * 10_000)
    assert "...] (1000), finished=True" in repr(output) and len(repr(output)) < 2000


def test_a_list_of_outputs_reads_well_and_stays_a_list():
    outputs = RequestOutputs(request(completion(), request_id=str(i)) for i in range(100))
    first, second, third, last = repr(outputs).splitlines()
    assert first.startswith("RequestOutputs([RequestOutput(request_id='0'")
    assert second.startswith(" RequestOutput(") and third.startswith(" RequestOutput(")
    assert last == " ...] (100))"
    assert outputs == list(outputs) and outputs[3:4] == [outputs[3]] and len(outputs) == 100
    assert repr(RequestOutputs()) == "RequestOutputs([])"


@pytest.mark.parametrize("name", ["raw_logprobs", "processed_logprobs", "kept_mass"])
def test_outputs_with_arrays_compare(name):
    def make(*values: float) -> RequestOutput:
        return request(completion(**{name: np.array(values, np.float32)}))

    assert make(0.5, math.nan) == make(0.5, math.nan) and make() == make()
    for other in (make(0.5, 1.0), make(0.5), request(completion())):
        assert make(0.5, math.nan) != other and other != make(0.5, math.nan)
    assert completion() == completion() and completion() != completion(text="x") != "x"


def test_a_logprob_is_its_three_values():
    assert Logprob(-1.0) == (-1.0, None, None)
    assert Logprob(-1.0, 3, "a") == Logprob(logprob=-1.0, rank=3, decoded_token="a")


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_no_text_becomes_markup(text):
    told = {1: Logprob(-1.0, 1, text), 2: Logprob(-2.0, 2, text)}
    hostile = completion(text=text, logprobs=[told, told], token_ids=[1, 3], stop_reason=text)
    output = request(hostile, prompt=text, error=text, request_id=text)
    drawn = heat_map(hostile, lambda ids: text)
    pages = [Page(source) for source in (request_html(output), requests_html([output]), drawn)]
    spelled = Page(visible(text, 1000)).text
    assert [page.text.count(spelled) for page in pages] == [5, 4, 2]
    unseen = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b\u200f\u202e\u2066\u2069\u2028\ufeff]")
    for page in pages:
        assert not unseen.search(page.text + "".join(page.hovers).replace("\n", ""))


def test_what_cannot_be_seen_is_shown():
    assert Page(visible("a\n\tb", 9)).text == "a↵⇥\tb" and "<br>" in visible("a\n", 9)
    assert visible("\x1b[0m\u202e\ud800", 9) == "␛[0m⟨U+202E⟩⟨U+D800⟩"
    assert visible("שלום 👩\u200d🚀 é", 99) == "שלום 👩\u200d🚀 é"
    assert visible("'\"<&>", 9) == "&#x27;&quot;&lt;&amp;&gt;"
    assert visible("abcdefghi", 9) == "abcdefghi"
    assert visible("abcdefghij", 8) == "abcdef ... (2 characters left out) ... ij"


def test_a_request_shows_every_field():
    output = request(completion(stop_reason="\n"), error="broke")
    page = Page(output._repr_html_())
    for text in (
        "The", " cat!", "length: '↵'", "2 tokens", "logprob -10.39", "logprobs: see heat_map()",
        "error: broke", "request r7", "3 prompt tokens", "2 cached", "3 prompt logprobs",
        "first token after 0.25 s", "2 tokens in 4 s", "0.5 tokens/s",
    ):  # fmt: skip
        assert text in page.text, text
    assert "not finished" not in page.text


def test_a_prompt_of_ids_is_shown_as_ids():
    assert "token ids [1, 2, 3]" in Page(request_html(request(prompt=None))).text
    assert "no prompt" in Page(request_html(request(prompt=None, prompt_token_ids=None))).text


def test_every_completion_is_shown():
    outputs = [completion(index=i, text=f"text {i}", finish_reason="stop") for i in range(3)]
    page = Page(request_html(request(*outputs)))
    assert all(f"[{i}] text {i}" in page.text for i in range(3)) and page.text.count("stop") == 3
    assert "6 tokens in 4 s · 1.5 tokens/s" in page.text
    assert "text 2" in Page(requests_html([request(*outputs)])).text
    many = request(*outputs * 100)
    for source in (request_html(many), requests_html([many])):
        assert "280 more completions" in Page(source).text and source.count(">stop<") == 20


@pytest.mark.parametrize("reason", ["stop", "length", "abort", "error", "repetition", None])
def test_the_badge_says_how_it_ended(reason):
    output = request(completion(finish_reason=reason))
    for source in (request_html(output), requests_html([output])):
        assert f">{reason or 'running'}</span>" in source and Page(source)


@pytest.mark.parametrize(
    "metrics", [None, RequestMetrics(1.0), RequestMetrics(1.0, 2.0), RequestMetrics(1.0, 1.0, 1.0)]
)
def test_a_rate_that_is_not_known_is_not_shown(metrics):
    output = request(completion(finish_reason=None), metrics=metrics, finished=False)
    page = Page(request_html(output))
    assert "tokens/s" not in page.text and "2 tokens" in page.text and "not finished" in page.text
    assert "tokens/s" not in Page(requests_html([output])).text.replace("tokens/s", "", 1)


def test_a_failed_request_shows_its_error_alone():
    failed = CompletionOutput(0, "", [], finish_reason="error")
    output = RequestOutput(
        "1", None, None, None, [failed], True, RequestMetrics(1.0, None, 1.5), error="bad <prompt>"
    )
    for page in (Page(request_html(output)), Page(requests_html([output]))):
        assert "error: bad <prompt>" in page.text and "0 tokens in 0.5 s" in page.text
        assert " tokens/s" not in page.text


def test_a_table_shows_the_first_rows_and_the_totals():
    outputs = RequestOutputs(request(completion(), prompt=f"prompt {i}.") for i in range(1000))
    outputs[-1] = request(completion(), metrics=RequestMetrics(96.0, 100.0, 116.0))
    page = Page(outputs._repr_html_())
    assert page.tags.count("tr") == MAX_ROWS + 1 and "prompt 19." in page.text
    assert "prompt 20." not in page.text
    assert "1,000 outputs · 980 more not shown · 2,000 tokens in 20 s · 100.0 tokens/s" in page.text
    few = Page(requests_html(outputs[:1])).text
    assert few.endswith("length20.51 output · 2 tokens in 4 s · 0.5 tokens/s")
    assert "0 outputs · 0 tokens" in Page(requests_html([])).text


def test_a_heat_map_tells_each_token():
    array = np.array([math.log(0.8), -9.0], np.float32)
    told = completion(processed_logprobs=array, kept_mass=np.array([0.9, 1.0], np.float32))
    page = Page(heat_map(told))
    assert page.text.startswith(" cat⟨7⟩") and "2 tokens" in page.text
    assert page.hovers[0].split("\n") == [
        "id 5",
        "logprob -1.386 (25%), rank 2",
        "sampled at logprob -0.2231 (80%)",
        "the rules kept 90% of the probability",
        "50% ' dog' id 6",
    ]
    assert page.hovers[1].split("\n")[:2] == ["id 7", "logprob -9 (0.0123%), rank 40"]
    assert Page(heat_map(completion())).hovers[1] == "id 7\nlogprob -9 (0.0123%), rank 40"


def test_less_likely_is_stronger():
    told = [{1: Logprob(x, 1, "a")} for x in (0.0, -1.0, -4.0, -5.0, -math.inf, math.nan, 1e4)]
    source = heat_map(completion(token_ids=[1] * 7, logprobs=told))
    found = re.findall(r'<span style="(?:[^"]*rgba\(234,88,12,([\d.]+)\))?" title', source)
    assert found == ["0.00", "0.12", "0.48", "0.60", "0.60", "", "0.00"]
    assert Page(source)


def test_the_likeliest_alternatives_are_told():
    told = {i: Logprob(-float(i), i + 1, f"t{i}") for i in range(50)}
    lines = Page(heat_map(completion(token_ids=[2], logprobs=[told]))).hovers[0].split("\n")
    assert [line.split()[-1] for line in lines[2:]] == ["0", "1", "3", "4", "5"]
    assert lines[2] == "100% 't0' id 0"


def test_tokens_without_text_are_decoded_or_numbered():
    told = [{1: Logprob(-1.0, 1, "")}, {}, {1: Logprob(-1.0, 1, "\n")}]
    bare = completion(token_ids=[1, 2, 1, 4], logprobs=told)
    assert Page(heat_map(bare)).text.startswith("⟨1⟩⟨2⟩↵⟨4⟩")
    assert Page(heat_map(bare, lambda ids: f"<{ids[0]}>")).text.startswith("<1><2>↵<4>")
    assert Page(heat_map(bare, lambda ids: "")).text.startswith("⟨1⟩⟨2⟩↵⟨4⟩")


def test_a_heat_map_shows_in_a_notebook_and_in_a_terminal():
    heat = completion().heat_map()
    assert isinstance(heat, HeatMap) and heat._repr_html_() == heat_map(completion())
    assert repr(heat) == str(heat) == "<heat map of 2 tokens, mean logprob -5.19>"
    assert " cat🙂" in Page(completion().heat_map(lambda ids: "🙂").html).text
    empty = completion(text="", token_ids=[], logprobs=[]).heat_map()
    assert str(empty) == "<heat map of 0 tokens>" and Page(empty.html).hovers == []


def test_a_heat_map_needs_logprobs():
    message = r"the completion has no logprobs: ask for them: SamplingParams\(logprobs=0\)"
    with pytest.raises(ValueError, match=message):
        completion(logprobs=None).heat_map()


def test_long_outputs_are_drawn_in_bounded_size():
    told = {i: Logprob(-1.0 - i, i + 1, "word<&>" * 100) for i in range(20)}
    long = completion(token_ids=[3] * 10_000, logprobs=[told] * 10_000, text="\n'" * 10**6)
    drawn = heat_map(long)
    page = Page(drawn)
    assert len(page.hovers) == 1000 and "9,000 tokens left out" in page.text
    assert len(drawn.encode()) < 3_000_000
    output = request(long, prompt="<&>" * 10**6, error="x" * 10**6, request_id="r" * 10**6)
    assert len(request_html(output).encode()) < 700_000
    assert len(requests_html([output] * 1000).encode()) < 700_000
    ids = request(prompt=None, prompt_token_ids=list(range(10**5)))
    assert len(request_html(ids)) < 10_000


@pytest.mark.parametrize("fields", [{}, {"logprobs": []}, {"token_ids": [], "text": ""}])
def test_nothing_of_what_is_there_is_needed(fields):
    output = request(completion(**fields), metrics=None, prompt_logprobs=None)
    assert Page(request_html(output)) and Page(requests_html([output]))
    assert Page(heat_map(output.outputs[0]))
