"""The limits of strangers' templates: time, text, and the filters that could take more.

Sizes are checked before a value is made. Knows no JAX.
"""

from collections.abc import ItemsView, Iterable, Iterator, KeysView, Mapping, Set, ValuesView
from datetime import datetime
import itertools
import json
import re
import time
from typing import Any

import jinja2
from jinja2 import pass_context
from jinja2.filters import do_indent
from jinja2.utils import Namespace

MAX_SIZE = 2**24  # characters written in a rendering, or of one value
MAX_NUMBER = 10**5  # iterations of a range, widths, indentations
MAX_INDENT = 100
MAX_SECONDS = 5.0
GUARD = "the guard"  # a key of the context that no template can spell
SIZED = (str, bytes, list, tuple)
WIDTH = re.compile(r"%(\([^)]*\))?[^%a-zA-Z(]*[\d*]")


class Guard:
    """The clock and the sizes of one rendering."""

    def __init__(self):
        self._end = time.monotonic() + MAX_SECONDS
        self._written = 0

    def tick(self) -> None:
        """Raises once the time is over."""
        if time.monotonic() > self._end:
            raise ValueError(f"rendering takes longer than {MAX_SECONDS} s: simplify the template")

    def write(self, value: Any) -> Any:
        """Counts a value that becomes output, also where that is captured."""
        self._written += self.size(value)
        self.fits(self._written)
        return value

    def fits(self, size: int) -> None:
        """Raises if a value would have more than `MAX_SIZE` characters or items."""
        self.tick()
        if size > MAX_SIZE:
            raise ValueError(
                f"rendering makes a value of {size} characters or items, "
                f"the limit is {MAX_SIZE}: simplify the template"
            )

    def size(self, value: Any) -> int:
        """Returns about how many characters a value takes, its parts each time they occur.

        Raises:
          ValueError: the value is too large, or holds a namespace.
        """
        total, left = 0, [value]
        while left:
            item = left.pop()
            if isinstance(item, Mapping):
                left += itertools.chain(item.keys(), item.values())
            elif isinstance(item, list | tuple | Set | KeysView | ItemsView | ValuesView):
                left += list(item)
            elif isinstance(item, Namespace):
                raise ValueError("chat template writes out a namespace: write its fields")
            total += len(item) if isinstance(item, str | bytes) else 4
            self.fits(total + len(left))
        return total


@pass_context
def write(context: Any, value: Any) -> Any:
    """Counts what a template writes."""
    return context[GUARD].write(value)


@pass_context
def _steps(context: Any, values: Iterable[Any]) -> Iterator[Any]:
    """Yields what a loop runs over, one look at the clock each."""
    for value in values:
        context[GUARD].tick()
        yield value


@pass_context
def _concat(context: Any, values: list[Any]) -> str:
    """Joins the operands of `~`."""
    context[GUARD].size(values)
    return "".join(map(str, values))


@pass_context
def _string(context: Any, value: Any) -> str:
    context[GUARD].size(value)
    return str(value)


@pass_context
def _tojson(
    context: Any,
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    """Writes JSON, which is no HTML: `<` stays as it is."""
    if isinstance(indent, str) or (indent or 0) > MAX_INDENT:
        raise ValueError(f"tojson has indent={indent!r}, the limit is {MAX_INDENT}: lower it")
    context[GUARD].size(value)
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


@pass_context
def _replace(context: Any, text: Any, old: Any, new: Any, count: int = -1) -> str:
    text, old, new = (_string(context, value) for value in (text, old, new))
    context[GUARD].fits(replaced_size(text, old, new))
    return text.replace(old, new, -1 if count is None else count)


@pass_context
def _join(context: Any, values: Any, d: str = "", attribute: Any = None) -> str:
    if attribute is not None:
        values = context.environment.call_filter(
            "map", values, kwargs={"attribute": attribute}, context=context
        )
    return d.join(measured(context[GUARD], d, [str(v) for v in _sized(context[GUARD], values)]))


@pass_context
def _indent(
    context: Any, text: Any, width: int | str = 4, first: bool = False, blank: bool = False
) -> str:
    pad = len(width) if isinstance(width, str) else width
    context[GUARD].fits((text.count("\n") + 1) * pad + len(text))
    return do_indent(text, width, first, blank)


@pass_context
def _format(context: Any, text: str, *args: Any, **kwargs: Any) -> str:
    return context.environment.call_binop(context, "%", text, kwargs or args)


def _range(*bounds: int) -> range:
    values = range(*bounds)
    if len(values) > MAX_NUMBER:
        raise ValueError(f"range has {len(values)} numbers, the limit is {MAX_NUMBER}: shorten it")
    return values


def _now(pattern: str) -> str:
    """Returns the local time."""
    return datetime.now().strftime(pattern[:MAX_INDENT])


def _refuse(message: Any) -> None:
    raise jinja2.TemplateError(str(message))


def _dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    """Stands for the class, whose methods change what they are called with."""
    return dict(*args, **kwargs)


def _sized(guard: Guard, values: Iterable[Any]) -> list[Any]:
    values = list(values)
    guard.size(values)
    return values


def measured(guard: Guard, separator: Any, values: Iterable[Any]) -> list[Any]:
    """Returns what is to be joined, if the result has a bounded size."""
    values = _sized(guard, values)
    guard.fits(guard.size(values) + len(separator) * len(values))
    return values


def replaced_size(text: Any, old: Any = "", new: Any = "") -> int:
    """Returns a bound of the size of `text.replace(old, new)`."""
    return len(text) + (text.count(old) if old else len(text) + 1) * len(new)


def result_size(guard: Guard, operator: str, left: Any, right: Any) -> int:
    """Returns a bound of the size of `left operator right`; of integers, in digits or more.

    Raises:
      ValueError: `%` formats to a width.
    """
    sizes = [len(v) if isinstance(v, SIZED) else None for v in (left, right)]
    if operator == "%" and isinstance(left, str | bytes):
        if WIDTH.search(left if isinstance(left, str) else left.decode("latin-1")):
            raise ValueError(
                "chat template formats to a width, which is not in the sandbox: leave it out"
            )
        return len(left) * (1 + guard.size(right))
    if operator == "*" and sizes != [None, None]:
        times = [v if size is None else size for v, size in zip((left, right), sizes, strict=True)]
        return max(times[0], 0) * max(times[1], 0)
    if isinstance(left, int) and isinstance(right, int):
        bits = [left.bit_length(), right.bit_length()]
        return bits[0] * max(right, 0) if operator == "**" else sum(bits)
    return sum(size or 0 for size in sizes)


# Names that no template can spell.
STEPS, CONCAT = "the steps", "the concatenation"
FILTERS = {
    STEPS: _steps, CONCAT: _concat, "string": _string, "tojson": _tojson, "replace": _replace,
    "join": _join, "indent": _indent, "format": _format,
}  # fmt: skip
GLOBALS = {"range": _range, "strftime_now": _now, "raise_exception": _refuse, "dict": _dict}
