"""Values that have no meaning almost anywhere, drawn from a seeded generator."""

from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
import itertools
import math
from pathlib import Path
import random
from typing import Any

import jax.numpy as jnp
import numpy as np

NAN, INF = math.nan, math.inf
HUGE = (10**400, -(10**400), 10**5000, -(10**5000))  # the last two have no repr
# Neither a number, nor a list of them.
JUNK = (
    "", "1", "nan", "-1", b"1", b"", bytearray(b"1"), 1j, 0j, np.complex64(1), Decimal(1), object(),
    object, len, ..., NotImplemented, np.array(1), np.array(1.0), np.str_("1"), np.bytes_(b"1"),
    np.datetime64("2020-01-01"), np.timedelta64(1, "s"), np.float32, slice(1), {"a": 1}, {},
)  # fmt: skip
LISTS = ([], [1], (), (1,), [[1]], [1.0], {1}, [None], range(2), np.array([1]), np.array([[1.5]]))
BOOLS = (True, False, np.True_, np.False_)
FLOATS = (
    1.0, 0.0, -1.0, 1.5, NAN, INF, -INF, 1e38, 1e308, np.float16(1), np.float32(1), np.float64(1),
    np.float16(INF), np.float32(NAN), np.float32(-INF), np.float64(INF), np.longdouble(1e39),
)  # fmt: skip
TEXTS = (
    "\ud800", "a\udcff", "\0", "é" * 999, "auto", "None", "true", "/", "..", "~", "/dev/null",
    "a/b", "../../etc", "{}", "[]", "\n", " ", "x" * 100_000, "%s", "{0}", "kv_cache", "weights",
)  # fmt: skip


class Hostile:
    """An object one of whose methods raises."""

    def __init__(self, method: str):
        self.method = method


class HostileInt(int):
    """An integer that is equal to all, and is not ordered."""

    __hash__: Any = None

    def __eq__(self, other: object) -> bool:
        return True

    def __lt__(self, other: object) -> bool:
        raise ArithmeticError("hostile")


class HostileText(str):
    """A text that is no text when looked at."""

    def __str__(self) -> str:
        raise ArithmeticError("hostile")

    def __len__(self) -> int:
        return -1


class HostileList(list):
    """A list whose length is a lie, and whose end never comes."""

    def __len__(self) -> int:
        return 1

    def __iter__(self) -> Any:
        return itertools.repeat(1, 10**6)


METHODS = (
    "__repr__", "__eq__", "__hash__", "__len__", "__iter__", "__bool__", "__index__", "__str__",
    "__getitem__", "__array__", "__fspath__", "__float__", "__int__", "__contains__", "keys",
)  # fmt: skip


def _raises(self: Any, *_: Any, **__: Any) -> Any:
    raise ArithmeticError("hostile")


HOSTILES = tuple(type(f"Hostile{m}", (Hostile,), {m: _raises}) for m in METHODS)


def _endless() -> Any:
    """Yields more than any list may have; ends, so that who lists it all is slow and not dead."""
    yield from itertools.repeat(1, 10**6)


def _loop() -> list[Any]:
    found: list[Any] = []
    found.append(found)
    return found


def _deep() -> Any:
    return [_deep_of(3000)]


def _deep_of(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


# Made anew for each case, as some are used up.
MAKERS: tuple[Callable[[], Any], ...] = (
    lambda: (x for x in (1, 2)),
    lambda: (x for x in ()),
    _endless,
    _loop,
    _deep,
    lambda: HostileInt(1),
    lambda: HostileText("a"),
    lambda: HostileList([1]),
    lambda: Fraction(1, 2),
    lambda: Path("."),
    lambda: memoryview(b"abc"),
    lambda: jnp.int32(1),
    lambda: jnp.zeros(2),
    lambda: np.zeros((0, 3)),
    lambda: np.array([None, 1], object),
    lambda: np.zeros(2, "U3"),
    lambda: lambda *_: 1,
    lambda: type("Empty", (), {}),
    lambda: frozenset({1}),
    lambda: dict.fromkeys(range(9)).keys(),
    lambda: iter([1]),
    lambda: {1: {2: {}}},
    lambda: {None: None},
    lambda: Exception("an error"),
    lambda: np.ma.masked,
    lambda: np.zeros(3, [("a", "i4")]),
)


def number(rng: random.Random) -> Any:
    """Returns a number near where types end."""
    value: Any = rng.choice((1, -1)) * 2 ** rng.choice(
        (0, 7, 8, 15, 16, 30, 31, 32, 62, 63, 64, 99)
    )
    value += rng.choice((-1, 0, 1))
    kind = rng.randrange(8)
    if kind == 0:
        return float(value)
    if kind == 1 and -(2**63) <= value < 2**63:
        return np.int64(value)
    if kind == 2:
        return rng.choice((np.float32, np.float64))(float(value))
    return str(value) if kind == 3 else value


def text(rng: random.Random) -> str:
    """Returns a text of characters that few expect."""
    return "".join(chr(rng.choice((rng.randrange(128), rng.randrange(0x11000)))) for _ in range(9))


def atom(rng: random.Random) -> Any:
    """Returns a value that holds no others."""
    kind = rng.randrange(12)
    if kind == 0:
        return number(rng)
    if kind == 1:
        return rng.choice(HOSTILES)("")
    if kind == 2:
        return rng.choice(MAKERS)()
    if kind == 3:
        return text(rng)
    pools: tuple[tuple[Any, ...], ...] = (JUNK, LISTS, BOOLS, FLOATS, HUGE, TEXTS, (None, -1, 0))
    return rng.choice(rng.choice(pools))


def draw(rng: random.Random, depth: int = 0) -> Any:
    """Returns a value: an atom, or a container of such."""
    kind = rng.randrange(12) if depth < 3 else 0
    if kind < 7:
        return atom(rng)
    parts = [draw(rng, depth + 1) for _ in range(rng.choice((1, 1, 2, 3)))]
    if kind == 7:
        return tuple(parts)
    if kind == 8:
        return {rng.choice((text(rng), "prompt", "a", 1, -1, None, 2.5)): part for part in parts}
    if kind == 9:
        return parts * (2 if depth else rng.choice((2, 40, 2000)))
    return (part for part in parts) if kind == 10 else parts
