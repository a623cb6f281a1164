"""Pages of the docs whose blocks of code are files."""

from pathlib import Path
import re

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"```(\w+)\n(.*?)```", re.S)


def files(page: str) -> dict[str, str]:
    """Returns the files of a page, by the names in their first lines."""
    text = ROOT.joinpath("docs", page).read_text(encoding="utf-8")
    blocks = [code for kind, code in BLOCK.findall(text) if kind == "python"]
    named = {re.match(r"# (\w+\.py)\b", code): code for code in blocks}
    assert blocks and None not in named, "a block of Python begins with the name of its file"
    return {name[1]: code for name, code in named.items() if name is not None}


def write(page: str, folder: Path) -> None:
    """Writes the files of a page into a folder."""
    for name, code in files(page).items():
        folder.joinpath(name).write_text(code, encoding="utf-8")
