"""Several processes with one mesh give the tokens of one process."""

import json
import os
from pathlib import Path
import re
import socket
import subprocess
import sys

from jaxrunner import LLM
from jaxrunner.loading.weights import save_checkpoint
from jaxrunner.models.llama import llama
from tests.support import processes, tiny

SIZES = dict(
    hidden_size=24, intermediate_size=32, num_attention_heads=8, vocab_size=64, head_dim=4,
    num_key_value_heads=2, eos_token_id=63,
)  # fmt: skip
ROOT = Path(__file__).resolve().parents[1]


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def test_two_processes_give_the_tokens_of_one(tmp_path):
    config = tiny.config(**SIZES)
    params = tiny.random_params(config, seed=3)
    save_checkpoint(tmp_path, llama, config, params, tiny.SETTINGS | SIZES)
    command = [sys.executable, "-m", "tests.support.processes"]
    rest = ["2", str(free_port()), "4", str(tmp_path)]
    # Sets of names are in another order in each.
    started = [
        subprocess.Popen(
            [*command, str(rank), *rest], cwd=ROOT, text=True, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, env=os.environ | dict(PYTHONHASHSEED=str(rank + 1)),
        )
        for rank in range(2)
    ]  # fmt: skip
    with LLM(str(tmp_path), tokenizer=tiny.tokenizer(), **processes.SIZES) as llm:
        want = processes.answers(llm)
    told = []
    for process in started:
        out, errors = process.communicate(timeout=240)
        assert process.returncode == 0, errors[-3000:]
        told.append(json.loads(out.splitlines()[-1]))
    for one in told:
        assert one["tokens"] == one["after a sleep"] == one["reloaded"] == want
        assert one["report"].startswith("devices: 4 x cpu, tensor 4\n")
        *alone, warm_up, drafts, three = one["refused"]
        for name, words in zip(
            ["save_params", "load_params", "save_sharded_state", "save_state", "restore_state"],
            alone, strict=True,
        ):  # fmt: skip
            assert re.match(f"{name} wants a mesh of one process, this one is over 2", words)
        assert re.match("warm_up='background' wants a mesh of one process", warm_up)
        assert "'auto' wants a mesh of one process" in drafts and "say a number" in drafts
        assert "a mesh over 2 processes wants all of their devices, 4, got 3 x cpu" in three
    assert told[0] == told[1]
