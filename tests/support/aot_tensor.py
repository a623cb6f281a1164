"""Compiles decode steps on several H200 where there is none.

python tests/support/aot_tensor.py DEVICES ROWS STEPS SUMS FOLDER   # prints what XLA launches

It is one line of JSON. SUMS is "peers", where a kernel sums over devices, or "psum"; XLA writes its
dumps into FOLDER.
"""

import json
from pathlib import Path
import re
import sys

import jax
from jax.experimental import topologies
from jax.sharding import Mesh
import numpy as np

from jaxrunner import pytree
from jaxrunner.hf_config import Settings
from jaxrunner.kernels_pallas.sampling.sampler import sample_tokens
from jaxrunner.models.registry import read_model
from jaxrunner.ops.backends import fused
from jaxrunner.parallel.mesh import TENSOR, shardings
from jaxrunner.parallel.tensor import all_reduced, shard
from jaxrunner.program.bucket import Bucket, MultiStepBucket, SampleSize
from jaxrunner.program.program import Program
from jaxrunner.programs.program_table import Key
from jaxrunner.sampling import RULES
from tests.support import tiny
from tests.support.aot import DEVICE, ENGINE, MODEL, compile_program

SIZES = dict(
    hidden_size=4096, intermediate_size=14336, num_attention_heads=32, num_key_value_heads=8,
    vocab_size=128_256,
)  # fmt: skip
# Without such links XLA leaves all sums to NCCL.
LINKED = DEVICE.replace("ecc_enabled", "device_interconnect_info { active_links: 18 } ecc_enabled")


def compile_steps(num: int, rows: int, steps: int, *, peer_rows: int) -> None:
    """Compiles the program of so many steps, of so many rows, on so many devices."""
    fake = topologies.get_topology_desc(
        platform="cuda", target_config=LINKED, topology=f"1x1x{num}"
    )
    mesh = Mesh(np.array(fake.devices), (TENSOR,))
    read = read_model(Settings(MODEL | SIZES))
    model, config = shard(*read, mesh)
    engine = tiny.engine_config(**ENGINE, max_num_seqs=256, num_decode_steps=steps)
    program = Program(
        model, config, engine, all_reduced(fused), RULES, sample=sample_tokens, peer_rows=peer_rows
    )
    params = jax.eval_shape(lambda: pytree.zeros(model.params, program.dims))
    at = shardings(model.params, program.dims, mesh)
    params = jax.tree.map(lambda x, at: x.update(sharding=at), params, at)
    key = Key("step", Bucket(rows, rows, 1))
    if steps > 1:
        key = Key("multi_step", MultiStepBucket(steps, SampleSize(rows)))
    compile_program(program, params, key, lambda args: args)


if __name__ == "__main__":
    num, rows, steps = map(int, sys.argv[1:4])
    compile_steps(num, rows, steps, peer_rows=8192 if sys.argv[4] == "peers" else 0)
    (dump,) = Path(sys.argv[5]).glob("*step.thunk_sequence_after_thunk_passes.txt")
    text = dump.read_text()
    # What is in a graph, or in something asynchronous, is indented.
    launched = re.findall(r"^\d+: k(\w+)", text, re.MULTILINE)
    print(json.dumps(dict(launched=launched, sums=text.count("kCollectiveKernel ["))))
