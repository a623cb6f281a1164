"""docs/speculative_decoding.md is true: its program runs, its tables are those of the code."""

import ast
from dataclasses import MISSING, fields
from pathlib import Path
import re
import runpy
from typing import Any

import pytest

from jaxrunner.api.speculative_config import METHODS, REJECTIONS, SpeculativeConfig
from tests.support.small_llm import SIZES

PAGE = Path(__file__).parents[1] / "docs" / "speculative_decoding.md"
TEXT = PAGE.read_text(encoding="utf-8")


def rows(heading: str) -> list[list[str]]:
    """Returns the cells of the first table behind a heading, without its head."""
    section = re.split(r"^## ", TEXT.split(f"## {heading}\n")[1], flags=re.M)[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def spans(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def config(**given: Any) -> SpeculativeConfig:
    """Returns a config with these fields, and what they make necessary."""
    needed: dict[str, Any] = dict(method="eagle3", num_speculative_tokens=3)
    if (given.get("method") or "eagle3") in ("draft_model", "eagle", "eagle3"):
        needed["model"] = "head"
    if given.get("rejection_sample_method") == "synthetic":
        needed["synthetic_acceptance_length"] = 2.0
    return SpeculativeConfig(**needed | given)


def test_the_page_lists_what_is_refused_and_nothing_else():
    ((cell, _),) = rows("What is refused")
    first, *others = [span.split("=") for span in spans(cell)]
    assert first == ["draft_sample_method", '"probabilistic"']
    refused = [ast.literal_eval(value) for name, value in others]
    assert {name for name, _ in others} == {"rejection_sample_method"}
    for rejection in REJECTIONS:
        given = dict(draft_sample_method="probabilistic", rejection_sample_method=rejection)
        if rejection in refused:
            with pytest.raises(ValueError, match="'probabilistic' needs rejection_sample_method="):
                config(**given)
        else:
            assert config(**given).drafts == "probabilistic"


def test_methods_and_rejections_are_those_of_the_page():
    names = [spans(cell)[0] for cell, *_ in rows("Methods")]
    told = {ast.literal_eval(name) for name in names if name not in ("Speculator", "Drafter")}
    assert told == {*METHODS}
    told = [ast.literal_eval(spans(cell)[0]) for cell, *_ in rows("Which drafts are accepted")[:4]]
    assert tuple(told) == REJECTIONS


def test_keys_and_defaults_are_those_of_the_page():
    told = {name: default for cell, default, _ in rows("Keys of `speculative_config`")
            for name in spans(cell)}  # fmt: skip
    assert {*told} == {field.name for field in fields(SpeculativeConfig)}
    for field in fields(SpeculativeConfig):
        default = told[field.name]
        if default == "required":
            needed = {"method": {}, "num_speculative_tokens": dict(method="ngram")}[field.name]
            with pytest.raises(ValueError, match=f"speculative_config.{field.name}"):
                SpeculativeConfig.read(needed)
        else:
            assert field.default is not MISSING
            want = None if default == "none" else ast.literal_eval(spans(default)[0])
            assert field.default == want


@pytest.mark.slow
def test_the_program_of_the_page_runs(tmp_path, capsys):
    (text,) = re.findall(r"```python\n(.*?)```", TEXT, re.S)
    path = tmp_path / "drafts.py"
    small = text.replace("max_num_seqs=16", "**SIZES")
    assert small != text
    path.write_text(small)
    metrics = runpy.run_path(str(path), init_globals=dict(SIZES=SIZES))["output"].metrics
    counts = (metrics.num_drafts, *metrics.num_accepted_tokens_per_pos)
    assert len(counts) == 4 and counts[0] > 0 and sorted(counts, reverse=True) == [*counts]
    shown = capsys.readouterr().out
    assert "drafts: 3 by eagle3, " in shown and f"{counts[1:]} accepted" in shown
