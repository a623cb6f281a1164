"""The docs name tests, pages, modules and parameters that exist, and all parameters there are."""

from collections.abc import Callable
from dataclasses import fields
import inspect
from pathlib import Path
import re
from typing import Any

import pytest

from jaxrunner import LLM, SamplingParams
from jaxrunner.config import EngineConfig
from jaxrunner.loading import llm_arguments
from jaxrunner.models.registry import FAMILIES
from jaxrunner.worker.sizing import plan_engine
from jaxrunner.worker.worker import Worker
from tests.support.sources import LAYERS

TESTS = Path(__file__).parent
ROOT = TESTS.parent
PAGES = sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob("docs/*.md"))
CODE = ("jaxrunner", "models", "kernels_pallas", "benchmarks", "tests")
# What is set below `LLM`, and why a user of it sets no such thing.
INTERNAL = dict(
    model="positional, so in the heading of the table",
    loaded="the files that a worker has read",
    rank="a `Worker` of one stage, for a scheduler of one's own",
    devices="`tensor_parallel_size` and its like choose them",
    beside="the devices of replicas beside, which `data_parallel_size` makes",
    rules="`logits_fn` adds one",
    kv_dtype="`kv_cache_dtype`, in JAX's name",
)


def read(page: str) -> str:
    return ROOT.joinpath(page).read_text(encoding="utf-8")


def test_tests_that_docs_name_are_there():
    named, missing = 0, []
    for cell in re.findall(r"`(test_\w+\.py[^|\n]*)\|", read("docs/model_runner.md")):
        files = re.findall(r"(test_\w+\.py|::\w+)", cell)
        source = ""
        for name in files:
            if name.startswith("test_"):
                source = (TESTS / name).read_text(encoding="utf-8")
            elif f"def {name[2:]}(" not in source:
                missing.append(name)
            named += 1
    assert not missing and named > 60


@pytest.mark.parametrize("page", ["README.md", *PAGES])
def test_links_lead_to_files(page):
    links = [link for link in re.findall(r"\]\(([^)#\s]+)", read(page)) if "://" not in link]
    assert not [link for link in links if not (ROOT / page).parent.joinpath(link).is_file()]
    assert links or page != "README.md"


def test_the_readme_leads_to_every_page():
    assert not [page for page in PAGES if f"]({page})" not in read("README.md")]


def test_modules_that_the_changelog_moves_are_there():
    (table,) = re.findall(r"\| before, in `jaxrunner` .*?\n\n", read("CHANGELOG.md"), re.S)
    moved = []
    for line in table.strip().splitlines()[2:]:
        before, after = (re.findall("`(.+?)`", cell) for cell in line.strip("| ").split(" | "))
        moved += [after[0] + name * after[0].endswith(".") for name in before]
    files = [ROOT / f"jaxrunner/{name.replace('.', '/')}" for name in moved]
    assert not [f for f in files if not f.with_suffix(".py").is_file() and not f.is_dir()]
    assert len(files) > 80


def test_the_picture_of_the_folders_has_the_order_of_imports():
    """Lowest first, as `test_style.py` holds it. Modules below their folder need not be shown."""
    picture = read("docs/architecture.md").split("```text\n")[1].split("```")[0]
    shown = []
    for line in picture.splitlines():
        first, *_ = names = re.split(" {3,}", line)[0].split()
        shown += [first[:-1]] if first.endswith("/") else names
    assert shown == [name for name in LAYERS if name in shown]
    assert {name for name in LAYERS if "." not in name} - {"__init__"} <= {*shown}


def test_modules_apart_from_their_folder_are_listed_with_their_places():
    _, section = read("docs/architecture.md").split("### Modules apart from their folder\n")
    rows = re.findall(r"^\| (`[^|]*) \| `(\w+)` \| .", section.split("\n## ")[0], re.M)
    told = [(path, place) for cell, place in rows for path in re.findall(r"`(\S+)\.py`", cell)]
    apart, place = [], ""
    for name in LAYERS:
        if "." in name:
            apart.append((name.replace(".", "/"), place))
        else:
            place = name
    assert told and sorted(told) == sorted(apart)


@pytest.mark.parametrize("page", ["README.md", *PAGES])
def test_modules_that_docs_name_are_there(page):
    paths = [f"/{path.relative_to(ROOT).as_posix()}" for top in CODE for path in python(top)]
    spans = re.findall(r"`([^`\n]+)`", read(page))
    names = [word for span in spans for word in span.split() if word.endswith(".py")]
    assert not [name for name in names if not any(path.endswith(f"/{name}") for path in paths)]
    assert names or page not in ("README.md", "docs/architecture.md")


def python(folder: str) -> list[Path]:
    return list((ROOT / folder).rglob("*.py"))


def test_the_tables_of_parameters_are_those_of_the_code():
    settings = {*llm_arguments.LLM, *keywords(LLM.__init__)}
    assert parameters("LLM(model, ...)") == settings - {"model"}
    assert parameters("SamplingParams(...)") == {field.name for field in fields(SamplingParams)}


def test_what_an_engine_is_told_is_a_parameter_or_internal():
    told = {*keywords(Worker.__init__), *keywords(plan_engine)}
    told |= {field.name for field in fields(EngineConfig)}
    assert told - parameters("LLM(model, ...)") == {*INTERNAL}


@pytest.mark.parametrize("name", sorted(INTERNAL.keys() - {"model"}))
def test_internal_settings_are_refused_by_name(name):
    given: dict[str, Any] = {name: None}
    with pytest.raises(TypeError, match=f"LLM has no argument '{name}'"):
        LLM("there is none", **given)


def parameters(heading: str) -> set[str]:
    """Returns the names in the first column of a table of the page."""
    _, section = read("docs/parameters.md").split(f"## `{heading}`\n")
    cells = re.findall(r"^\| (`[^|]*) \|", section.split("\n## ")[0], re.M)
    return {name for cell in cells for name in re.findall(r"`(\w+)`", cell)}


def keywords(function: Callable) -> list[str]:
    """Returns the parameters that a function has by name."""
    known = inspect.signature(function).parameters.values()
    return [p.name for p in known if p.kind is not p.VAR_KEYWORD and p.name != "self"]


REGISTERED = dict(FAMILIES)  # while tests are collected, before some register others


def test_every_family_has_a_row():
    """Decoders in the one page, encoders in the other; a row's names may end alike."""
    rows = re.findall(r"^\| (`\w+`[^|]*) \|", read("docs/models.md"), re.M)
    named = " ".join(rows)
    assert "and both `...ForConditionalGeneration`" in named
    decoders = [name for name, model in REGISTERED.items() if model.samples]
    both = {f"{name.removesuffix('ForCausalLM')}ForConditionalGeneration" for name in decoders}
    missing = [n for n in decoders if f"`{n}`" not in named and n not in both]
    assert not missing and len(rows) > 35
    encoders = read("docs/pooling_models.md")
    stems = [n.removesuffix("Model") for n, m in REGISTERED.items() if not m.samples]
    assert all(f"`{stem}`" in encoders or f"`{stem}Model`" in encoders for stem in stems)


def test_the_readme_leads_to_the_tables_of_formats_and_of_architectures():
    readme = read("README.md")
    for page, head in (
        ("models.md", "| architecture |"),
        ("pooling_models.md", "| architecture |"),
        ("quantized_weights.md", "|---|"),
    ):
        assert f"](docs/{page})" in readme and head in read(f"docs/{page}")
