"""The page about fleets runs as it stands: its worker without Ray, and both under Ray."""

from importlib.util import find_spec
import os
from pathlib import Path
import runpy
import subprocess
import sys

import pytest

from jaxrunner import embedded
from tests.support.pages import write
from tests.support.small_llm import SIZES

ROOT = Path(__file__).parents[1]
# The first call of all workers ends its process.
KILLED = """
import os
from pathlib import Path

call = Answers.__call__


def killed_once(self, batch):
    try:
        Path(__file__).with_name("killed").touch(exist_ok=False)
    except FileExistsError:
        return call(self, batch)
    os._exit(1)


Answers.__call__ = killed_once
"""


def test_a_worker_answers_batches_and_outlives_its_engine(tmp_path, monkeypatch):
    write("fleets.md", tmp_path)
    answers = runpy.run_path(str(tmp_path / "answers.py"))["Answers"]
    worker = answers(str(embedded.PATH), dict(temperature=0, max_tokens=4), **SIZES)
    batch = {"prompt": ["def f(", "x" * 1000, "import "], "row": [5, 6, 7]}
    first = worker(batch)
    assert first["row"] == [5, 6, 7] and [bool(e) for e in first["error"]] == [False, True, False]
    ended = worker.llm
    ended.engine.status.ended = "the device state was lost"
    assert worker(batch) == first and worker.llm is not ended
    worker.llm.close()


@pytest.mark.slow
@pytest.mark.skipif(find_spec("ray") is None, reason="needs the ray extra")
def test_ray_answers_a_data_set_although_a_worker_dies(tmp_path):
    write("fleets.md", tmp_path)
    with (tmp_path / "answers.py").open("a") as file:
        file.write(KILLED)
    path = os.pathsep.join([str(tmp_path), str(ROOT), *filter(None, sys.path)])
    started = subprocess.run(
        [sys.executable, "fleet.py"], cwd=tmp_path, capture_output=True, text=True, timeout=400,
        env=os.environ | dict(
            PYTHONPATH=path, JAX_PLATFORMS="cpu", RAY_USAGE_STATS_ENABLED="0",
            RAY_AUTH_MODE="disabled", RAY_DISABLE_IMPORT_WARNING="1",
        ),
    )  # fmt: skip
    assert (tmp_path / "killed").exists(), started.stderr[-2000:]
    assert "24 answers, 0 failed" in started.stdout, started.stderr[-2000:]
