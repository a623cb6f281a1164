"""The README's program runs as it stands."""

from pathlib import Path
import re
import runpy


def test_the_twenty_lines_of_the_readme_run(tmp_path, capsys):
    text = Path(__file__).parents[1].joinpath("README.md").read_text()
    (program,) = (b for b in re.findall(r"```python\n(.*?)```", text, re.S) if "import" in b)
    assert len([line for line in program.splitlines() if line.strip()]) <= 20
    path = tmp_path / "readme.py"
    path.write_text(program)
    shown = runpy.run_path(str(path))
    assert len(shown["request"].output_token_ids) == 48 or shown["request"].finish_reason == "stop"
    assert "is out of range, the model's ids are 0 to 4095" in capsys.readouterr().out
