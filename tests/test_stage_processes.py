"""Stages of a pipeline in two processes give the tokens of one device."""

import os
import subprocess
import sys
from typing import Any

import jax
import pytest
from test_processes import ROOT, free_port, told_by

from jaxrunner import LLM
from tests.support import processes, small_checkpoint

pytestmark = pytest.mark.skipif(
    jax.default_backend() != "cpu", reason="each process has devices of its own: those of a CPU"
)


@pytest.fixture(scope="module")
def told(tmp_path_factory) -> tuple[Any, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("checkpoint")
    checkpoint = small_checkpoint.save(folder, num_key_value_heads=2, num_hidden_layers=4)
    command, port = [sys.executable, "-m", "tests.support.stage_processes"], str(free_port())
    started = [
        subprocess.Popen(
            [*command, str(rank), port, str(checkpoint)], cwd=ROOT, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            env=os.environ | dict(PYTHONHASHSEED=str(rank + 1)),
        )
        for rank in range(2)
    ]  # fmt: skip
    with LLM(str(checkpoint), tokenizer=processes.tokenizer(), **processes.SIZES) as llm:
        want = processes.answers(llm)
    return want, [told_by(process) for process in started]


def test_tokens_are_those_of_one_device(told):
    want, both = told
    assert want[4][:4] == [32, 33, 33, 32]  # ABBA, as its grammar wants
    for one in both:
        assert one["tokens"] == one["after a sleep"] == one["four stages"] == want
    # Each has the programs of its own stage alone.
    first, last = (set(one["kinds"]) for one in both)
    assert {"stage", "receive"} <= first and not {"stage", "receive", "admit"} & (last - {"admit"})
