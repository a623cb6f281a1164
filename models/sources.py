"""Where weights lie in checkpoints: products, packed or alone, norms, names that differ."""

from collections.abc import Callable
import functools
from typing import Any

import jax
import numpy as np

from jaxrunner.linear import Linear
from jaxrunner.model import Source
from jaxrunner.pytree import host_value

Join = Callable[[list[np.ndarray]], np.ndarray]
Change = Callable[[np.ndarray], np.ndarray]


def norm_sources(prefix: str, width: int) -> dict[str, Source]:
    """Returns where the norms of a layer lie."""
    names = dict(attn_norm="input_layernorm", mlp_norm="post_attention_layernorm")
    return {field: Source.whole(f"{prefix}{name}.weight", width) for field, name in names.items()}


def mlp_sources(prefix: str, units: int, width: int, *, bias: bool = False) -> dict[str, Linear]:
    """Returns where the products of a gated MLP lie: `gate_up` and `down`."""
    gate_up = {f"{prefix}gate_proj": units, f"{prefix}up_proj": units}
    return dict(
        gate_up=packed_source(gate_up, np.stack, width, bias=bias),
        down=product_source(f"{prefix}down_proj", width, units, bias=bias),
    )


def product_source(name: str, outputs: int, inputs: int, *, bias: bool = False) -> Linear:
    """Returns the source of a product that lies alone, [outputs, inputs]."""
    end = Source.whole(f"{name}.bias", outputs) if bias else None
    return linear_source(Source.whole(f"{name}.weight", outputs, inputs), end)


def packed_source(names: dict[str, int], join: Join, width: int, *, bias: bool = False) -> Linear:
    """Returns the source of several products of x, [T, width], that are held as one.

    names: of the products, and how many outputs each has.
    """

    def of(part: str, *inner: int) -> Source:
        shapes = tuple((rows, *inner) for rows in names.values())
        return joined_source(tuple(f"{name}.{part}" for name in names), shapes, join)

    return linear_source(of("weight", width), of("bias") if bias else None)


def linear_source(weight: Source | None, bias: Source | None = None, *, num_in: int = 1) -> Linear:
    """Returns the sources of a product's weights."""
    return host_value(Linear, weight=weight, bias=bias, num_in=num_in)


def transposed_source(
    name: str,
    shape: tuple[int, int, int],
    split: Change | None = None,
    joined: Change | None = None,
) -> Source:
    """Returns the source of a weight, [X, out, in], that is stored as [X, in, out].

    split: takes its outputs apart; joined: undoes that.
    """
    X, out, inner = shape
    split, joined = split or np.ascontiguousarray, joined or np.asarray
    return Source(
        (name,),
        ((X, inner, out),),
        lambda arrays: split(np.swapaxes(arrays[0], 1, 2)),
        lambda held: [np.ascontiguousarray(np.swapaxes(joined(held), 1, 2))],
    )


def conv_source(name: str, channels: int, width: int, join: Join | None = None) -> Source:
    """Returns the source of a convolution of each channel by itself, [C, W], or as `join` has it.

    join: makes what is held of rows, as in `packed_source`.
    """
    shape = channels, 1, width
    if join is None:
        return Source.whole(f"{name}.weight", *shape, held=(channels, width))

    def held(arrays: list[np.ndarray]) -> np.ndarray:
        return join([arrays[0].reshape(channels, width)])

    return joined_source((f"{name}.weight",), (shape,), held)


def joined_source(
    names: tuple[str, ...], shapes: tuple[tuple[int, ...], ...], join: Join
) -> Source:
    """Returns the source of what `join` makes of tensors by moving their numbers."""
    return Source(names, shapes, join, functools.partial(unpack, join, shapes))


def by_groups(groups: int, sizes: tuple[int, ...], arrays: list[np.ndarray]) -> np.ndarray:
    """Returns rows of groups, [groups, sum(sizes), ...], of rows that lie part by part.

    sizes: rows of a group in each part. A part has those of all groups, one behind the other.
    """
    rows = np.concatenate(arrays)
    parts = np.split(rows, np.cumsum([groups * size for size in sizes])[:-1])
    return np.concatenate([part.reshape(groups, -1, *rows.shape[1:]) for part in parts], 1)


def renamed(sources: Any, names: dict[str, str]) -> Any:
    """Returns sources whose tensors have names in which each key of `names` is its value."""

    def one(source: Source) -> Source:
        found = source.names
        for old, new in names.items():
            found = tuple(name.replace(old, new) for name in found)
        return source._replace(names=found)

    return jax.tree.map(one, sources, is_leaf=lambda node: isinstance(node, Source))


def unpack(join: Callable, shapes: tuple[tuple[int, ...], ...], packed: np.ndarray):
    """Splits a packed weight, by packing indices in its place."""
    ends = np.cumsum([np.prod(shape) for shape in shapes])
    index = [np.arange(e - np.prod(s), e).reshape(s) for e, s in zip(ends, shapes, strict=True)]
    flat = np.empty(packed.size, packed.dtype)
    flat[join(index).ravel()] = packed.ravel()
    return [flat[i] for i in index]
