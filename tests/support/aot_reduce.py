"""Compiles `reduce_add_norm` for several H200 where there is none.

python tests/support/aot_reduce.py   # prints what the compiler says, and one line of JSON
"""

import functools
import json

import jax
from jax.experimental import topologies
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
import numpy as np

from jaxrunner.device.xla_options import GRAPH
from jaxrunner.kernels_pallas.products.peer_rows import Peers
from jaxrunner.kernels_pallas.products.reduce_add_norm import reduce_add_norm
from jaxrunner.parallel.mesh import TENSOR
from tests.support.aot import DEVICE

CALLS, OWN = 3, PartitionSpec(TENSOR)
CASES = (
    (2, 8, 1, 4096, "bfloat16"), (4, 256, 4, 4096, "float32"), (8, 64, 1, 8192, "bfloat16"),
    (2, 8192, 1, 4096, "bfloat16"), (2, 1024, 4, 8192, "float32"),
)  # fmt: skip


def chain(x: jax.Array, parts: jax.Array, weight: jax.Array, places: jax.Array) -> jax.Array:
    """Makes several calls, each on what the one before gave."""
    for _ in range(CALLS):
        x, _ = reduce_add_norm(x, parts[0], weight, Peers(places[0], *x.shape), eps=1e-5)
    return x


def compile_chain(num: int, T: int, parts: int, E: int, dtype: str) -> str:
    """Returns what `CALLS` calls are compiled to."""
    fake = topologies.get_topology_desc(
        platform="cuda", target_config=DEVICE, topology=f"1x1x{num}"
    )
    mesh = Mesh(np.array(fake.devices), (TENSOR,))
    placed = functools.partial(jax.ShapeDtypeStruct, sharding=NamedSharding(mesh, PartitionSpec()))
    own = functools.partial(jax.ShapeDtypeStruct, sharding=NamedSharding(mesh, OWN))
    mapped = jax.shard_map(
        chain, mesh=mesh, in_specs=(PartitionSpec(), OWN, PartitionSpec(), OWN),
        out_specs=PartitionSpec(), check_vma=False,
    )  # fmt: skip
    lowered = jax.jit(mapped).lower(
        placed((T, E), jnp.bfloat16), own((num, parts, T, E), jnp.dtype(dtype)),
        placed((E,), jnp.bfloat16), own((num, num + 2, 2), jnp.uint32),
    )  # fmt: skip
    return lowered.compile(dict(GRAPH)).as_text() or ""


if __name__ == "__main__":
    texts = [compile_chain(*case) for case in CASES]
    print(json.dumps([text.count('custom_call_target="mosaic_gpu') for text in texts]))
