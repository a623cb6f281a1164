"""What the compiler says of kernels and steps, where the CUDA plugin is there; needs no GPU."""

import json
import os
from pathlib import Path
import re
import subprocess
import sys

import pytest

from tests.support.lowering import NEW, PLUGIN

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
@pytest.mark.skipif(not (PLUGIN and NEW), reason="needs JAX 0.11, the CUDA 13 plugin and ptxas")
def test_decode_steps_are_one_graph_in_place_and_nothing_spills(tmp_path):
    paths = os.pathsep.join(map(str, (ROOT, ROOT / "tests")))
    told = dict(
        XLA_FLAGS=f"--xla_dump_to={tmp_path}", MOSAIC_GPU_DUMP_PTXAS="1", JAX_PLATFORMS="cpu",
        PYTHONPATH=paths,
    )  # fmt: skip
    command = [sys.executable, str(ROOT / "tests" / "support" / "aot.py"), str(tmp_path)]
    done = subprocess.run(command, env=os.environ | told, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    pattern = r"properties for (\w+)_mosaic_gpu_kernel\n.* (\d+) bytes spill stores"
    spills = [(name, int(size)) for name, size in re.findall(pattern, done.stdout + done.stderr)]
    assert len(spills) > 10
    # `state_chunks` holds a matrix, what it gains and what is read of it: more than registers.
    limits = dict(state_chunks=128)
    assert all(size <= limits.get(name, 0) for name, size in spills), spills
    found = json.loads(done.stdout.strip().splitlines()[-1])
    few, many = found["temporaries"]  # of 2 mixers and of 6: nothing is held of all at once
    assert many - few < 2048 * 3072 * 4  # bytes of what a mixer makes
    for step in found["steps"]:
        assert step["aliased"] >= step["kv_bytes"]  # the cache is written in place
        assert (step["copies"], step["loops"]) == (0, step["wanted_loops"])
        assert step["graphs"] == step["wanted_graphs"]  # none for a prefill
