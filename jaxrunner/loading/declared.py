"""The declaration of a model's weights: shapes, dtypes and tensors in files."""

from typing import Any

import jax

from jaxrunner import pytree
from jaxrunner.config import DTYPES
from jaxrunner.loading.checkpoint import Wanted
from jaxrunner.model import Source, Stored, StoredConfig
from jaxrunner.parallel.mesh import mesh_of, shardings
from jaxrunner.parallel.pipeline import StageConfig, homes


def abstract_params(model: Stored, config: StoredConfig, dtype: str) -> Any:
    """Returns the shapes, dtypes and shardings of a model's weights."""
    dims = config.dims | {"param": dtype}
    shapes = _own(config, pytree.abstract(model.params, dims))
    if (mesh := mesh_of(config)) is not None:
        staged = isinstance(config, StageConfig)
        where = homes(config) if staged else shardings(model.params, dims, mesh)
        return jax.tree.map(lambda x, at: x.update(sharding=at), shapes, where)
    here = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    return jax.tree.map(lambda x: x.update(sharding=here), shapes)


def sources_of(model: Stored, config: StoredConfig) -> list[Source]:
    """Returns the source of each leaf of the params, in the order of `jax.tree.leaves`.

    Raises:
      ValueError: they are another tree than the params.
    """
    own = _own(config, model.sources(config))
    sources = jax.tree.flatten(own, is_leaf=lambda x: isinstance(x, Source))
    wanted = jax.tree.structure(_params(model, config))
    if sources[1] != wanted:
        raise ValueError(
            f"sources of {config.architecture} must be a tree like its weights, {wanted!s:.200}, "
            f"got {sources[1]!s:.200}: give each weight one Source"
        )
    return sources[0]


def wanted_tensors(model: Stored, config: StoredConfig) -> dict[str, Wanted]:
    """Returns what a checkpoint's tensors must be, by name.

    A weight in a dtype that is computed in is made of tensors in such; of any other its source
    knows what is stored.
    """
    wanted: dict[str, Wanted] = {}
    leaves = jax.tree.leaves(_params(model, config))
    for source, leaf in zip(sources_of(model, config), leaves, strict=True):
        kinds = DTYPES if leaf.dtype.name in DTYPES else None
        said = source.dtypes or (kinds,) * len(source.names)
        for name, shape, own in zip(source.names, source.shapes, said, strict=True):
            if name not in wanted or own is None:
                wanted[name] = Wanted(shape, own)
    return wanted


def own_dtypes(model: Stored, config: StoredConfig) -> dict[str, tuple[str, ...]]:
    """Returns the dtypes of tensors that a checkpoint holds in none that is computed in."""
    wanted = wanted_tensors(model, config).items()
    return {name: kinds for name, (_, kinds) in wanted if kinds not in (None, DTYPES)}


def named_leaves(params: Any) -> list[tuple[str, Any]]:
    """Returns the leaves of params, with their names in messages."""
    pairs = jax.tree.leaves_with_path(params)
    return [(f"params{jax.tree_util.keystr(path)}", leaf) for path, leaf in pairs]


def _params(model: Stored, config: StoredConfig) -> Any:
    return _own(config, pytree.abstract(model.params, config.dims | {"param": "float32"}))


def _own(config: StoredConfig, tree: Any) -> Any:
    """Returns what a tree like the weights says of those that this process reads."""
    return config.held_part(tree) if isinstance(config, StageConfig) else tree
