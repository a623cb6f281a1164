"""The notebooks: short, stored without outputs, and run from end to end on a CPU."""

from collections.abc import Iterator
import json
from pathlib import Path
from typing import Any

import pytest

from jaxrunner.device.parts import cutting

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
MAX_CODE_LINES = 60
# What a notebook prints where it is right.
PRINTS = {
    "1_one_step.ipynb": [
        "total_len=0 num_computed=0 blocks=[0, 0, 0,",
        "total_len=20 num_computed=19 blocks=[5, 2, 6,",
        "total_len=40 num_computed=39 blocks=[5, 2, 6,",
        "old state deleted: True",
        "same tokens: True",
        "same state, bit for bit: True",
        "seed=7 temperature=1.0 same=True",
        "seed=8 temperature=1.0 same=False",
        "seed=7 temperature=0.3 same=False",
        "3 programs",
    ],
    "2_sampling.ipynb": ["[True, True, True, True]", "'sigmas': 1"],
    "3_speculation.ipynb": [
        "greedy: same tokens: True",
        "sampled: same tokens: True",
        "as it was walked: True",
        "drafts: 3 by eagle3, ",
    ],
}

# Where it measures or counts, a few are enough to see that it runs.
SHORTER = {
    "2_sampling.ipynb": {"n=1000": "n=64"},
    "3_speculation.ipynb": {
        "range(5)": "range(1)", "max_tokens=150": "max_tokens=40", "range(6)": "range(3)",
        "1: start(1), 3: llm, 6: start(6)": "3: llm",
    },
}  # fmt: skip
# As in `conftest.py`: XLA compiles one layer.
QUICK = f"from jaxrunner.device.parts import cutting\ncutting.LEAST_CALLS = {cutting.LEAST_CALLS}"

each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=[path.stem for path in NOTEBOOKS])


def code_cells(path: Path) -> list[dict[str, Any]]:
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return [cell for cell in cells if cell["cell_type"] == "code"]


def shown(notebook: Any) -> Iterator[dict[str, str]]:
    """Yields what each display of an executed notebook shows: text by MIME type."""
    for cell in notebook.cells:
        for output in cell.get("outputs", ()):
            if output.output_type in ("display_data", "execute_result"):
                yield output.data


def printed(notebook: Any, stream: str) -> str:
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    return "".join(o.text for o in outputs if o.output_type == "stream" and o.name == stream)


def is_picture(data: dict[str, str]) -> bool:
    return "image/png" in data or "<svg" in data.get("text/html", "")


@pytest.fixture
def execute(tmp_path, monkeypatch):
    """Returns a function that runs a notebook in a folder of its own, with this Python."""
    for name in ("ipykernel", "matplotlib"):
        pytest.importorskip(name)
    nbclient, nbformat = (pytest.importorskip(name) for name in ("nbclient", "nbformat"))
    settings = dict(
        PYTHONPATH=str(ROOT),
        JAX_PLATFORMS="cpu",
        IPYTHONDIR=str(tmp_path / "ipython"),  # no history and settings of the user's
        JUPYTER_DATA_DIR=str(tmp_path / "data"),  # no kernels of the user's
        JUPYTER_RUNTIME_DIR=str(tmp_path / "runtime"),
        JUPYTER_PREFER_ENV_PATH="1",
    )
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("MPLBACKEND", raising=False)  # the kernel's own draws into the notebook

    def run(path: Path, shorter: dict[str, str]) -> Any:
        work = tmp_path / "work"
        work.mkdir()
        text = path.read_text(encoding="utf-8")
        for old, new in shorter.items():
            assert old in text
            text = text.replace(old, new)
        notebook = nbformat.reads(text, as_version=4)
        notebook.cells.insert(0, nbformat.v4.new_code_cell(QUICK))
        where = {"metadata": {"path": str(work)}}
        client = nbclient.NotebookClient(
            notebook, timeout=300, kernel_name="python3", resources=where
        )
        client.execute()
        return notebook

    return run


def test_there_are_notebooks():
    assert NOTEBOOKS


@each_notebook
def test_a_notebook_is_short(path):
    lines = [
        line.strip() for cell in code_cells(path) for line in "".join(cell["source"]).split("\n")
    ]
    code = [line for line in lines if line and not line.startswith("#")]
    assert 0 < len(code) <= MAX_CODE_LINES


@each_notebook
def test_a_notebook_is_stored_without_outputs(path):
    for cell in code_cells(path):
        assert cell["outputs"] == [] and cell["execution_count"] is None and not cell["metadata"]
    metadata = json.loads(path.read_text(encoding="utf-8"))["metadata"]
    assert metadata["kernelspec"]["name"] == "python3"
    assert "version" not in metadata.get("language_info", {}), "another machine has another one"


@each_notebook
def test_a_notebook_is_valid(path):
    nbformat = pytest.importorskip("nbformat")
    notebook = nbformat.read(path, as_version=nbformat.NO_CONVERT)
    nbformat.validate(notebook)
    assert (notebook.nbformat, notebook.nbformat_minor) >= (4, 5)
    ids = [cell.id for cell in notebook.cells]
    assert len(set(ids)) == len(ids)


def test_each_notebook_has_what_it_prints():
    assert {path.name for path in NOTEBOOKS} == PRINTS.keys() and all(PRINTS.values())


@pytest.mark.slow
@each_notebook
def test_a_notebook_runs(path, execute):
    source = path.read_text(encoding="utf-8")
    if "structured_outputs" in source:
        pytest.importorskip("llguidance")
    notebook = execute(path, SHORTER.get(path.name, {}))  # raises where a cell does
    displays = list(shown(notebook))
    assert all("text/plain" in data for data in displays), "a terminal has to show it too"
    if "LLM(" in source:  # its outputs draw themselves
        assert any("text/html" in data for data in displays)
    assert any(map(is_picture, displays))
    assert printed(notebook, "stderr") == "", "warnings do not belong in a notebook"
    told = printed(notebook, "stdout")
    assert [text for text in PRINTS[path.name] if text not in told] == []
    outputs = json.dumps([cell.get("outputs", ()) for cell in notebook.cells])
    assert str(ROOT) not in outputs, "this machine's folders"
