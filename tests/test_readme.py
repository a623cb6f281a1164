"""The programs of README.md and docs/sampling.md run as they stand."""

import ast
from collections import defaultdict
from pathlib import Path
import re
import runpy

import jax

from tests.support.small_llm import SIZES

ROOT = Path(__file__).parents[1]


def program(page: str) -> str:
    """Returns the one program of a page: the Python that imports something."""
    text = ROOT.joinpath(page).read_text(encoding="utf-8")
    (found,) = [b for b in re.findall(r"```python\n(.*?)```", text, re.S) if "import" in b]
    return found


def test_the_readme_is_short():
    assert len(ROOT.joinpath("README.md").read_text(encoding="utf-8").splitlines()) <= 150


def test_the_twenty_lines_of_the_readme_run(tmp_path, capsys):
    text = program("README.md")
    assert len([line for line in text.splitlines() if line.strip()]) <= 20
    path = tmp_path / "readme.py"
    path.write_text(text)
    names = runpy.run_path(str(path))
    last, request, printed = names["output"].outputs[0], names["request"], capsys.readouterr().out
    for ids, reason in (
        (last.token_ids, last.finish_reason),
        (request.output_token_ids, request.finish_reason),
    ):
        assert (len(ids), reason) == (48, "length") or (len(ids) < 48 and reason == "stop")
    streamed = defaultdict(str)
    for name, delta in re.findall(r"^(\d+) (['\"].*)$", printed, re.MULTILINE):
        streamed[name] += ast.literal_eval(delta)
    assert len(streamed) == 2
    if jax.default_backend() == "cpu":  # bfloat16 on a GPU may tell other tokens in other batches
        assert last.token_ids == request.output_token_ids
        assert all(text in printed for text in streamed.values())
    assert "is out of range, the model's ids are 0 to 4095" in printed


def test_the_program_of_the_rules_runs(tmp_path):
    path, sizes = tmp_path / "rules.py", "**SIZES, "
    text = program("docs/sampling.md").replace("max_num_seqs=16, ", sizes)
    assert sizes in text
    path.write_text(text)
    runpy.run_path(str(path), init_globals=dict(SIZES=SIZES))["llm"].close()
