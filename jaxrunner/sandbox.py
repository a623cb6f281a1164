"""Jinja for templates of strangers: no attribute escapes, and bounds on time and size.

What a template computes is bounded where it is computed: loops, calls and operators look at the
clock, and text and lists are measured before they are made. Knows no JAX.
"""

from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
import functools
import itertools
import json
import time
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_TEMPLATE = 2**18  # characters; those of known models have up to 30,000
MAX_SIZE = 2**24  # characters written in a rendering, or of one value
MAX_NUMBER = 10**5  # iterations of a range, widths, indentations
MAX_SECONDS = 5.0
GUARD = "the guard"  # a key of the context that no template can spell

# Filters that neither pad, nor wrap, nor repeat, nor draw random numbers.
FILTERS = """abs attr capitalize count d default dictsort e escape first float forceescape
    groupby int items last length list lower map max min reject rejectattr reverse round safe
    select selectattr sort string striptags sum title trim unique upper urlencode
    wordcount""".split()
METHODS = """capitalize casefold count encode endswith find index isalnum isalpha isascii isdecimal
    isdigit isidentifier islower isnumeric isprintable isspace istitle isupper join lower lstrip
    partition removeprefix removesuffix replace rfind rindex rpartition rsplit rstrip split
    splitlines startswith strip swapcase title upper""".split()


def render(source: str, variables: dict[str, Any]) -> str:
    """Returns a template's text.

    Raises:
      ValueError: the template is wrong, refuses its variables, or exceeds a limit.
    """
    if len(source) > MAX_TEMPLATE:
        raise ValueError(
            f"chat template has {len(source)} characters, the limit is {MAX_TEMPLATE}: shorten it"
        )
    guard = Guard()
    try:
        return "".join(_compiled(source).generate({**variables, GUARD: guard}))
    except jinja2.TemplateSyntaxError as error:
        raise ValueError(f"chat template, line {error.lineno}: {error}: correct it") from error
    # A template is foreign code: whatever it raises is its own request's error.
    except Exception as error:
        raise ValueError(f"chat template failed with {type(error).__name__}: {error}") from error


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
        """Returns about how many characters a value takes, its parts each time they occur."""
        total, left = 0, [value]
        while left:
            item = left.pop()
            if isinstance(item, dict):
                left += itertools.chain(item.keys(), item.values())
            elif isinstance(item, list | tuple | set | frozenset):
                left += item
            total += len(item) if isinstance(item, str | bytes) else 4
            self.fits(total + len(left))
        return total


class Environment(ImmutableSandboxedEnvironment):
    """Jinja as Hugging Face configures it, with a `Guard` in the context of each rendering."""

    intercepted_binops = frozenset("+ - * / // ** %".split())

    def __init__(self):
        # The optimizer would compute constant expressions before any guard runs.
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,
            extensions=["jinja2.ext.loopcontrols", Generation],
            finalize=jinja2.pass_context(lambda context, value: context[GUARD].write(value)),
        )
        self.filters = {name: self.filters[name] for name in FILTERS}
        self.filters |= {"tojson": _tojson, "replace": _replace, "join": _join, "indent": _indent}
        self.filters |= {_STEPS: _steps, _CONCAT: _concat, "string": _string}
        del self.globals["lipsum"]
        self.globals |= {"range": _range, "strftime_now": _now, "raise_exception": _refuse}

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Computes an operator, if the result has a bounded size."""
        context[GUARD].fits(_result_size(operator, left, right))
        return super().call_binop(context, operator, left, right)

    def call(self, context: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
        """Calls a function of the template, a global or a method."""
        guard, owner = context[GUARD], getattr(function, "__self__", None)
        guard.tick()
        if isinstance(owner, str):
            name = function.__name__
            if name not in METHODS:
                raise ValueError(f"chat template calls str.{name}, which may pad: use another")
            if name == "replace":
                guard.fits(_replaced_size(owner, *args[:2]))
            if name == "join":
                args = (_joined(guard, owner, *args),)
        return super().call(context, function, *args, **kwargs)


class Generation(Extension):
    """`{% generation %}` marks what a trainer learns from; here it is its body."""

    tags: set[str] = {"generation"}  # noqa

    def parse(self, parser: Any) -> Any:
        """Returns the nodes of the body."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)
