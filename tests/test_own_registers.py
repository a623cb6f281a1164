"""Where libnvJitLink lies, by which JAX 0.12 gives all warpgroups as many registers."""

import ctypes
import importlib.machinery
import importlib.util
from pathlib import Path

import pytest

from jaxrunner.kernels_pallas import registers

NAME = "libnvJitLink.so.13"


def lie_in(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets Python's packages of NVIDIA be those of a folder, and the system have no library."""
    spec = importlib.machinery.ModuleSpec("nvidia", None, is_package=True)
    spec.submodule_search_locations = [str(folder)]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    monkeypatch.setattr(ctypes, "CDLL", missing)


def missing(name: str) -> None:
    raise OSError(f"{name}: cannot open shared object file")


@pytest.mark.parametrize(
    ("file", "found"),
    [(f"cu13/lib/{NAME}", True), (f"cu13/lib/{NAME}.old", False), (f"cu13/{NAME}", False)],
)
def test_a_package_has_the_library(
    file: str, found: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    lie_in(tmp_path, monkeypatch)
    (tmp_path / file).parent.mkdir(parents=True)
    (tmp_path / file).touch()
    assert registers.finds_nvjitlink() is found


def test_the_system_has_the_library(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(ctypes, "CDLL", missing)
    assert not registers.finds_nvjitlink()
    monkeypatch.setattr(ctypes, "CDLL", lambda name: object() if name == NAME else missing(name))
    assert registers.finds_nvjitlink()
