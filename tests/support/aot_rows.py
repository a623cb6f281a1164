"""Compiles a step's draw for two H200 where there is none.

python tests/support/aot_rows.py   # prints what each device runs, by kind, as JSON
"""

from collections import Counter
import functools
import json
import re

import jax
from jax.experimental import topologies
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
import numpy as np

from jaxrunner.kernels_pallas.sampling.sampler import sample_tokens
from jaxrunner.models.llama import llama
from jaxrunner.ops.backends import paged
from jaxrunner.parallel.mesh import TENSOR, make_mesh
from jaxrunner.parallel.tensor import shard
from jaxrunner.program.bucket import SampleSize
from jaxrunner.program.program import Program
from jaxrunner.sampling import RULES
from jaxrunner.sampling.drawing import draw
from tests.support import rules, tiny
from tests.support.aot import DEVICE

B, V, NUM = 17, 128_256, 2  # rows, too many for a sum; tokens, devices
CUT, WHOLE = PartitionSpec(None, None, TENSOR), PartitionSpec()
KINDS = (
    r" (all-gather|all-reduce|[\w-]*(?:to-all|permute|scatter)|sort|while|conditional)(?:-start)?\("
)

if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", NUM)
    fake = topologies.get_topology_desc(platform="cuda", target_config=DEVICE, topology="1x2x1")
    mesh = Mesh(np.array(fake.devices), (TENSOR,))
    sizes = dict(vocab_size=V, num_attention_heads=8, intermediate_size=32)
    model, config = shard(llama, tiny.config(**sizes), make_mesh(NUM))
    program = Program(model, config, tiny.engine_config(), paged, RULES, sample=sample_tokens)
    run = functools.partial(draw, mask=None, program=program, size=SampleSize(B))
    state, due = rules.state_of([rules.Row()], size=B)
    on_all = NamedSharding(mesh, WHOLE)
    state, due = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=on_all), (state, due)
    )
    logits = jax.ShapeDtypeStruct((B, 1, V), jnp.bfloat16, sharding=NamedSharding(mesh, CUT))
    function = jax.jit(
        jax.shard_map(
            run, mesh=mesh, in_specs=(CUT, WHOLE, WHOLE), out_specs=WHOLE, check_vma=False
        )
    )
    text = function.lower(logits, state, due).compile().as_text() or ""
    found = Counter(re.findall(KINDS, text))
    found["kernel"] = text.count('custom_call_target="mosaic_gpu')
    # What devices tell each other of their rows.
    told = re.findall(r"= (\w+)\[([\d,]+)\]\S* all-reduce(?:-start)?\(", text)
    print(json.dumps(dict(found=found, told=[[of, *map(int, n.split(","))] for of, n in told])))
