"""KV heads on more devices than there are heads: each device has a copy of the head it reads."""

from collections.abc import Mapping
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrunner import pytree
from jaxrunner.model import Source, Stored, StoredConfig
from jaxrunner.parallel.mesh import EXPERTS, UNITS, mesh_axis

# Of the model's axes, those that are cut, in config.json's words.
NAMES = dict(H="num_attention_heads", F="intermediate_size", V="vocab_size")
PACKED = ("K", "P"), ("K", "key_and_value")  # axes of keys and values last, by KV head
OF_EXPERTS = {
    UNITS: "moe_intermediate_size",
    EXPERTS: "num_experts",
    "shared_units": "shared_expert_intermediate_size",
}
OF_MIXERS = dict(inner="the width of its mixers")


def check_sizes(
    config: StoredConfig, num: int, axes: str = "HFV", *, expert_parallel: bool = False
) -> None:
    """Checks that `axes` of a model can be cut into `num` shards, experts whole or by units.

    Raises:
      ValueError: a size is no multiple of `num`; names it, and numbers that divide all sizes.
    """
    sizes = {NAMES[axis]: config.dims[axis] for axis in axes}
    other = UNITS if expert_parallel else EXPERTS
    sizes |= {
        name: config.dims[axis]
        for axis, name in (OF_EXPERTS | OF_MIXERS).items()
        if axis in config.dims and axis != other
    }
    K = config.dims["K"]

    def fits(n: int) -> bool:
        return all(size % n == 0 for size in sizes.values()) and (K % n == 0 or n % K == 0)

    if not fits(num):
        shown = ", ".join(f"{name}={size}" for name, size in sizes.items())
        good = ", ".join(str(n) for n in range(1, 65) if fits(n))
        raise ValueError(
            f"tensor_parallel_size={num} does not divide {config.architecture} with {shown}, "
            f"num_key_value_heads={K}: take one of {good}"
        )


def check_runs(cls: type, dims: Mapping[str, Any], num: int) -> None:
    """Checks that no cut splits weights that share a scale: axis "F/128" has a scale for 128 of F.

    Raises:
      ValueError: a cut would; names the axis.
    """

    def make(axes: tuple[str, ...], shape: tuple[int, ...], dtype: Any) -> None:
        for axis, size in zip(axes, shape, strict=True):
            if mesh_axis(axis, dims) is not None and size % num:
                name, _, run = axis.partition("/")
                whole = dims[name]
                good = ", ".join(str(n) for n in range(1, 65) if size % n == 0 and whole % n == 0)
                raise ValueError(
                    f"tensor_parallel_size={num} cuts {NAMES.get(name, name)}={whole} within runs "
                    f"of {run} weights that share a scale or a byte: take one of {good}"
                )

    pytree.build(make, cls, {**dims, "param": "float32"})


def copied_dims(dims: Mapping[str, Any], num: int) -> dict[str, Any]:
    """Returns sizes of axes with at least a KV head for each of `num` devices."""
    K = max(dims["K"], num)
    return {**dims, "K": K, "P": dims["H"] // K + 2}


def copied_sources(model: Stored, config: StoredConfig, num: int) -> Any:
    """Returns the sources of a model whose packed projections have copies of KV heads."""
    sources, K = model.sources(config), config.dims["K"]
    if K % num == 0:
        return sources
    is_source = dict(is_leaf=lambda x: isinstance(x, Source))
    axes = pytree.build(lambda names, *_: names, model.params, config.dims | {"param": "float32"})
    flat, treedef = jax.tree.flatten(sources, **is_source)
    names = treedef.flatten_up_to(axes)
    made = [
        _copied(source, K, num) if isinstance(source, Source) and of[:2] in PACKED else source
        for source, of in zip(flat, names, strict=True)
    ]
    return jax.tree.unflatten(treedef, made)


def _copied(source: Source, K: int, num: int) -> Source:
    """Returns the source of a packed weight, [K, P, ...], as one of `num` KV heads."""

    def join(arrays: list[np.ndarray]) -> np.ndarray:
        return copy_heads(source.join(arrays), num)

    def split(packed: np.ndarray, of: Any) -> list[np.ndarray]:
        return of(merge_heads(packed, K))

    undo = None if source.split is None else functools.partial(split, of=source.split)
    return source._replace(join=join, split=undo)


def copy_heads(packed: np.ndarray, num: int) -> np.ndarray:
    """Returns packed heads, [K, G + 2, ...], as [num, G * K / num + 2, ...]: keys are copied."""
    K, P, *rest = packed.shape
    queries = packed[:, :-2].reshape(num, K * (P - 2) // num, *rest)
    return np.concatenate([queries, np.repeat(packed[:, -2:], num // K, axis=0)], 1)


def merge_heads(packed: Any, K: int) -> Any:
    """Inverts `copy_heads`, for numpy arrays and JAX arrays."""
    num, P, *rest = packed.shape
    queries = packed[:, :-2].reshape(K, num * (P - 2) // K, *rest)
    concatenate = np.concatenate if isinstance(packed, np.ndarray) else jnp.concatenate
    return concatenate([queries, packed[:: num // K, -2:]], 1)
