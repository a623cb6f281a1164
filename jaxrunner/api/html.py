"""Draws outputs for notebooks, as HTML strings: no scripts, every text escaped. Knows no JAX."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
import heapq
from html import escape
import math
from typing import TYPE_CHECKING
import unicodedata

if TYPE_CHECKING:  # outputs draw themselves with this module
    from jaxrunner.api.outputs import CompletionOutput, Logprob, RequestOutput

Decode = Callable[[list[int]], str]

MAX_ROWS = 20  # of a table
MAX_COMPLETIONS = 20  # of one request
MAX_TEXT, MAX_CELL = 8000, 300  # characters of a text, and of one in a table
MAX_TOKENS = 1000  # of a heat map: each has a hover text of some 300 bytes
MAX_TOKEN = 80  # characters of one token
NUM_ALTERNATIVES = 5
COLDEST = -5  # the logprob of the strongest colour

# Tints and opacities only: the page's own text colour stays readable, dark or light.
_GREY, _LINE = "opacity:.7", "rgba(128,128,128,.4)"
_RED, _AMBER, _GREEN, _BLUE = "220,38,38", "217,119,6", "22,163,74", "59,130,246"
_BADGES = {"stop": _GREEN, "length": _AMBER, "repetition": _AMBER, "error": _RED, None: _BLUE}
_CELL = f"text-align:left;vertical-align:top;border-bottom:1px solid {_LINE};padding:4px 8px"
_FLOW = "white-space:pre-wrap;overflow-wrap:anywhere"
_BREAK = '<span style="opacity:.5;user-select:none">↵</span><br>'
_JOINERS = "\u200c\u200d"  # unseen, but words and emoji need them


@dataclass(frozen=True, repr=False)
class HeatMap:
    """A completion coloured by logprob: `html` in a notebook, `text` elsewhere."""

    html: str
    text: str

    def _repr_html_(self) -> str:
        return self.html

    def __repr__(self) -> str:
        return self.text


def request_html(output: "RequestOutput") -> str:
    """Returns a request: its prompt, its completions, how each ended, and figures."""
    rows = [_flow(_prompt(output, MAX_TEXT), _GREY)]
    for completion in output.outputs[:MAX_COMPLETIONS]:
        index = _small(f"[{completion.index}]") + " " if len(output.outputs) > 1 else ""
        style = f"border-left:3px solid {_LINE};padding-left:8px;margin:4px 0"
        rows.append(_flow(index + visible(completion.text, MAX_TEXT), style))
        rows.append(f"<div>{_badge(completion)} {_small(*_completion_notes(completion))}</div>")
    if len(output.outputs) > MAX_COMPLETIONS:
        rows.append(_small(f"{len(output.outputs) - MAX_COMPLETIONS:,} more completions"))
    if output.error is not None:
        rows.append(_error(output.error, MAX_TEXT))
    rows.append(f"<div>{_small(*_request_notes(output))}</div>")
    return f'<div style="line-height:1.5">{"".join(rows)}</div>'


def requests_html(outputs: Sequence["RequestOutput"]) -> str:
    """Returns a table of the first outputs, one a row, and the figures of all."""
    names = ("prompt", "text", "finish reason", "tokens", "tokens/s")
    head = "".join(f'<th style="{_CELL}">{name}</th>' for name in names)
    rows = "".join(_row(output) for output in outputs[:MAX_ROWS])
    notes = [f"{len(outputs):,} output{'s' * (len(outputs) != 1)}"]
    if len(outputs) > MAX_ROWS:
        notes.append(f"{len(outputs) - MAX_ROWS:,} more not shown")
    table = f'<table style="border-collapse:collapse"><tr>{head}</tr>{rows}</table>'
    return f"<div>{table}<div>{_small(*notes, *_speed(outputs))}</div></div>"


def heat_map(completion: "CompletionOutput", decode: Decode | None = None) -> str:
    """Returns a completion with each token coloured by its logprob; hovering shows more.

    decode: a tokenizer's `decode`, for the tokens whose Logprob has no text.

    Raises:
      ValueError: the completion has no logprobs.
    """
    if completion.logprobs is None:
        raise ValueError("the completion has no logprobs: ask for them: SamplingParams(logprobs=0)")
    count = len(completion.token_ids)
    head, tail = _ends(count, MAX_TOKENS)
    first, last = (
        "".join(_token(completion, i, decode) for i in part)
        for part in (range(head), range(tail, count))
    )
    gap = f"<br>{_small(f'{tail - head:,} tokens left out')}<br>" if tail > head else ""
    scale = (f'<span style="{_tint(x)}"> {x} </span>' for x in range(0, COLDEST - 1, -1))
    legend = _small(f"logprob {''.join(scale)} or less", f"{count:,} tokens")
    return f"<div>{_flow(first + gap + last)}<div>{legend}</div></div>"


def draw(completion: "CompletionOutput", decode: Decode | None = None) -> HeatMap:
    """Returns a completion's heat map as a notebook and a terminal can show it."""
    drawn, count = heat_map(completion, decode), len(completion.token_ids)
    entries = [_entry(completion, i) for i in range(count)]
    known = [entry.logprob for entry in entries if entry is not None]
    mean = f", mean logprob {sum(known) / len(known):.2f}" if known else ""
    return HeatMap(drawn, f"<heat map of {count:,} tokens{mean}>")


def tokens_per_s(outputs: Sequence["RequestOutput"]) -> float | None:
    """Returns all their tokens over the time from the first arrival to the last end."""
    seconds, count = _seconds(outputs), _num_tokens(outputs)
    return count / seconds if seconds and count else None


def visible(text: str, limit: int) -> str:
    """Returns text as HTML: escaped, its middle left out, its control characters shown."""
    lines = _cut(text, limit).split("\n")
    return _BREAK.join(escape("".join(map(_seen, line)), quote=True) for line in lines)


def _row(output: "RequestOutput") -> str:
    text, badges = "", ""
    for completion in output.outputs[:MAX_COMPLETIONS]:
        text += f"<div>{visible(completion.text, MAX_CELL)}</div>"
        badges += f"<div>{_badge(completion)}</div>"
    if len(output.outputs) > MAX_COMPLETIONS:
        text += _small(f"{len(output.outputs) - MAX_COMPLETIONS:,} more completions")
    if output.error is not None:
        text += _error(output.error, MAX_CELL)
    prompt = f'<span style="{_GREY}">{_prompt(output, MAX_CELL)}</span>'
    rate = tokens_per_s([output])
    cells = [
        *(f'<div dir="auto" style="{_FLOW}">{cell}</div>' for cell in (prompt, text)),
        badges,
        f"{_num_tokens([output]):,}",
        "" if rate is None else f"{rate:,.1f}",
    ]
    return "<tr>" + "".join(f'<td style="{_CELL}">{cell}</td>' for cell in cells) + "</tr>"


def _prompt(output: "RequestOutput", limit: int) -> str:
    if output.prompt is not None:
        return visible(output.prompt, limit)
    ids = output.prompt_token_ids
    return "no prompt" if ids is None else _cut(f"token ids {list(ids[:limit])}", limit)


def _badge(completion: "CompletionOutput") -> str:
    reason, stop = completion.finish_reason, completion.stop_reason
    colour = _BADGES.get(reason, "128,128,128")
    text = escape(reason or "running")
    if stop is not None:
        text += f": {escape(_quoted(stop), quote=True) if isinstance(stop, str) else stop}"
    style = f"background:rgba({colour},.25);border:1px solid rgb({colour})"
    return f'<span style="{style};border-radius:8px;padding:0 6px;font-size:85%">{text}</span>'


def _completion_notes(completion: "CompletionOutput") -> list[str]:
    notes = [f"{len(completion.token_ids):,} tokens"]
    if completion.cumulative_logprob is not None:
        notes.append(f"logprob {completion.cumulative_logprob:.2f}")
    if completion.logprobs is not None:
        notes.append("logprobs: see heat_map()")
    return notes


def _request_notes(output: "RequestOutput") -> list[str]:
    notes = [f"request {visible(output.request_id, MAX_TOKEN)}"]
    if output.prompt_token_ids is not None:
        notes.append(f"{len(output.prompt_token_ids):,} prompt tokens")
    notes.append(f"{output.num_cached_tokens:,} cached")
    if output.prompt_logprobs is not None:
        notes.append(f"{len(output.prompt_logprobs):,} prompt logprobs")
    metrics = output.metrics
    if metrics is not None and metrics.first_token_s is not None:
        notes.append(f"first token after {metrics.first_token_s - metrics.arrival_s:.3g} s")
    return notes + _speed([output]) + ["not finished"] * (not output.finished)


def _speed(outputs: Sequence["RequestOutput"]) -> list[str]:
    seconds, rate = _seconds(outputs), tokens_per_s(outputs)
    note = f"{_num_tokens(outputs):,} tokens"
    if seconds is not None:
        note += f" in {seconds:.3g} s"
    return [note] if rate is None else [note, f"{rate:,.1f} tokens/s"]


def _seconds(outputs: Sequence["RequestOutput"]) -> float | None:
    metrics = [output.metrics for output in outputs if output.metrics is not None]
    ends = [m.finished_s for m in metrics if m.finished_s is not None]
    if not outputs or len(ends) < len(outputs):
        return None
    return max(ends) - min(m.arrival_s for m in metrics)


def _num_tokens(outputs: Sequence["RequestOutput"]) -> int:
    return sum(len(completion.token_ids) for o in outputs for completion in o.outputs)


def _token(completion: "CompletionOutput", index: int, decode: Decode | None) -> str:
    token_id, entry = completion.token_ids[index], _entry(completion, index)
    text = (entry and entry.decoded_token) or (decode and decode([token_id]))
    shown = visible(text, MAX_TOKEN) if text else f"⟨{token_id}⟩"
    lines = (escape(line, quote=True) for line in _hover(completion, index, decode))
    style = "" if entry is None else _tint(entry.logprob)
    return f'<span style="{style}" title="{"&#10;".join(lines)}">{shown}</span>'


def _hover(completion: "CompletionOutput", index: int, decode: Decode | None) -> list[str]:
    """Returns the lines of a token's hover text."""
    token_id, entry = completion.token_ids[index], _entry(completion, index)
    lines = [f"id {token_id}"]
    if entry is not None:
        rank = "" if entry.rank is None else f", rank {entry.rank}"
        lines.append(f"logprob {entry.logprob:.4g} ({_percent(entry.logprob)}){rank}")
    processed, kept = completion.processed_logprobs, completion.kept_mass
    if processed is not None and index < len(processed):
        lines.append(f"sampled at logprob {processed[index]:.4g} ({_percent(processed[index])})")
    if kept is not None and index < len(kept):
        lines.append(f"the rules kept {100 * kept[index]:.3g}% of the probability")
    others = (item for item in _entries(completion, index).items() if item[0] != token_id)
    best = heapq.nlargest(NUM_ALTERNATIVES, others, key=lambda item: item[1].logprob)
    for other, logprob in best:
        text = logprob.decoded_token or (decode and decode([other])) or ""
        lines.append(f"{_percent(logprob.logprob)} {_quoted(text)} id {other}")
    return lines


def _entries(completion: "CompletionOutput", index: int) -> "dict[int, Logprob]":
    logprobs = completion.logprobs or []
    return logprobs[index] if index < len(logprobs) else {}


def _entry(completion: "CompletionOutput", index: int) -> "Logprob | None":
    return _entries(completion, index).get(completion.token_ids[index])


def _tint(logprob: float) -> str:
    """Returns a background: none for a sure token, the stronger the more it surprises."""
    if math.isnan(logprob):
        return ""
    share = min(max(0.0, logprob / COLDEST), 1.0)
    return f"border-radius:3px;background:rgba(234,88,12,{0.6 * share:.2f})"


def _percent(logprob: float) -> str:
    return f"{100 * math.exp(min(logprob, 0.0)):.3g}%"


def _quoted(text: str) -> str:
    return f"'{''.join('↵' if c == chr(10) else _seen(c) for c in _cut(text, MAX_TOKEN))}'"


def _seen(char: str) -> str:
    """Returns a character, or a sign for one that is unseen or turns its neighbours about."""
    if char == "\t":
        return "⇥\t"
    if unicodedata.category(char) not in ("Cc", "Cf", "Cs", "Zl", "Zp") or char in _JOINERS:
        return char
    code = ord(char)
    return chr(0x2400 + code) if code < 32 else f"⟨U+{code:04X}⟩"


def _cut(text: str, limit: int) -> str:
    head, tail = _ends(len(text), limit)
    gap = f" ... ({tail - head:,} characters left out) ... " if tail > head else ""
    return text[:head] + gap + text[tail:]


def _ends(count: int, limit: int) -> tuple[int, int]:
    """Returns where the first part of what is shown ends, and where the last one starts."""
    return (count, count) if count <= limit else (limit * 3 // 4, count - limit // 4)


def _flow(html: str, style: str = "") -> str:
    return f'<div dir="auto" style="{_FLOW};{style}">{html}</div>'


def _error(error: str, limit: int) -> str:
    style = f"border-left:3px solid rgb({_RED});background:rgba({_RED},.15);padding-left:8px"
    return _flow(f"<b>error:</b> {visible(error, limit)}", style)


def _small(*notes: str) -> str:
    return f'<span style="{_GREY};font-size:85%">{" · ".join(notes)}</span>'
