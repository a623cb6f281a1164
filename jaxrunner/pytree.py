"""Immutable pytrees whose fields declare their axes once.

One declaration, `leaf("B M", jnp.int32)`, is the documentation, the shape used to allocate and to
lower ahead of time, the check in tests, and (through the axis names) the sharding.
"""

from collections.abc import Callable, Mapping
import dataclasses
import functools
import typing
from typing import Any, TypeVar, dataclass_transform

import jax
import jax.numpy as jnp

T = TypeVar("T")
Dims = Mapping[str, Any]  # axis letters to sizes, names of dtypes to dtypes, flags to bools


def leaf(axes: str, dtype: Any = jnp.int32, *, when: str = "", each: str = "") -> Any:
    """Declares an array field with the named axes (`""` for a scalar).

    A `dtype` that is a string is looked up in the dims. With `when`, the field is None unless
    that flag is true; with `each`, it is a tuple of one such array for each of that axis.
    """
    axes_ = tuple(axes.split())
    return dataclasses.field(metadata=dict(axes=axes_, dtype=dtype, when=when, each=each))


def each(axis: str) -> Any:
    """Declares a tuple field: one pytree for each of `axis`."""
    return dataclasses.field(metadata=dict(each=axis))


def static(**kwargs: Any) -> Any:
    """Declares a field that is compiled in: hashable, not an array."""
    return dataclasses.field(metadata=dict(static=True), **kwargs)


@dataclass_transform(frozen_default=True, field_specifiers=(leaf, each, static))
def pytree(cls: type[T]) -> type[T]:
    """Makes `cls` a frozen dataclass and registers it with JAX."""
    return jax.tree_util.register_dataclass(dataclasses.dataclass(frozen=True)(cls))


def host_value(cls: type[T], **leaves: Any) -> T:
    """Returns a `cls` of other leaves than device arrays: numpy's, or what stands for them."""
    return cls(**leaves)


@functools.cache
def _hints(cls: Any) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def build(make: Callable[..., Any], cls: Any, dims: Dims) -> Any:
    """Builds a `cls` by calling `make(axes, shape, dtype)` for each array field."""

    def value(field: dataclasses.Field) -> Any:
        meta, hint = field.metadata, _hints(cls)[field.name]
        if meta.get("static"):
            return dims[field.name]
        if meta.get("when") and not dims[meta["when"]]:
            return None
        if "axes" not in meta:
            element = typing.get_args(hint)[0] if "each" in meta else hint
            one = functools.partial(build, make, element, dims)
        else:
            shape = tuple(dims[a] for a in meta["axes"])
            dtype = dims[meta["dtype"]] if isinstance(meta["dtype"], str) else meta["dtype"]
            one = functools.partial(make, meta["axes"], shape, jnp.dtype(dtype))
        count = meta.get("each")
        return tuple(one() for _ in range(dims[count])) if count else one()

    return cls(**{field.name: value(field) for field in dataclasses.fields(cls)})


def abstract(cls: type[T], dims: Dims) -> T:
    """Returns `cls` filled with shapes and dtypes, for lowering without data."""
    return build(lambda _, shape, dtype: jax.ShapeDtypeStruct(shape, dtype), cls, dims)


def zeros(cls: type[T], dims: Dims) -> T:
    """Returns `cls` filled with zeros."""
    return build(lambda _, shape, dtype: jnp.zeros(shape, dtype), cls, dims)


def delete(tree: Any) -> None:
    """Gives the device memory of a tree's arrays back at once, whoever still holds them."""
    for leaf in jax.tree.leaves(tree):
        if isinstance(leaf, jax.Array):
            leaf.delete()


def is_alive(tree: Any) -> bool:
    """Whether no array was given away to a program that failed, nor came from one. Waits."""
    try:
        return not any(x.is_deleted() for x in jax.tree.leaves(jax.block_until_ready(tree)))
    except Exception:  # whatever a device makes JAX raise
        return False


def check(tree: Any, dims: Dims) -> None:
    """Checks that `tree` is what its class declares.

    Raises:
      ValueError: a field has another shape or dtype; names the field.
    """
    want = jax.tree.leaves_with_path(abstract(type(tree), dims))
    got = jax.tree.leaves_with_path(tree)
    for (path, w), (_, g) in zip(want, got, strict=True):
        if (w.shape, w.dtype) != (g.shape, g.dtype):
            raise ValueError(
                f"{type(tree).__name__}{jax.tree_util.keystr(path)} must be "
                f"{w.dtype}{list(w.shape)}, got {g.dtype}{list(g.shape)}"
            )
