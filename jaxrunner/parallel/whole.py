"""Weights and caches of a mesh in the shapes of one device: files have these, and fit any mesh.

Shapes differ only where KV heads are copied.
"""

from dataclasses import replace
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrunner import pytree
from jaxrunner.parallel.kv_heads import copy_heads, merge_heads
from jaxrunner.parallel.pipeline import StageConfig
from jaxrunner.parallel.placement import put
from jaxrunner.parallel.processes import host_copy
from jaxrunner.parallel.tensor import ShardedConfig
from jaxrunner.program.program import Program
from jaxrunner.speculators.draft_model import DraftModelConfig
from jaxrunner.speculators.drafter import DraftedConfig
from jaxrunner.types import Array


def whole_config(config: Any) -> Any:
    """Returns the config of a model, or of a drafter, for one device."""
    if isinstance(config, ShardedConfig | StageConfig):
        return config.whole
    if isinstance(config, DraftedConfig):
        parts = dict(target=whole_config(config.target), drafter=whole_config(config.drafter))
        model = getattr(config.target, "family", config.model)
        family = getattr(config.drafter, "family", config.family)
        return replace(config, model=model, family=family, **parts)
    if isinstance(config, DraftModelConfig):
        model = getattr(config.config, "family", config.model)
        return replace(config, model=model, config=whole_config(config.config))
    return config


def whole_program(program: Program) -> Program:
    """Returns the program for one device."""
    return replace(program, config=whole_config(program.config))


def whole_params(cls: type, config: Any) -> Any:
    """Returns the shapes of weights on one device, of any dtype."""
    return pytree.abstract(cls, whole_config(config).dims | {"param": "float32"})


def merge(tree: Any, whole: Any) -> Any:
    """Returns arrays without copies of heads; those that had copies become numpy arrays."""

    def one(x: Any, whole: Any) -> Any:
        return x if x.shape == whole.shape else merge_one(host_copy(x), whole.shape)

    return jax.tree.map(one, tree, whole)


def merge_one(x: Any, shape: tuple[int, ...]) -> Any:
    """Returns an array without copies of heads: packed weights, [K, P, ...], or KV, [N, K, ...]."""
    if x.shape[0] != shape[0]:
        return merge_heads(x, shape[0])
    return x[:, :: x.shape[1] // shape[1]] if x.shape != shape else x


def merged_spec(spec: Any, whole: Any) -> Any:
    """Returns the abstract arrays that `merge` returns for such arrays."""

    def one(x: Any, whole: Any) -> Any:
        return x if x.shape == whole.shape else np.broadcast_to(np.zeros((), x.dtype), whole.shape)

    return jax.tree.map(one, spec, whole)


def copied(tree: Any, spec: Any) -> Any:
    """Inverts `merge`: returns arrays with copies of heads, on the shardings of `spec`."""

    def one(x: Any, spec: Any) -> Any:
        if x.shape == spec.shape:
            return x
        if x.shape[0] != spec.shape[0]:
            return put(copy_heads(x, spec.shape[0]), spec.sharding)
        return put(np.repeat(x, spec.shape[1] // x.shape[1], axis=1), spec.sharding)

    return jax.tree.map(one, tree, spec)


@functools.partial(jax.jit, static_argnums=1)
def sums_of(leaves: list[Array], shapes: tuple[tuple[int, ...], ...]) -> list[Array]:
    """Returns a checksum of each leaf, of a shape, computed on the devices."""

    def one(x: Array, shape: tuple[int, ...]) -> Array:
        x = merge_one(x, shape)
        bits = jax.lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * x.dtype.itemsize}"))
        words = bits.astype(jnp.uint32).ravel()
        odd = 2 * jnp.arange(words.size, dtype=jnp.uint32) + 1  # apart by their places
        return jnp.sum(words * odd, dtype=jnp.uint32)

    return [one(x, shape) for x, shape in zip(leaves, shapes, strict=True)]
