"""The pages that say how to add a part run as they stand, in a folder."""

import importlib
import re
import runpy
import sys

import pytest

from jaxrunner.hf_config import Settings
from jaxrunner.models import registry
from jaxrunner.models.llama import llama
from tests.support import tiny
from tests.support.lowering import lowers
from tests.support.pages import write


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty folder to run a page in. What its files register and import goes with it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(registry, "FAMILIES", dict(registry.FAMILIES))
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    known = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - known:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", None)):
            del sys.modules[name]
    importlib.invalidate_caches()


def run(name: str) -> dict:
    return runpy.run_path(name, run_name="__main__")


@pytest.mark.slow
def test_a_family_that_reads_a_config_is_that_of_transformers(folder):
    pytest.importorskip("torch", reason="the reference needs PyTorch: install the hf extra")
    pytest.importorskip("transformers", reason="the reference needs transformers")
    write("add_a_model.md", folder)
    run("check_seed_oss.py")


def test_a_family_of_a_described_layer_is_that_of_transformers(folder):
    pytest.importorskip("torch", reason="the reference needs PyTorch: install the hf extra")
    pytest.importorskip("transformers", reason="the reference needs transformers")
    write("add_a_model.md", folder)
    run("check_stablelm.py")


def test_a_family_of_its_own_layers_is_that_of_numpy(folder):
    write("add_a_model.md", folder)
    run("check_parallel.py")


def test_a_family_of_the_user_is_found_and_takes_no_name_of_another(folder):
    mine = llama._replace(read=lambda settings: llama.read(settings))
    for _ in range(2):  # the same one again is no other
        registry.register_model("MineForCausalLM", mine)
    settings = Settings(tiny.SETTINGS | dict(architectures=["MineForCausalLM"]))
    assert registry.read_model(settings)[0] is mine
    with pytest.raises(ValueError, match="'LlamaForCausalLM' is served by another model"):
        registry.register_model("LlamaForCausalLM", mine)
    assert registry.FAMILIES["LlamaForCausalLM"] is llama


def test_a_rule_equals_its_oracle_and_changes_no_other_request(folder, capsys):
    write("add_a_sampling_rule.md", folder)
    run("check_rule.py")
    shown = capsys.readouterr().out
    assert "n_sigma must be at least 0, got -1.0" in shown
    usual, off, cut = map(float, re.findall(r"\d\.\d+", shown.splitlines()[0]))
    assert usual == off > cut > 0


@pytest.mark.slow
def test_a_speculator_equals_its_oracle_and_changes_no_token(folder, capsys):
    write("add_a_speculator.md", folder)
    run("check_lookup.py")
    lengths = [float(x) for x in re.findall(r"(\d\.\d+) tokens a step", capsys.readouterr().out)]
    assert len(lengths) == 3 and max(lengths) > 1.5


@pytest.mark.slow
def test_a_drafter_that_is_fitted_to_a_text_drafts_some_tokens_right(folder, capsys):
    write("add_a_speculator.md", folder)
    run("check_one_product.py")
    shown = re.findall(
        r"(\d+) steps, accepted by position: \[(\d+), (\d+)\]", capsys.readouterr().out
    )
    assert len(shown) == 2
    for steps, first, both in (map(int, numbers) for numbers in shown):
        assert steps > first > both > 0


def test_the_specification_of_a_kernel_equals_its_oracle(folder):
    write("add_a_kernel.md", folder)
    run("check_reference.py")


@lowers
def test_a_kernel_runs_in_an_engine_and_is_told(folder, capsys):
    write("add_a_kernel.md", folder)
    run("check_kernel.py")
    assert "add_norm: row_norm {}" in capsys.readouterr().out.splitlines()
