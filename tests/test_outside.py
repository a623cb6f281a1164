"""What `tests/outside` adds, it adds by public interfaces: no private name, nothing replaced."""

import ast
from pathlib import Path

HERE = Path(__file__).parent
PUBLIC = {"_replace"}  # of named tuples
WORDS = ("monkeypatch", "mock", "setattr", "FAMILIES", "LAYERS", "importlib")


def files() -> list[Path]:
    found = [*HERE.glob("test_outside_*.py"), *(HERE / "outside").glob("*.py")]
    assert len(found) >= 12
    return found


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name not in PUBLIC


def test_no_private_name_is_used():
    found = []
    for path in files():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and is_private(node.attr):
                found.append(f"{path.name}:{node.lineno} .{node.attr}")
            if isinstance(node, ast.ImportFrom):
                names = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
                found += [f"{path.name}:{node.lineno} {n}" for n in names if is_private(n)]
    assert not found


def test_nothing_of_the_package_is_changed():
    found = []
    for path in files():
        text = path.read_text(encoding="utf-8")
        found += [f"{path.name}: {word}" for word in WORDS if word in text]
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Attribute | ast.Subscript) and not isinstance(
                node.ctx, ast.Load
            ):
                found.append(f"{path.name}:{node.lineno}")
    assert not found
