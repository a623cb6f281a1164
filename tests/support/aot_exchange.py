"""Compiles the exchange of tokens and experts for eight H200 where there is none.

python tests/support/aot_exchange.py   # prints how many collectives of each kind it has, as JSON
"""

from collections import Counter
import json
import re

import jax
from jax.experimental import topologies
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
import numpy as np

from jaxrunner.mixtures.experts import Routes
from jaxrunner.parallel.exchange import exchanged
from jaxrunner.parallel.mesh import DATA, TENSOR
from jaxrunner.types import Array
from tests.support.aot import DEVICE

T, E, K, RANKS = 512, 256, 8, 4  # tokens of a rank, which has two devices
OF_RANK = PartitionSpec(DATA)


def run(x: Array, experts: Array, weights: Array) -> Array:
    """Stands for a mixture whose expert i multiplies by i."""

    def scaled(x: Array, routes: Routes) -> Array:
        factor = (routes.experts.astype(jnp.float32) * routes.weights).sum(1)
        return factor[:, None].astype(x.dtype) * x

    return exchanged(scaled, x, Routes(experts, weights), 4, (DATA, TENSOR))


if __name__ == "__main__":
    fake = topologies.get_topology_desc(platform="cuda", target_config=DEVICE, topology="1x8x1")
    mesh = Mesh(np.array(fake.devices).reshape(RANKS, -1), (DATA, TENSOR))
    kinds = {(T * RANKS, E): jnp.bfloat16, (T * RANKS, K): jnp.int32}
    x, experts = (
        jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, OF_RANK))
        for shape, dtype in kinds.items()
    )
    function = jax.jit(
        jax.shard_map(run, mesh=mesh, in_specs=OF_RANK, out_specs=OF_RANK, check_vma=False)
    )
    compiled = function.lower(x, experts, experts.update(dtype=jnp.float32)).compile()
    text = compiled.as_text() or ""
    found = re.findall(r" (all-gather|all-reduce|[\w-]*all-to-all)(?:-start)?\(", text)
    print(json.dumps(Counter(found)))
