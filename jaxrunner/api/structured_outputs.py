"""The constraints on a request's text, in vLLM's names. Knows neither JAX nor llguidance."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
import json
import re
from typing import Any

from jaxrunner.api import structural_tag
from jaxrunner.api.ebnf import MAX_EBNF_BYTES, is_ebnf
from jaxrunner.api.validation import check_unicode, elements, shown

MAX_SOURCE_BYTES = 2**16  # of a schema, a regex, a grammar, or all choices together
KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
FLAGS = ("disable_any_whitespace", "disable_additional_properties", "disable_fallback")


@dataclass(frozen=True, kw_only=True)
class StructuredOutputsParams:
    """One constraint, checked and normalised when made; equal ones share a compiled grammar.

    Exactly one of the first six is given. A schema keeps the order of its properties, which is
    the order they are generated in; objects may have further properties unless it forbids them.

    Raises:
      TypeError: a field has the wrong type or does not exist.
      ValueError: a field is out of range or not supported, or two contradict each other.
    """

    json: str | dict[str, Any] | None = None  # a JSON schema, stored as compact text
    regex: str | None = None  # the whole text matches it
    choice: Sequence[str] | None = None  # stored as a tuple without repeats
    grammar: str | None = None  # Lark, in llguidance's dialect, or EBNF: root ::= "yes" | "no"
    json_object: bool | None = None  # any object; None is stored as False
    structural_tag: str | dict[str, Any] | None = None  # stored as text; see that module
    disable_any_whitespace: bool = False  # between JSON's tokens; else a line break or a space
    disable_additional_properties: bool = False  # not supported
    whitespace_pattern: str | None = None  # a regex of what may stand between JSON's tokens
    disable_fallback: bool = False  # no effect: there is one backend and nothing to fall back on

    def __new__(cls, *args: Any, **kwargs: Any):
        """Names the fields there are when one is not."""
        known = [field.name for field in fields(cls)]
        for name in kwargs.keys() - set(known):
            raise TypeError(f"no structured output is called {name!r}: use {', '.join(known)}")
        return super().__new__(cls)

    def __post_init__(self):
        values: dict[str, Any] = {name: _flag(name, getattr(self, name)) for name in FLAGS}
        values["json_object"] = self.json_object is not None and _flag(
            "json_object", self.json_object
        )
        for name, what in (("json", "a JSON schema"), ("structural_tag", "a structural tag")):
            value = getattr(self, name)
            values[name] = None if value is None else _object(name, what, value)
        values["choice"] = None if self.choice is None else _choices(self.choice)
        for name in ("regex", "grammar", "whitespace_pattern"):
            value = getattr(self, name)
            values[name] = None if value is None else _text(name, value)
        for name, value in values.items():
            object.__setattr__(self, name, value)
        _check_together(self)

    @property
    def kind(self) -> str:
        """The name of the constraint that is given."""
        return _given(self)[0]


# A regex over this alphabet matches whitespace alone, so JSON stays JSON.
_WHITESPACE = re.compile(
    r"(?:[ \t\n\r]|\\[ntr]|\[(?:[ \t\n\r]|\\[ntr])+\]|[()|*+?]|\{\d{1,3}(?:,\d{0,3})?\})*"
)
# Strings, regexes and comments of Lark end at their line, closed or not: the scan stays linear.
_LARK = re.compile(
    r'"(?:\\.|[^"\\\n])*"?|(?://|#)[^\n]*|/(?:\\.|[^/\\\n])*/?|(<|\btemperature\s*=)'
)


def _given(params: StructuredOutputsParams) -> list[str]:
    return [name for name in KINDS if getattr(params, name) not in (None, False)]


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"structured_outputs.{name} must be True or False, got {shown(value)}")
    return value


def _text(name: str, value: Any) -> str:
    """Returns a field's text, which is neither empty nor too long, and UTF-8 holds it."""
    if not isinstance(value, str):
        raise TypeError(
            f"structured_outputs.{name} must be a string, got {shown(value)} "
            f"of {type(value).__name__}"
        )
    value = str.__str__(value)  # of a class of its user's, what it holds
    if not value:
        raise ValueError(f"structured_outputs.{name} is empty: say what to generate")
    _check_size(name, len(value))
    check_unicode(f"structured_outputs.{name}", value)
    _check_size(name, len(value.encode()))
    return value


def _check_size(name: str, size: int) -> None:
    if size > MAX_SOURCE_BYTES:
        raise ValueError(
            f"structured_outputs.{name} has {size} bytes or more, "
            f"the limit is {MAX_SOURCE_BYTES}: shorten it"
        )


def _object(name: str, what: str, value: Any) -> str:
    """Returns an object as one spelling of JSON."""
    full = f"structured_outputs.{name}"
    if not isinstance(value, str | dict):
        raise TypeError(f"{full} must be {what} as a dict or a string, got {shown(value)}")
    value = _text(name, value) if isinstance(value, str) else value
    try:
        parsed = json.loads(value) if isinstance(value, str) else value
        if not isinstance(parsed, dict):
            raise TypeError("an object is wanted")
        text = json.dumps(parsed, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{full} is not {what} ({error}): correct it") from error
    if name == "structural_tag":
        structural_tag.check(json.loads(text))
    return _text(name, text)


def _choices(values: Any) -> tuple[str, ...]:
    no_list = isinstance(values, str | bytes | dict) or getattr(values, "ndim", 1) == 0
    if no_list or not isinstance(values, Iterable):
        raise TypeError(f"structured_outputs.choice must be a list of strings, got {shown(values)}")
    given = elements("structured_outputs.choice", values, "a string")
    choices = tuple(dict.fromkeys(_text(f"choice[{i}]", v) for i, v in enumerate(given)))
    if not choices:
        raise ValueError("structured_outputs.choice has no string to choose: give at least one")
    _check_size("choice", sum(len(choice.encode()) + 1 for choice in choices))
    return choices


def _check_together(params: StructuredOutputsParams) -> None:
    """Checks what no field shows by itself, and refuses what would have no effect."""
    given = _given(params)
    if len(given) != 1:
        raise ValueError(
            f"structured_outputs needs exactly one of {', '.join(KINDS)}, "
            f"got {' and '.join(given) or 'none'}: give one"
        )
    if params.disable_additional_properties:
        raise ValueError(
            "structured_outputs.disable_additional_properties is not supported: set "
            '"additionalProperties": false in the objects of the schema'
        )
    for name in ("disable_any_whitespace", "whitespace_pattern"):
        if getattr(params, name) and params.kind in ("regex", "choice", "grammar"):
            raise ValueError(
                f"structured_outputs.{name} has an effect on JSON only, "
                f"got {params.kind}: leave it out"
            )
    if params.whitespace_pattern and params.disable_any_whitespace:
        raise ValueError(
            "structured_outputs.whitespace_pattern contradicts disable_any_whitespace: give one"
        )
    if not _WHITESPACE.fullmatch(params.whitespace_pattern or ""):
        raise ValueError(
            f"structured_outputs.whitespace_pattern={shown(params.whitespace_pattern)} "
            r"may match more than whitespace: take space, \n, \t, \r, [] | () * + ? {m,n} alone"
        )
    grammar = params.grammar or ""
    if (ebnf := is_ebnf(grammar)) and len(grammar.encode()) > MAX_EBNF_BYTES:
        raise ValueError(
            f"structured_outputs.grammar has {len(grammar.encode())} bytes of EBNF, the limit is "
            f"{MAX_EBNF_BYTES}: shorten it, or write it in Lark"
        )
    for match in () if ebnf else _LARK.finditer(grammar):
        if match[1]:
            raise ValueError(
                f"structured_outputs.grammar has {match[1]!r} at character {match.start()}, which "
                "would name a token or a temperature, not supported: write text and rules alone"
            )
