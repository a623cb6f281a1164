"""Which values a field may hold, so that it can be told who took one that has no meaning."""

from collections.abc import Callable, Iterable
import math
import random
from typing import Any, NamedTuple

import numpy as np


class Kind(NamedTuple):
    """good: whether a value may be taken; None where it is not worth telling.

    near: values that are almost good.
    """

    good: Callable[[Any], bool | None]
    near: tuple[Any, ...] = ()


def integer(low: int, high: int, *also: Any) -> Kind:
    """Returns the kind of integers in a closed range. also: None and its like."""

    def good(value: Any) -> bool | None:
        if is_one_of(value, also):
            return True
        if type(value) is not int and not isinstance(value, np.integer):
            return None if type(value) in MAYBE else False
        return not isinstance(value, np.timedelta64) and low <= int(value) <= high

    edges = (low - 1, high + 1, float(low), np.float32(low), str(low), -high, [low], True, np.True_)
    return Kind(good, edges)


def real(low: float, high: float, *also: Any) -> Kind:
    """Returns the kind of finite numbers in a closed range."""

    def good(value: Any) -> bool | None:
        if is_one_of(value, also):
            return True
        if type(value) not in (int, float) and not isinstance(value, np.floating | np.integer):
            return None if type(value) in MAYBE else False
        if type(value) in (np.longdouble, np.timedelta64):
            return None
        try:
            return bool(math.isfinite(value) and low <= value <= high)
        except OverflowError:
            return False

    return Kind(good, (low - 1e-3, high * 1.001 + 1e-3, -high - 9, math.nan, math.inf, True))


def size(low: int, sure: int, most: int, *also: Any) -> Kind:
    """Returns the kind of sizes: good up to `sure`, bad over `most`; between, memory says."""
    within, sane = integer(low, most, *also), integer(low, sure, *also)

    def good(value: Any) -> bool | None:
        return within.good(value) and (sane.good(value) or None)

    return Kind(good, sane.near)


def flag(*also: Any) -> Kind:
    """Returns the kind of True and False."""

    def good(value: Any) -> bool | None:
        return (
            None if isinstance(value, np.bool_) else type(value) is bool or is_one_of(value, also)
        )

    return Kind(good, (0, 1, "True", "", "no", [], [False], 1.0, -1))


def one_of(*values: Any) -> Kind:
    """Returns the kind of a few words."""
    near = tuple(v.upper() for v in values if isinstance(v, str))
    near += tuple(v + " " for v in values if isinstance(v, str))
    return Kind(lambda value: is_one_of(value, values), (*near, list(values), values, "", None))


def text(*also: Any, maybe: bool = True) -> Kind:
    """Returns the kind of texts; whether a text is good is not told where it `maybe` is."""

    def good(value: Any) -> bool | None:
        if is_one_of(value, also):
            return True
        return (None if maybe else True) if isinstance(value, str) else False

    return Kind(good, (b"a", 3, ["a"], {"a": "b"}, True, 1.5))


def several(element: Kind, *also: Any, least: int = 0, most: int = 2**20) -> Kind:
    """Returns the kind of lists of a kind."""

    def good(value: Any) -> bool | None:
        if is_one_of(value, also):
            return True
        if type(value) in (str, bytes, bytearray, dict, int, float, bool, type(None), object):
            return False
        if type(value) not in (list, tuple):
            return None if isinstance(value, Iterable) else False
        told = [element.good(x) for x in value]
        if False in told or len(value) < least:
            return False
        return None if None in told or len(value) > most else True

    near = tuple(place(x) for x in element.near for place in (lambda x: [x], lambda x: (x, x)))
    return Kind(good, (*near, *element.near, "ab", b"ab", {1: 2}, 3))


def instance(cls: type, *also: Any) -> Kind:
    """Returns the kind of objects of a class."""
    return Kind(lambda v: is_one_of(v, also) or type(v) is cls, (cls, {}, "x", [], cls.__name__))


def nothing() -> Kind:
    """Returns the kind of what no value is good for."""
    return Kind(lambda value: False)


def empty(value: Any) -> bool | None:
    """Whether a value is a container that may be empty, and no other."""
    if isinstance(value, np.ndarray):
        return False if value.size else None
    return None if type(value) in (list, tuple, dict, set, frozenset) and not value else False


def anything() -> Kind:
    """Returns the kind of what is not told: who takes it may, who refuses names it."""
    return Kind(lambda value: None)


MAYBE = (np.ndarray, np.ma.core.MaskedConstant)


def is_one_of(value: Any, values: Iterable[Any]) -> bool:
    """Whether a value is one of some plain ones, and of its type; asks nothing of hostile ones."""
    plain = type(value) in (int, float, bool, str, type(None))
    return any(value is v or (plain and type(v) is type(value) and v == value) for v in values)


def draw(rng: random.Random, kind: Kind, anything: Callable[[random.Random], Any]) -> Any:
    """Returns a value for a field: one near its kind, or anything."""
    return rng.choice(kind.near) if kind.near and rng.random() < 0.4 else anything(rng)
