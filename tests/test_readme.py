"""The README's programs run as they stand."""

from pathlib import Path
import re
import runpy

from small_llm import SIZES


def programs() -> list[str]:
    text = Path(__file__).parents[1].joinpath("README.md").read_text()
    return [b for b in re.findall(r"```python\n(.*?)```", text, re.S) if "import" in b]


def test_the_twenty_lines_of_the_readme_run(tmp_path, capsys):
    program = programs()[0]
    assert len([line for line in program.splitlines() if line.strip()]) <= 20
    path = tmp_path / "readme.py"
    path.write_text(program)
    shown = runpy.run_path(str(path))
    assert len(shown["request"].output_token_ids) == 48 or shown["request"].finish_reason == "stop"
    assert "is out of range, the model's ids are 0 to 4095" in capsys.readouterr().out


def test_the_program_of_the_rules_runs(tmp_path):
    path, sizes = tmp_path / "rules.py", "**SIZES, "
    program = programs()[1].replace("max_num_seqs=16, ", sizes)
    assert sizes in program
    path.write_text(program)
    runpy.run_path(str(path), init_globals=dict(SIZES=SIZES))["llm"].close()
