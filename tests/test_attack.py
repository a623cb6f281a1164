"""Some bad values at every public entry; `python -m tests.attack` throws thousands."""

import pytest

from tests.attack.command import findings
from tests.attack.entries import ENTRIES
from tests.attack.harness import FINE, attack

# Cases of those that cost more than a millisecond or two.
FEW = dict(llm=20, worker=15, checkpoints=15, weight_folders=10, snapshots=6, settings=25)


@pytest.mark.filterwarnings("ignore")  # NumPy and JAX warn of some values
@pytest.mark.parametrize("name", ENTRIES)
def test_bad_values_are_refused_by_name_and_harm_nobody(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where folders of any name may be made
    results = list(attack(ENTRIES[name], FEW.get(name, 60), seed=1))
    assert all(result.kind in FINE for result in results), "\n".join(findings(name, results, 20))
