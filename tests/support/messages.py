"""Messages of errors, as the sources raise them and as the tests expect them."""

import ast
from collections import Counter
from collections.abc import Iterable, Iterator
import itertools
import re

OWN, LONG = 16, 28  # letters that tell a message: where no other has them, and in any case


def fragments(node: ast.Raise) -> list[str]:
    """Returns the literal parts of the message that `raise` builds; none if it builds none."""
    if not isinstance(node.exc, ast.Call):
        return []
    inserted = {
        id(part)
        for text in ast.walk(node.exc)
        if isinstance(text, ast.FormattedValue)
        for part in ast.walk(text)
    }
    strings = [n for n in ast.walk(node.exc) if isinstance(n, ast.Constant)]
    values = [n.value for n in strings if isinstance(n.value, str) and id(n) not in inserted]
    return [value.strip() for value in values if value.strip()]


def unmatched(messages: Iterable[list[str]], expected: Iterable[str]) -> Iterator[bool]:
    """Yields of each message, in its literal parts, whether no test expects it.

    A test expects parts in a row, a long piece, or a piece that no other message has.
    """
    messages, said = list(messages), "\n".join(expected)
    shared = Counter(run for m in {tuple(m) for m in messages} for run in runs(m, OWN))
    for parts in messages:
        pairs = [pair for pair in itertools.pairwise(parts) if sum(map(len, pair)) > OWN]
        in_a_row = [".*".join(map(re.escape, some)) for some in (parts, *pairs)]
        own = (run for run in runs(parts, OWN) if shared[run] == 1)
        told = any(run in said for run in (*own, *runs(parts, LONG)))
        yield bool(parts) and not told and not any(re.search(some, said) for some in in_a_row)


def runs(parts: Iterable[str], size: int) -> set[str]:
    """Returns the pieces of `size` letters and several words."""
    found = {part[i : i + size] for part in parts for i in range(len(part) - size + 1)}
    return {run for run in found if " " in run.strip()}


def expected(test: ast.AST) -> Iterator[str]:
    """Yields the strings that a test compares with, free of the escapes of `re`.

    They stand in a `match=` or an `assert`, or where the names come from that stand there: in a
    table, a loop, a parametrisation or the argument of a function.
    """
    sources, found, names = dict[str, list[ast.AST]](), list[ast.AST](), set[str]()
    for name, node in named(test):
        sources.setdefault(name, []).append(node)
    for node in ast.walk(test):
        if isinstance(node, ast.Assert):
            found.append(node.test)
        elif isinstance(node, ast.keyword) and node.arg == "match":
            found.append(node.value)
    for node in found:  # grows
        for part in ast.walk(node):
            if isinstance(part, ast.Constant) and isinstance(part.value, str):
                yield re.sub(r"\\(\W)", r"\1", part.value).replace("\n", " ")
            elif isinstance(part, ast.Name) and part.id not in names:
                names.add(part.id)
                found += sources.get(part.id, ())


def named(test: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """Yields names and where their values come from."""
    arguments = {
        node.name: [arg.arg for arg in (*node.args.args, *node.args.kwonlyargs)]
        for node in ast.walk(test)
        if isinstance(node, ast.FunctionDef)
    }
    for node in ast.walk(test):
        if isinstance(node, ast.Assign):
            yield from itertools.product(of_targets(node.targets), [node.value])
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            yield from itertools.product(of_targets([node.target]), [node.value])
        elif isinstance(node, ast.For | ast.comprehension):
            yield from itertools.product(of_targets([node.target]), [node.iter])
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            for name in arguments.get(node.func.id, ()):
                yield from ((name, arg) for arg in node.args)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("parametrize"):
            for name in re.findall(r"\w+", ast.unparse(node.args[0])):
                yield name, node.args[1]


def of_targets(targets: Iterable[ast.AST]) -> list[str]:
    return [part.id for t in targets for part in ast.walk(t) if isinstance(part, ast.Name)]
