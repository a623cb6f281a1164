"""A drafter on shards: its layers are cut as the model's, its embedding and head are not."""

from typing import cast

from jax.sharding import Mesh

from jaxrunner.caches.interleave import WHOLE, Interleave
from jaxrunner.parallel.context import check_context
from jaxrunner.parallel.kv_heads import check_sizes
from jaxrunner.parallel.mesh import TENSOR
from jaxrunner.parallel.tensor import ShardedConfig, shard, sources
from jaxrunner.speculators.draft_model import DraftModelConfig, draft_model
from jaxrunner.speculators.drafter import Drafter, DrafterConfig


def shard_drafter(
    family: Drafter, config: DrafterConfig, mesh: Mesh, interleave: Interleave = WHOLE,
    *, expert_parallel: bool = False,
) -> tuple[Drafter, DrafterConfig]:  # fmt: skip
    """Returns a drafter whose functions run on each device of a mesh, under `shard_map`.

    expert_parallel: whether devices have whole experts of the model, and so of a draft model.

    Raises:
      ValueError: it does not run on shards, or a size of its layers is no multiple of the devices;
        says which would do.
    """
    if isinstance(config, DraftModelConfig):
        whole = expert_parallel and "experts" in config.dims
        model, own = shard(config.model, config.config, mesh, interleave, expert_parallel=whole)
        return draft_model(model), DraftModelConfig(model, own)
    if not family.tensor_parallel:
        raise ValueError(
            f"tensor_parallel_size={mesh.shape[TENSOR]} wants a drafter that runs on shards, "
            f"{family.name} does not say so: set Drafter.tensor_parallel, or take 'ngram'"
        )
    check_sizes(config, mesh.shape[TENSOR], axes="HF")
    check_context(config, mesh.shape[TENSOR], interleave)
    sharded = ShardedConfig(family, config, mesh, interleave)
    return family._replace(sources=sources), cast(DrafterConfig, sharded)
