"""Several processes with one mesh give the tokens of one process."""

from concurrent.futures import Future, ThreadPoolExecutor
import json
from pathlib import Path
import re
import shutil
import subprocess
import time
from typing import NamedTuple

import jax
import numpy as np
import pytest

from jaxrunner import LLM
from jaxrunner.loading.loader import load
from jaxrunner.loading.new_folder import check_seen
from tests.support import processes, small_checkpoint, tiny
from tests.support.two_processes import ended, start, told_by

pytestmark = pytest.mark.skipif(
    jax.default_backend() != "cpu", reason="each process has devices of its own: those of a CPU"
)
PROGRAM = "tests.support.processes"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    return small_checkpoint.save(folder, num_key_value_heads=2, num_hidden_layers=1)


@pytest.mark.slow
def test_two_processes_give_the_tokens_of_one(checkpoint, tmp_path):
    """Also where they save weights or requests at work, for other meshes too."""
    started = start(PROGRAM, checkpoint, tmp_path)
    with LLM(str(checkpoint), tokenizer=processes.tokenizer(), **processes.SIZES) as llm:
        want = processes.answers(llm)
        told = [told_by(process) for process in started]
        rest = processes.last_of(llm.restore_state(tmp_path / "state"))
        assert len(rest) > 5 and rest == {i: want[i] for i in rest}
        llm.load_params(tmp_path / "params")
        shutil.copy(checkpoint / "config.json", tmp_path / "shards")
        loaded = load(tmp_path / "shards", tokenizer=None, load_format="sharded_state")
        for other in llm.params, loaded.read_params(progress=False):
            ours = load(checkpoint, tokenizer=None).read_params(progress=False)
            jax.tree.map(np.testing.assert_array_equal, other, ours)
    assert want[4][:4] == [32, 33, 33, 32]  # ABBA, as its grammar wants
    for one in told:
        assert one["tokens"] == one["after a sleep"] == one["reloaded"] == one["saved"] == want
        assert one["with drafts, steps, context"] == want
        assert one["report"].startswith("devices: 4 x cpu, tensor 4\n")
        warm_up, own, drafts, three = one["refused"]
        assert re.match("warm_up='background' wants a mesh of one process", warm_up)
        assert "own" in own and "cannot be written: orbax writes arrays that lie on all" in own
        assert "'auto' wants a mesh of one process" in drafts and "say a number" in drafts
        assert "a mesh over 2 processes wants all of their devices, 4, got 3 x cpu" in three
    assert [one["together"] for one in told] == [
        ["no disk", "KeyError in another process: 'no disk'"],
        ["no disk", "'no disk'"],
    ]
    with pytest.raises(ValueError, match="is not the same folder in all processes of this mesh"):
        check_seen(tmp_path / "of another machine")


class End(NamedTuple):
    """What a process printed until it ended, and when that was."""

    out: str
    errors: str
    status: int | None
    at_s: float


def watched(process: subprocess.Popen) -> End:
    """Waits for the end of a process."""
    said = ended(process)
    return End(*said, process.returncode, time.monotonic())


@pytest.fixture(scope="module")
def one_dies(checkpoint) -> dict[str, list[Future[End]]]:
    """Two processes of which the second dies, by whether the first may outlive it: both pairs at
    once and beside other tests, as they wait more than they work."""
    recoverable = dict(JAX_ENABLE_RECOVERABILITY="1")
    started = {"ends": start(PROGRAM, checkpoint, checkpoint, 1)}
    started |= {"goes on": start(PROGRAM, checkpoint, checkpoint, 1, **recoverable)}
    pool = ThreadPoolExecutor(4)
    watching = {kind: [pool.submit(watched, one) for one in two] for kind, two in started.items()}
    pool.shutdown(wait=False)
    return watching


@pytest.mark.slow
@pytest.mark.usefixtures("one_dies")  # which waits meanwhile
def test_data_ranks_lie_in_two_processes(tmp_path):
    checkpoint = small_checkpoint.save_family(tmp_path, tiny.SETTINGS | processes.MIXTURE)
    started = start(PROGRAM, checkpoint, "ranks")
    with LLM(checkpoint, tokenizer=processes.tokenizer(), **processes.SIZES) as llm:
        want, other = processes.answers(llm, processes.USUAL), processes.answers(llm)
    for one in map(told_by, started):
        assert one["tokens"] == one["after a sleep"] == want and one["saved"] == other
        assert one["report"].startswith("devices: 4 x cpu, data 4, tensor 1\n")


@pytest.mark.slow
def test_a_process_that_dies_ends_the_other(one_dies):
    other, dead = (one.result() for one in one_dies["ends"])
    assert 0 < other.at_s - dead.at_s < processes.HEARTBEAT_S + 20
    assert other.status != 0 and "JAX distributed service" in other.errors


@pytest.mark.slow
def test_a_process_that_outlives_another_says_so(one_dies):
    """All its requests end at once, later ones are refused, and it closes.

    A sum over both fails, or waits for the one that is gone until the step's time is over.
    """
    one, _ = (one.result() for one in one_dies["goes on"])
    assert one.status == 0, one.errors[-3000:]
    told = json.loads(one.out.splitlines()[-1])
    gone = "a process of this mesh is gone, or failed in a step that all of them run (JaxRuntime"
    assert len(told["errors"]) == len(processes.PROMPTS) and all(told["errors"])
    hangs = "the device did not end a step within step_timeout_s=15.0 and is not restarted"
    failed = re.escape(gone + "Error") + "|a step failed|" + re.escape(hangs)
    assert all(re.match(failed, error) for error in told["errors"])
    assert re.match(f"{re.escape(gone)}.*start all anew|{re.escape(hangs)}", told["later"])
