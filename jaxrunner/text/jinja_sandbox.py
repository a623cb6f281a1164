"""Jinja for templates of strangers: no attribute escapes, and bounds on time and size.

What a template computes is bounded where it is computed: loops, calls and operators look at the
clock, and text and lists are measured before they are made. One comparison or hash of a value
that contains itself many times is not bounded. Knows no JAX.
"""

import functools
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

from jaxrunner.text.jinja_guard import (
    CONCAT,
    FILTERS,
    GLOBALS,
    GUARD,
    STEPS,
    Guard,
    measured,
    replaced_size,
    result_size,
    write,
)

MAX_TEMPLATE = 2**17  # characters; those of known models have up to 30,000
# Filters and methods that neither pad, nor wrap, nor repeat, nor draw random numbers.
PLAIN_FILTERS = """abs attr capitalize count d default dictsort e escape first float forceescape
    groupby int items last length list lower map max min reject rejectattr reverse safe select
    selectattr sort striptags title trim truncate unique upper urlencode wordcount""".split()
METHODS = """capitalize casefold copy count endswith find get index isalnum isalpha isascii
    isdecimal isdigit isidentifier islower isnumeric isprintable isspace istitle isupper items join
    keys lower lstrip partition removeprefix removesuffix replace rfind rindex rpartition rsplit
    rstrip split splitlines startswith strip swapcase title upper values""".split()


def render(source: str, variables: dict[str, Any]) -> str:
    """Returns a template's text.

    Raises:
      ValueError: the template is wrong, refuses its variables, or exceeds a limit.
    """
    if len(source) > MAX_TEMPLATE:
        raise ValueError(
            f"chat template has {len(source)} characters, the limit is {MAX_TEMPLATE}: shorten it"
        )
    try:
        template = _compiled(source)
        return "".join(template.generate({**variables, GUARD: Guard()}))
    except jinja2.TemplateSyntaxError as error:
        raise ValueError(f"chat template, line {error.lineno}: {error}: correct it") from error
    # A template is foreign code: whatever it raises is its own request's error.
    except Exception as error:
        raise ValueError(f"chat template failed with {type(error).__name__}: {error}") from error


class Environment(ImmutableSandboxedEnvironment):
    """Jinja as Hugging Face configures it, with a `Guard` in the context of each rendering."""

    intercepted_binops = frozenset("+ - * / // ** %".split())

    def __init__(self):
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols", Generation],
            finalize=write,
        )
        self.filters = {name: self.filters[name] for name in PLAIN_FILTERS} | FILTERS
        del self.globals["lipsum"]
        self.globals |= GLOBALS

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Computes an operator, if the result has a bounded size."""
        context[GUARD].fits(result_size(context[GUARD], operator, left, right))
        return super().call_binop(context, operator, left, right)

    def call(self, context: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
        """Calls a function of the template, a global or a method.

        Raises:
          ValueError: a method is not in the sandbox, its result is too large, or time is over.
        """
        guard, owner = context[GUARD], getattr(function, "__self__", None)
        guard.tick()
        if isinstance(owner, str | bytes | int | float | dict | list | tuple):
            name = function.__name__
            if name not in METHODS:
                raise ValueError(
                    f"chat template calls {name}, which is not in the sandbox: replace it"
                )
            if name == "replace":
                guard.fits(replaced_size(owner, *args[:2]))
            elif name == "join":
                args = (measured(guard, owner, *args),)
        return super().call(context, function, *args, **kwargs)

    def wrap_str_format(self, value: Any) -> None:
        """Refuses `str.format`, whose widths know no limit.

        Raises:
          ValueError: the value is `str.format`, or `str.format_map`.
        """
        if super().wrap_str_format(value) is not None:
            raise ValueError("chat template takes str.format, which is not in the sandbox: use ~")


class Generation(Extension):
    """`{% generation %}` marks what a trainer learns from; here it is its body."""

    def __init__(self, environment: jinja2.Environment):
        super().__init__(environment)
        self.tags = {"generation"}

    def parse(self, parser: Any) -> nodes.Node:
        """Returns the body, with a scope of its own."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


@functools.cache
def _environment() -> Environment:
    return Environment()


@functools.lru_cache(maxsize=16)
def _compiled(source: str) -> jinja2.Template:
    """Returns a template whose loops, text and `~` go through the guard."""
    environment = _environment()
    tree = environment.parse(source)
    for node in list(tree.find_all((nodes.For, nodes.Output, nodes.Concat))):
        if isinstance(node, nodes.For):
            node.iter = _filtered(node.iter, STEPS)
        elif isinstance(node, nodes.Output):
            # A constant is written through `finalize`, data of the template is not.
            node.nodes = [
                nodes.Const(n.data, lineno=n.lineno) if isinstance(n, nodes.TemplateData) else n
                for n in node.nodes
            ]
        else:
            node.nodes = [_filtered(nodes.List(node.nodes, lineno=node.lineno), CONCAT)]
    tree.set_environment(environment)
    return jinja2.Template.from_code(
        environment, environment.compile(tree), environment.make_globals(None)
    )


def _filtered(node: Any, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)
