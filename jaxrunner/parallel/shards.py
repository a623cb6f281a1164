"""Device functions that run on every device of a mesh, each on its shards."""

from collections.abc import Callable
import functools
from typing import Any

import jax
from jax.sharding import Mesh

from jaxrunner.parallel.mesh import DATA, spec_of


def on_shards(
    function: Callable[..., Any], mesh: Mesh | None, args: tuple[Any, ...], out: Any
) -> Callable[..., Any]:
    """Returns `function` under `shard_map`, with its name and parameters; itself without a mesh.

    args and out: trees like its arguments and results, whose leaves have shardings; a leaf without
    one is replicated.
    """
    if mesh is None:
        return function
    flat = (jax.tree.flatten(jax.tree.map(spec_of, tree)) for tree in (args, out))
    return _on_shards(function, mesh, *((tuple(specs), treedef) for specs, treedef in flat))


def told_to_all(function: Callable[..., Any], out: Any) -> Callable[..., Any]:
    """Returns `function` under `on_shards`; gathers outputs for the host from all data ranks.

    out: a tree like its results, in which these outputs are no arrays.
    """
    leaves, treedef = jax.tree.flatten(out)
    return _told_to_all(function, tuple(not hasattr(x, "shape") for x in leaves), treedef)


@functools.lru_cache(maxsize=1024)
def _told_to_all(
    function: Callable[..., Any], is_told: tuple[bool, ...], treedef: Any
) -> Callable[..., Any]:
    told = jax.tree.unflatten(treedef, is_told)

    def of_all(is_told: bool, x: Any) -> Any:
        return jax.lax.all_gather(x, DATA, tiled=True) if is_told else x

    @functools.wraps(function)
    def run(*args: Any, **static: Any) -> Any:
        return jax.tree.map(of_all, told, function(*args, **static))

    return run


@functools.lru_cache(maxsize=1024)  # a function that is new each time would be lowered each time
def _on_shards(
    function: Callable[..., Any], mesh: Mesh, args: tuple[Any, Any], out: tuple[Any, Any]
) -> Callable[..., Any]:
    """Returns `on_shards` of trees of `PartitionSpec`, flat and with their structure."""
    in_specs, out_specs = (jax.tree.unflatten(treedef, specs) for specs, treedef in (args, out))

    @functools.wraps(function)
    def run(*args: Any, **static: Any) -> Any:
        body = functools.partial(function, **static)
        # Whole arrays are computed alike on all devices, which JAX cannot see of every operation.
        mapped = jax.shard_map(
            body, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
        )
        return mapped(*args)

    return run
