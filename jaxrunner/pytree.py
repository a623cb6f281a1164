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
Given = Mapping[str, Any] | None
Dims = Mapping[str, Any]  # axis letters to sizes, names of dtypes to dtypes, flags to bools


def leaf(axes: str, dtype: Any = jnp.int32, *, when: str = "", each: str = "") -> Any:
    """Declares an array field with the named axes (`""` for a scalar).

    A `dtype` that is a string is looked up in the dims. With `when`, the field is None unless
    these flags are true; with `each`, it is a tuple of one such array for each of that axis.
    """
    axes_ = tuple(axes.split())
    return dataclasses.field(metadata=dict(axes=axes_, dtype=dtype, when=when, each=each))


def each(axis: str) -> Any:
    """Declares a tuple field: one pytree for each of `axis`."""
    return dataclasses.field(metadata=dict(each=axis))


def nested(*, when: str = "", **given: str | int) -> Any:
    """Declares a pytree whose class leaves axes or flags open: `nested(outputs="K P D", bias="b")`.

    given: names here of its open axes and flags, where flags without a name are off; or numbers,
    the values of its static fields. With `when`, the field is None unless that flag is true.
    """
    return dataclasses.field(metadata=dict(given=given, when=when))


def part(name: str) -> Any:
    """Declares a pytree whose class is in the dims: `dims[name]` is (class, further dims)."""
    return dataclasses.field(metadata=dict(part=name))


def by_name(*, default_factory: Callable[[], dict[str, Any]]) -> Any:
    """Declares a dict field: pytrees by their names."""
    return dataclasses.field(default_factory=default_factory, metadata=dict(by_name=True))


def static(**kwargs: Any) -> Any:
    """Declares a field that is compiled in: hashable, not an array."""
    return dataclasses.field(metadata=dict(static=True), **kwargs)


@dataclass_transform(
    frozen_default=True, field_specifiers=(leaf, each, nested, part, by_name, static)
)
def pytree(cls: type[T]) -> type[T]:
    """Makes `cls` a frozen dataclass and registers it with JAX."""
    return jax.tree_util.register_dataclass(dataclasses.dataclass(frozen=True)(cls))


def host_value(cls: type[T], **leaves: Any) -> T:
    """Returns a `cls` whose leaves are no device arrays: numpy arrays, or placeholders."""
    return cls(**leaves)


@functools.cache
def _hints(cls: Any) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def build(
    make: Callable[..., Any], cls: Any, dims: Dims, given: Given = None, path: tuple[str, ...] = ()
) -> Any:
    """Builds a `cls` by calling `make(axes, shape, dtype)` for each array field.

    given: open axes and flags of `cls`, as in `nested`. path: field names and indices down to it.
    In the dims an axis of `each` is a count, or a list with further dims of each part, where
    "class" is the part's own class. The size of axis "F/2" is half of F. An optional
    `dims["kinds"]` maps classes to the classes that are built in their place, or to functions
    (path, given, dims) that return such a class with its given and dims.
    """
    cls, given, dims = _stand_in(cls, dims, given, path)
    names = given or {}

    def is_on(flag: str) -> bool:
        return dims[names.get(flag, flag)] if given is None or flag in names else False

    def value(field: dataclasses.Field) -> Any:
        meta, hint = field.metadata, _hints(cls)[field.name]
        if meta.get("static"):
            return dims[field.name] if given is None else names.get(field.name, field.default)
        if meta.get("by_name"):
            return {}
        if meta.get("part"):
            own, more = dims[meta["part"]]
            return build(make, own, {**dims, **more})  # a tree of its own, with paths of its own
        if not all(map(is_on, (meta.get("when") or "").split())):
            return None
        if "axes" not in meta:
            element = typing.get_args(hint)[0] if "each" in meta or meta.get("when") else hint

            def one(dims: Dims, *at: str) -> Any:
                own = dims.get("class", element)
                dims = {name: size for name, size in dims.items() if name != "class"}
                return build(make, own, dims, meta.get("given"), (*path, field.name, *at))

        else:
            axes = tuple(" ".join(names.get(axis, axis) for axis in meta["axes"]).split())
            dtype = dims[meta["dtype"]] if isinstance(meta["dtype"], str) else meta["dtype"]

            def one(dims: Dims, *at: str) -> Any:
                return make(axes, tuple(size(dims, axis) for axis in axes), jnp.dtype(dtype))

        if not meta.get("each"):
            return one(dims)
        count = dims[meta["each"]]
        parts = [{}] * count if isinstance(count, int) else count
        return tuple(one({**dims, **part}, str(i)) for i, part in enumerate(parts))

    return cls(**{field.name: value(field) for field in dataclasses.fields(cls)})


def _stand_in(cls: Any, dims: Dims, given: Given, path: tuple[str, ...]) -> tuple[Any, Given, Dims]:
    """Returns the class that is built in the place of `cls`, with its given and dims."""
    kind = dims.get("kinds", {}).get(cls, cls)
    return (kind, given, dims) if isinstance(kind, type) else kind(".".join(path), given, dims)


def size(dims: Dims, axis: str) -> int:
    """Returns the size of an axis; that of "F/128" is how many runs of 128 make up F."""
    name, _, run = axis.partition("/")
    return dims[name] // int(run or 1)


def abstract(cls: type[T], dims: Dims) -> T:
    """Returns `cls` filled with shapes and dtypes, for lowering without data."""
    return build(lambda _, shape, dtype: jax.ShapeDtypeStruct(shape, dtype), cls, dims)


def zeros(cls: type[T], dims: Dims) -> T:
    """Returns `cls` filled with zeros."""
    return build(lambda _, shape, dtype: jnp.zeros(shape, dtype), cls, dims)


def name_of(path: Any) -> str:
    """Returns the path of a node, as JAX gives it, as text: "layers.0.qkv"."""
    return jax.tree_util.keystr(path, simple=True, separator=".")


def delete(tree: Any) -> None:
    """Frees the device memory of a tree's arrays at once, even if they are still referenced."""
    for leaf in jax.tree.leaves(tree):
        if isinstance(leaf, jax.Array):
            leaf.delete()


def is_alive(tree: Any) -> bool:
    """Whether no array was donated to a failed program, or is its output. Waits for the arrays."""
    try:
        return not any(x.is_deleted() for x in jax.tree.leaves(jax.block_until_ready(tree)))
    except Exception:  # any error of a device
        return False


def check(tree: Any, dims: Dims) -> None:
    """Checks that `tree` has the shapes and dtypes that its class declares.

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
