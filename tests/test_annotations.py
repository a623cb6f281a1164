"""Types are written down everywhere, and no checker of them looks away."""

import ast
from collections.abc import Iterator
import tomllib

from tests.support.sources import ROOT, nodes, package

ALLOWED = {"reportMissingImports"}  # PyTorch and transformers may not be there
SKIPS = {"ignore", "extend-ignore", "per-file-ignores", "extend-per-file-ignores", "exclude"}


def unannotated(function: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[str]:
    """Yields the parameters without a type; `self` and `cls` need none."""
    a = function.args
    rest = [arg for arg in (a.vararg, a.kwarg) if arg is not None]
    for arg in (*a.posonlyargs, *a.args, *a.kwonlyargs, *rest):
        if arg.annotation is None and arg.arg not in ("self", "cls"):
            yield arg.arg


def test_every_parameter_has_a_type():
    """Those of nested functions too, such as loop bodies; lambdas have no place for one."""
    assert not [
        f"{place} {node.name}: {name}"
        for place, node in nodes(package(), ast.FunctionDef, ast.AsyncFunctionDef)
        for name in unannotated(node)
    ]


def test_checkers_skip_no_file_and_no_rule():
    """Nor is one silenced in a line: `test_style` sees to that."""
    tools = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]
    reports = {name for name in tools["pyright"] if name.startswith("report")}
    assert reports <= ALLOWED and not SKIPS & set(tools["pyright"])
    assert not SKIPS & (set(tools["ruff"]) | set(tools["ruff"]["lint"]))
    folders = set(tools["pyright"]["include"])
    assert folders == {"jaxrunner", "jaxrunner/models", "jaxrunner/kernels_pallas", "tests"}
