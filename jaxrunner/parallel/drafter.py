"""A drafter on shards: its layers are cut as the model's, its embedding and head are not."""

from dataclasses import dataclass, field
import functools
from typing import Any, cast

from jax.sharding import Mesh

from jaxrunner.caches.cache_group import CacheKind
from jaxrunner.parallel.kv_heads import check_sizes, copied_dims, copied_sources
from jaxrunner.parallel.mesh import TENSOR
from jaxrunner.parallel.tensor import shard
from jaxrunner.speculators.draft_model import DraftModelConfig, draft_model
from jaxrunner.speculators.drafter import Drafter, DrafterConfig


@dataclass(frozen=True)
class ShardedDrafterConfig:
    """The `DrafterConfig` of a drafter on a mesh: its own, with KV heads for each device."""

    family: Drafter = field(repr=False)
    whole: DrafterConfig
    mesh: Mesh

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "whole":  # asked while it is unpickled
            raise AttributeError(name)
        return getattr(self.whole, name)

    @property
    def cache_kinds(self) -> tuple[CacheKind, ...]:
        """What each layer keeps."""
        return self.whole.cache_kinds

    @functools.cached_property
    def dims(self) -> dict[str, Any]:
        """Sizes of axes over all devices, copies of KV heads counted in."""
        return copied_dims(self.whole.dims, self.mesh.shape[TENSOR])


def shard_drafter(
    family: Drafter, config: DrafterConfig, mesh: Mesh
) -> tuple[Drafter, DrafterConfig]:
    """Returns a drafter whose functions run on each device of a mesh, under `shard_map`.

    Raises:
      ValueError: it does not run on shards, or a size of its layers is no multiple of the devices;
        says which would do.
    """
    if isinstance(config, DraftModelConfig):
        model, own = shard(config.model, config.config, mesh)
        return draft_model(model), DraftModelConfig(model, own)
    if not family.tensor_parallel:
        raise ValueError(
            f"tensor_parallel_size={mesh.shape[TENSOR]} wants a drafter that runs on shards, "
            f"{family.name} does not say so: set Drafter.tensor_parallel, or take 'ngram'"
        )
    check_sizes(config, mesh.shape[TENSOR], axes="HF")
    sharded = ShardedDrafterConfig(family, config, mesh)
    return family._replace(sources=_sources), cast(DrafterConfig, sharded)


def _sources(config: ShardedDrafterConfig) -> Any:
    return copied_sources(config.family, config.whole, config.mesh.shape[TENSOR])
