"""The folders at the top are parts of the package, once and under one name."""

import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LINKED = ["models", "kernels_pallas"]


@pytest.mark.parametrize("name", LINKED)
def test_the_package_links_to_the_folder_at_the_top(name):
    link = ROOT / "jaxrunner" / name
    assert link.is_symlink(), f"jaxrunner/{name} must be a link: ln -s ../{name} jaxrunner/{name}"
    assert link.readlink() == Path("..", name)  # relative, so that it survives a move
    assert not (ROOT / name).is_symlink()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("models", "import jaxrunner.models, not models"),
        ("kernels_pallas", "import jaxrunner.kernels_pallas, not kernels_pallas"),
    ],
)
def test_a_module_has_one_name(name, words):
    with pytest.raises(ImportError, match=words):
        importlib.import_module(name)
    assert importlib.import_module(f"jaxrunner.{name}").__name__ == f"jaxrunner.{name}"


def test_every_folder_with_modules_is_a_package():
    folders = {path.parent for top in ["jaxrunner", *LINKED] for path in (ROOT / top).rglob("*.py")}
    assert not [folder for folder in folders if not (folder / "__init__.py").is_file()]
