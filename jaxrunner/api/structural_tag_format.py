"""Formats of structural tags, in xgrammar's words: which text follows which. Knows no JAX.

{"type": "sequence", "elements": [
    {"type": "tag", "begin": "<think>", "content": {"type": "any_text"}, "end": "</think>"},
    {"type": "json_schema", "json_schema": {...}}]}

A format is open where free text ends it: that goes on until the `end` of the tag around it, or
to the end of all.
"""

from collections.abc import Mapping, Sequence
import json
from typing import Any

from jaxrunner.api import ebnf
from jaxrunner.api.validation import shown

MOST_NESTED = 32
_FLAGS = dict(at_least_one=bool, stop_after_first=bool)
# The fields that a type must have, and those that it may have.
FIELDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "any_text": ({}, {}),
    "const_string": (dict(value=str), {}),
    "regex": (dict(pattern=str), {}),
    "grammar": (dict(grammar=str), {}),
    "json_schema": (dict(json_schema=dict), {}),
    "sequence": (dict(elements=list), {}),
    "or": (dict(elements=list), {}),
    "optional": (dict(content=dict), {}),
    "star": (dict(content=dict), {}),
    "plus": (dict(content=dict), {}),
    "repeat": (dict(content=dict, min=int, max=int), {}),
    "tag": (dict(begin=str, content=dict, end=(str, list)), {}),
    "triggered_tags": (dict(triggers=list, tags=list), _FLAGS),
    "tags_with_separator": (dict(tags=list, separator=str), _FLAGS),
}
REPEATED = {"optional": "?", "star": "*", "plus": "+"}


def check(given: Any, place: str, depth: int = 0) -> None:
    """Checks a format that JSON holds.

    Raises:
      TypeError, ValueError: a part of it is missing or bad; names it.
    """
    if depth > MOST_NESTED:
        raise ValueError(f"{place} is nested over {MOST_NESTED} deep: make it flatter")
    kind = _kind(given) if isinstance(given, dict) else None
    if not isinstance(kind, str) or kind not in FIELDS:
        raise ValueError(
            f"{place} must be a dict whose type is one of {', '.join(FIELDS)}, got {shown(given)}"
        )
    needed, extra = FIELDS[kind]
    types = needed | extra
    fit = all(type(v) in _types(types[k]) for k, v in given.items() if k in types)
    if not fit or not needed.keys() <= given.keys() or given.keys() - types.keys() - {"type"}:
        names = [
            f"{name}, {' or '.join(t.__name__ for t in _types(needed[name]))}" for name in needed
        ]
        names += [f"perhaps {name}, bool" for name in extra]
        raise TypeError(
            f"{place} of type {kind!r} must have {'; '.join(names) or 'no fields'}, got "
            f"{shown(given)}"
        )
    for name, parts in _parts(given).items():
        for i, part in enumerate(parts):
            at = f"{place}.{name}" + f"[{i}]" * (name != "content")
            check(part, at, depth + 1)
            if name == "tags" and _kind(part) != "tag":
                raise ValueError(f"{at} must be of type 'tag', got {_kind(part)!r}")
            if is_open(part) and not _may_be_open(given, i):
                raise ValueError(
                    f"{at} ends in free text, and what follows could never begin: put it last, or "
                    "into a tag with an end"
                )
    _check_values(given, place)


def _check_values(given: dict[str, Any], place: str) -> None:
    """Checks constraints beyond types; raises as `check`."""
    empty = [name for name in ("elements", "tags", "triggers", "end") if given.get(name) == []]
    if empty or given.get("pattern") == "":
        name = (empty or ["pattern"])[0]
        raise ValueError(f"{place}.{name} is empty: give it something, or leave out the format")
    for name in ("triggers", "end"):
        texts = given.get(name, ())
        if isinstance(texts, list) and not all(isinstance(t, str) and t for t in texts):
            raise TypeError(f"{place}.{name} must be a list of texts, got {shown(texts)}")
    for i, tag in enumerate(given["tags"] if "triggers" in given else ()):
        if sum(tag["begin"].startswith(trigger) for trigger in given["triggers"]) != 1:
            raise ValueError(
                f"{place}.tags[{i}].begin must start with one of the triggers, "
                f"{shown(given['triggers'])}, got {shown(tag['begin'])}"
            )
    if _kind(given) == "repeat" and not 0 <= given["min"] <= given["max"] <= 1000:
        raise ValueError(
            f"{place} must repeat from min to max times, 0 to 1000, got {given['min']} to "
            f"{given['max']}"
        )


def is_open(given: dict[str, Any]) -> bool:
    """Whether free text ends a format that was checked, or that only lacks a check of values."""
    kind = _kind(given)
    if kind == "triggered_tags":
        return not (given.get("at_least_one") and given.get("stop_after_first"))
    if kind == "tag":
        return not given["end"] and is_open(given["content"])
    if kind == "sequence":
        return bool(given["elements"]) and is_open(given["elements"][-1])
    if kind == "or":
        return any(map(is_open, given["elements"]))
    return kind == "any_text"


def to_lark(given: dict[str, Any], whitespace: Mapping[str, Any]) -> str:
    """Returns the grammar of a checked format. whitespace: llguidance's options of JSON."""
    lines = _Lines(whitespace)
    start = lines.rule(given, ())
    return "\n".join(["%llguidance {}", f"start: {start}", *lines.lines])


class _Lines:
    """Lines of a grammar in Lark, as they are written."""

    def __init__(self, whitespace: Mapping[str, Any]):
        self.whitespace = dict(whitespace)
        self.lines = [r"TEXT: /(.|\n)*/"]

    def add(self, body: str, *, lazy: bool = False) -> str:
        """Adds a rule. Returns its name."""
        name = f"r{len(self.lines)}"
        self.lines.append(f"{name}{'[lazy]' * lazy}: {body}")
        return name

    def rule(self, given: dict[str, Any], ends: Sequence[str]) -> str:
        """Adds what a format is, and one of `ends` behind it. Returns the name of the rule."""
        kind = _kind(given)
        if kind == "tag":
            own = [given["end"]] if isinstance(given["end"], str) else given["end"]
            inner = self.rule(given["content"], own if any(own) else ends)
            body = f"{lark_string(given['begin'])} {inner}"
            return self.add(f"{body} {self._any(ends)}" if any(own) else body)
        if kind == "sequence":
            *first, last = given["elements"]
            return self.add(" ".join([*(self.rule(f, ()) for f in first), self.rule(last, ends)]))
        if kind == "or":
            return self.add(" | ".join(self.rule(f, ends) for f in given["elements"]))
        if kind == "any_text":
            return self._free(ends)
        if kind == "triggered_tags":
            return self._triggered(given, ends)
        return self.add(f"({self._closed(given)}) {self._any(ends)}")

    def _closed(self, given: dict[str, Any]) -> str:
        """Returns what a format is that no free text ends."""
        kind = _kind(given)
        if kind == "const_string":
            return lark_string(given["value"])
        if kind == "regex":
            return self.add(f"/{_escaped(given['pattern'])}/")
        if kind == "grammar":
            return self.add(f"%lark {{\n{ebnf.to_lark(given['grammar'])}\n}}")
        if kind == "json_schema":
            schema = given["json_schema"] | {"x-guidance": self.whitespace}
            return self.add(f"%json {json.dumps(schema)}")
        if kind == "tags_with_separator":
            return self._separated(given)
        times = REPEATED.get(kind) or f"{{{given['min']},{given['max']}}}"
        return f"{self.rule(given['content'], ())}{times}"

    def _separated(self, given: dict[str, Any]) -> str:
        one = self.add(" | ".join(self.rule(tag, ()) for tag in given["tags"]))
        between = lark_string(given["separator"])
        more = "" if given.get("stop_after_first") else f"({between} {one})*"
        return f"({one} {more})" + "?" * (not given.get("at_least_one"))

    def _triggered(self, given: dict[str, Any], ends: Sequence[str]) -> str:
        """Free text in which each trigger begins one of its tags; the first at once if needed."""
        calls = []
        for trigger in given["triggers"]:
            tags = [tag for tag in given["tags"] if tag["begin"].startswith(trigger)]
            rests = [self.rule(tag | {"begin": tag["begin"][len(trigger) :]}, ()) for tag in tags]
            if rests:
                said = self.add(f"TEXT {lark_string(trigger)}", lazy=True)
                calls.append(f"{said} ({' | '.join(rests)})")
        call, end, last = self.add(" | ".join(calls)), self._any(ends), self._free(ends)
        if not given.get("at_least_one"):
            return self.add(
                f"{call} {end} | {last}" if given.get("stop_after_first") else f"{call}* {last}"
            )
        first = self.add(" | ".join(self.rule(tag, ()) for tag in given["tags"]))
        return self.add(f"{first} {end if given.get('stop_after_first') else f'{call}* {last}'}")

    def _free(self, ends: Sequence[str]) -> str:
        """Adds free text until one of `ends`, or for ever. Returns the name of the rule."""
        return self.add(f"TEXT {self._any(ends)}", lazy=True) if ends else "TEXT"

    def _any(self, ends: Sequence[str]) -> str:
        return f"({' | '.join(map(lark_string, ends))})" if ends else ""


def _kind(given: dict[str, Any]) -> Any:
    """Returns the type of a format; a tag need not say it."""
    return given.get("type", "tag" if "begin" in given else None)


def lark_string(text: str) -> str:
    """Returns a text as a string of llguidance's Lark."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", r"\u007f")  # the lexer refuses it


def _escaped(pattern: str) -> str:
    """Returns a regular expression as it stands between slashes."""
    out, is_escaped = "", False
    for c in pattern:
        out += {"/": r"/" if is_escaped else r"\/", "\n": "n" if is_escaped else r"\n"}.get(c, c)
        is_escaped = c == "\\" and not is_escaped
    return out


def _types(wanted: Any) -> tuple[type, ...]:
    return wanted if isinstance(wanted, tuple) else (wanted,)


def _parts(given: dict[str, Any]) -> dict[str, list[Any]]:
    """Returns the formats within one, by the field that has them."""
    found = {name: given[name] for name in ("elements", "tags") if name in given}
    return found | ({"content": [given["content"]]} if "content" in given else {})


def _may_be_open(given: dict[str, Any], i: int) -> bool:
    """Whether free text may end part `i` of a format."""
    if _kind(given) == "sequence":
        return i == len(given["elements"]) - 1
    return _kind(given) in ("or", "tag")
