"""Checks values against bounds, and names field, bound and value in errors. Knows no JAX."""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
import reprlib
from typing import Any, NamedTuple

import numpy as np

MOST_READ = 2**20  # elements of a list, which may have no end
MOST_PATH = 4096  # characters
MOST_SHOWN = 300  # characters of a value in a message


class Bound(NamedTuple):
    """A type, and for numbers a closed range; `each` for a list of such values.

    With `key`, a mapping (or pairs) from what `key` says to such values. `also` are further types,
    whose values stay as they are; where `among` names values, it is one of these.
    """

    kind: type
    low: float = 0
    high: float = 0
    optional: bool = False
    each: bool = False
    key: "Bound | None" = None
    most: int = 2**30  # elements
    also: tuple[Any, ...] = ()
    among: tuple[Any, ...] = ()

    @property
    def wanted(self) -> str:
        """The values that are allowed, in words."""
        if self.among:
            known = [*map(repr, self.among), *["None"] * self.optional]
            return f"{', '.join(known[:-1])} or {known[-1]}"
        words = {bool: "True or False", str: "a string"}
        kind = words.get(self.kind, f"a {self.kind.__name__}")
        if self.kind in (int, float):
            number = "an integer" if self.kind is int else "a finite number"
            kind = f"{number} from {self.low} to {self.high}"
        others = "".join(f" or a {other.__name__}" for other in self.also)
        return kind + others + " or None" * self.optional


def shown(value: Any) -> str:
    """Returns a short repr, whatever the value."""
    try:
        text = reprlib.repr(value)
        return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}..."
    except Exception:  # an integer of thousands of digits, or a class of its user's
        return f"a {type(value).__name__} that has no repr"


def validate(name: str, value: Any, bound: Bound) -> Any:
    """Returns a value as Python's own, hashable: tuples for lists and, in pairs, for mappings.

    Raises:
      TypeError: it has the wrong type.
      ValueError: it is out of range, or there are too many.
    """
    if value is None and (bound.optional or bound.each):
        return None if bound.optional else ()
    if bound.key is not None:
        return _pairs(name, value, bound, bound.key)
    return _elements(name, value, bound) if bound.each else _one(name, value, bound)


def _one(name: str, value: Any, bound: Bound) -> Any:
    if bound.also and isinstance(value, bound.also):
        return value
    got: Any = value.item() if isinstance(value, np.generic) else value
    kinds = (int, float) if bound.kind is float else (bound.kind, *map(type, bound.among))
    if type(got) not in kinds:
        raise TypeError(
            f"{name} must be {bound.wanted}, got {shown(value)} of {type(value).__name__}"
        )
    if bound.among:  # 1 is not True here
        if not any(type(got) is type(one) and got == one for one in bound.among):
            raise ValueError(f"{name} must be {bound.wanted}, got {shown(value)}")
        return got
    # Said so that NaN fails it.
    if bound.kind in (int, float) and not bound.low <= got <= bound.high:
        raise ValueError(f"{name}={shown(value)} is out of range: take {bound.wanted}")
    if bound.kind is str:
        check_unicode(name, got)
    if Path in bound.also:
        _check_path(name, got)
    return bound.kind(got) if bound.kind in (int, float) else got


def _check_path(name: str, text: str) -> None:
    """Refuses what is no path on any machine.

    Raises:
      ValueError: it has a zero character, or is too long.
    """
    if "\0" in text or len(text) > MOST_PATH:
        raise ValueError(
            f"{name}={shown(text)} can be no path, which has at most {MOST_PATH} characters, none "
            "of them zero: correct it"
        )


def check_unicode(name: str, text: str) -> None:
    """Refuses a text that no UTF-8 holds.

    Raises:
      ValueError: it has half a surrogate pair; names the field.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{name} has half a surrogate pair at character {error.start}, which no UTF-8 holds: "
            "remove it"
        ) from error


def _elements(name: str, values: Any, bound: Bound) -> tuple[Any, ...]:
    found: dict[Any, None] = {}
    for i, value in enumerate(elements(name, values, bound.wanted)):
        found[_one(f"{name}[{i}]", value, bound)] = None
        _check_count(name, len(found), bound.most)
    return tuple(found)


def elements(name: str, values: Any, wanted: str) -> Iterable[Any]:
    """Returns what can be iterated as a list of a user's.

    Raises:
      TypeError: it is none; an array without axes is none either.
    """
    no_list = isinstance(values, str | bytes | bytearray | Mapping)
    no_list |= isinstance(values, np.ndarray) and values.ndim == 0
    if no_list or not isinstance(values, Iterable):
        raise TypeError(f"{name} must be a list, each element {wanted}, got {shown(values)}")
    return _read(name, values)


def _read(name: str, values: Iterable[Any]) -> Iterator[Any]:
    """Yields elements of an iterable that may be endless, or raise."""
    try:
        for i, value in enumerate(values):
            if i == MOST_READ:
                raise ValueError(f"{name} has over {MOST_READ} elements: give fewer")
            yield value
    except ValueError:
        raise
    except Exception as error:
        raise TypeError(f"{name} cannot be read as a list: {type(error).__name__}") from error


def _pairs(name: str, values: Any, bound: Bound, key: Bound) -> tuple[tuple[Any, Any], ...]:
    try:
        given = list(values.items() if isinstance(values, Mapping) else values)
        pairs = [(k, v) for k, v in given]
    except Exception as error:  # of whatever object it is
        raise TypeError(
            f"{name} must be a dict from {key.wanted} to {bound.wanted}, got {shown(values)}"
        ) from error
    found: dict[Any, Any] = {}
    for k, v in pairs:
        known = _one(f"key of {name}", k, key)
        if known in found:
            raise ValueError(f"{name} has {known!r} twice: give each key one value")
        found[known] = _one(f"{name}[{known!r}]", v, bound)
    _check_count(name, len(found), bound.most)
    return tuple(found.items())


def _check_count(name: str, count: int, most: int) -> None:
    if count > most:
        raise ValueError(f"{name} has {count} distinct elements, it may have {most}: give fewer")
