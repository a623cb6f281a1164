"""The weights of a model with one adapter merged into them."""

from collections.abc import Mapping
from dataclasses import replace
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrunner.linear import Linear
from jaxrunner.lora.adapter import Adapter
from jaxrunner.lora.saved_modules import EMBED, HEAD
from jaxrunner.lora.stacks import BASE, TARGET, is_weights
from jaxrunner.pytree import name_of


def merge(params: Any, adapter: Adapter) -> tuple[Any, dict[str, np.ndarray]]:
    """Returns weights with an adapter merged, each sum rounded once, and the weights it changed.

    Those are copied to the host, by path, so that they can be put back as they were.

    Raises:
      ValueError: a product has weights of few bits, to which nothing can be added, or an adapter
        has one of embedding and head alone, which are one in the model.
    """
    before: dict[str, np.ndarray] = {}
    _check_tied(params, adapter)
    saved = _by_leaf(params, adapter.saved)

    def put(path: Any, weight: Any) -> Any:
        if (table := saved.get(name := name_of(path))) is None:
            return weight
        before[name] = np.asarray(weight)
        return jax.device_put(table.astype(weight.dtype), weight.sharding)

    def one(path: Any, node: Any) -> Any:
        if (pair := adapter.matrices.get(name := name_of(path))) is None:
            return node
        if isinstance(node, jax.Array):  # of each head
            before[name] = np.asarray(node)
            return _added(node, *pair, num_in=1)
        if not isinstance(node, Linear):
            raise ValueError(
                f"{name} has weights of {type(node).__name__}, no adapter can be merged into them: "
                "name it as lora_request"
            )
        before[f"{name}.weight"] = np.asarray(node.weight)
        return replace(node, weight=_added(node.weight, *pair, num_in=node.num_in))

    params = jax.tree.map_with_path(put, params)
    return jax.tree.map_with_path(one, params, is_leaf=is_weights), before


def put_back(params: Any, before: Mapping[str, np.ndarray]) -> Any:
    """Returns weights as they were before `merge`."""

    def one(path: Any, weight: Any) -> Any:
        old = before.get(name_of(path))
        return weight if old is None else jax.device_put(old, weight.sharding)

    return jax.tree.map_with_path(one, params)


def _by_leaf(params: Any, saved: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns what an adapter has in place of weights, by the paths of these."""
    prefix = next((part for part in (TARGET, BASE) if hasattr(params, part[:-1])), "")
    own = getattr(params, prefix[:-1]) if prefix else params
    of_head = ".weight" if isinstance(getattr(own, HEAD, None), Linear) else ""
    names = {EMBED: prefix + EMBED, HEAD: prefix + HEAD + of_head}
    return {names.get(field, field): table for field, table in saved.items()}


def _check_tied(params: Any, adapter: Adapter) -> None:
    own = getattr(params, "target", params)
    if adapter.saved and getattr(own, HEAD, None) is None:
        embed, head = (adapter.saved.get(field) for field in (EMBED, HEAD))
        if embed is None or head is None or not np.array_equal(embed, head):
            raise ValueError(
                f"adapter {adapter.name!r} has another embedding or another head, which are one "
                "weight of this model, so that it cannot be merged: name it as lora_request"
            )


def _added(weight: jax.Array, a: np.ndarray, b: np.ndarray, *, num_in: int) -> jax.Array:
    """Returns weight, [*outputs, *inputs], plus b a of all modules; see `Adapter.matrices`."""
    add = jax.jit(functools.partial(_add, num_in=num_in), out_shardings=weight.sharding)
    return add(weight, a, b)


def _add(weight: jax.Array, a: jax.Array, b: jax.Array, *, num_in: int) -> jax.Array:
    modules, rank = a.shape[:2]
    a, b = (x.reshape(modules, rank, -1).astype(jnp.float32) for x in (a, b))
    exact = jax.lax.Precision.HIGHEST
    rows = weight.shape[: weight.ndim - num_in]
    if np.prod(rows) == b.shape[2]:  # modules are mixed along the outputs
        more = jnp.einsum("mro,mri->oi", b, a, precision=exact)
    else:
        more = jnp.einsum("mro,mri->moi", b, a, precision=exact)
    return (weight.astype(jnp.float32) + more.reshape(weight.shape)).astype(weight.dtype)
