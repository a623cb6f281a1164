"""Some bad values at every public entry; `python -m tests.attack` throws thousands."""

import inspect
from pathlib import Path
import re

import pytest

from jaxrunner import LLM
from jaxrunner.engine.engine import Engine
from jaxrunner.runner.model_runner import ModelRunner
from tests.attack.command import findings
from tests.attack.entries import ENTRIES
from tests.attack.harness import FINE, attack

# Cases of those that cost more than a millisecond or two.
FEW = dict(
    pooling=40,
    adapters=40,
    llm=20,
    worker=15,
    checkpoints=15,
    weight_folders=10,
    snapshots=6,
    settings=25,
)


@pytest.mark.filterwarnings("ignore")  # NumPy and JAX warn of some values
@pytest.mark.parametrize("name", ENTRIES)
def test_bad_values_are_refused_by_name_and_harm_nobody(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where folders of any name may be made
    results = list(attack(ENTRIES[name], FEW.get(name, 60), seed=1))
    assert all(result.kind in FINE for result in results), "\n".join(findings(name, results, 20))


@pytest.mark.parametrize("kind", [LLM, Engine, ModelRunner])
def test_each_method_that_is_told_something_is_attacked(kind):
    folder = Path(__file__).parent / "attack"
    attacked = set(re.findall(r"\w+", "".join(p.read_text() for p in folder.glob("*.py"))))
    methods = inspect.getmembers(kind, inspect.isfunction)
    told = {name for name, method in methods if len(inspect.signature(method).parameters) > 1}
    # Of these two the first has flags alone, the others are between an engine and its runner.
    between = {"warm_up", "launch", "prepare", "params_of", "would_wait", "queue"}
    between |= {"load_state_dict"}  # of a snapshot, whose files are attacked
    assert {name for name in told if name[0] != "_"} - between <= attacked
