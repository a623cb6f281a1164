"""The products of a model that adapters may change, and where modules' rows lie in each."""

from collections.abc import Sequence
import functools
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxrunner import pytree
from jaxrunner.api.validation import shown
from jaxrunner.heads.pooled import PooledConfig
from jaxrunner.linear import Linear
from jaxrunner.lora.product import Product
from jaxrunner.lora.saved_modules import EMBED, HEAD, TIED_HEAD
from jaxrunner.lora.stacks import BASE, TARGET, per_head
from jaxrunner.model import Source
from jaxrunner.parallel.kv_heads import copied_sources
from jaxrunner.parallel.mesh import TENSOR
from jaxrunner.parallel.pipeline import StageConfig
from jaxrunner.parallel.tensor import ShardedConfig
from jaxrunner.quantization.quantized_config import QuantizedConfig
from jaxrunner.speculators.drafter import DraftedConfig

WEIGHT = ".weight"  # the end of the name of a module's tensor


class Places(NamedTuple):
    """Where the rows and columns of modules' matrices lie in a weight, [*outputs, *inputs]."""

    module: np.ndarray  # [*outputs], an index into the modules
    row: np.ndarray  # [*outputs]
    column: np.ndarray  # [*inputs]


def find_products(model: Any, config: Any) -> tuple[Product, ...]:
    """Returns the products of layers, by their paths in the params.

    Experts of a mixture are none, nor is a head, nor a layer behind a pooling.
    """
    kept = dict(_linears(model, config))
    shapes = _shapes(model, config)
    return tuple(
        Product(path, modules_of(source), _num_blocks(source, shapes[path]))
        for path, source in kept.items()
        if path in shapes
    )


def places_of(model: Any, config: Any) -> dict[str, Places]:
    """Returns, for each path of `find_products`, where its modules lie."""
    shapes, known = _shapes(model, config), {}
    found = {}
    for path, source in _linears(model, config):
        if path not in shapes:
            continue
        key = _key(source.join), source.shapes, shapes[path]
        if key not in known or key[0] is None:  # equal layers are joined alike
            known[key] = _places(source, shapes[path])
        found[path] = known[key]
    return found


def module_shapes(model: Any, config: Any) -> dict[str, tuple[int, int]]:
    """Returns the outputs and inputs of each module that adapters may change, by its name."""
    kept, found = _shapes(model, config), dict[str, tuple[int, int]]()
    for path, source in _linears(model, config):
        if path in kept:
            found |= {
                m: (s[0], s[1]) for m, s in zip(modules_of(source), source.shapes, strict=True)
            }
    return found


def find_saved(model: Any, config: Any, wanted: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """Returns the fields of embedding and head that adapters may have instead, and their modules.

    wanted: ends of these modules' names.

    Raises:
      ValueError: it has another name; says which there are.
    """
    if not wanted:
        return ()
    known = whole_modules(model, config)
    ends = {field: name.rsplit(".", 1)[-1] for field, name in known.items()}
    if not {*wanted} <= {*ends.values()}:
        raise ValueError(
            f"lora_modules_to_save={shown(tuple(wanted))} must be embedding and head, which are "
            f"{list(ends.values())} in this model: name these"
        )
    return tuple((field, known[field]) for field, end in ends.items() if end in wanted)


def whole_modules(model: Any, config: Any) -> dict[str, str]:
    """Returns the names of embedding and head, by the fields that hold them in float."""
    _, sources = _float_sources(model, config)
    found = {}
    if isinstance(embed := getattr(sources, EMBED, None), Source):
        found[EMBED] = embed.names[0].removesuffix(WEIGHT)
        if isinstance(config, PooledConfig):  # it scores no tokens
            return found
        head = getattr(sources, HEAD, None)
        source = getattr(head, "weight", None)
        found[HEAD] = source.names[0].removesuffix(WEIGHT) if source is not None else TIED_HEAD
    return found


def spare_names(model: Any, config: Any) -> tuple[str, ...]:
    """Returns what names of tensors begin with that are in a model's files and not read."""
    if isinstance(config, DraftedConfig):
        return spare_names(config.model, config.target)
    return getattr(config, "family", model).spare


def modules_of(source: Source) -> tuple[str, ...]:
    """Returns the names of the modules whose tensors a weight is made of."""
    return tuple(name.removesuffix(WEIGHT) for name in source.names)


def _linears(model: Any, config: Any) -> list[tuple[str, Source]]:
    """Returns the sources of products' weights, as they would lie in a float checkpoint."""
    prefix, sources = _float_sources(model, config)

    def is_leaf(node: Any) -> bool:
        return isinstance(node, Linear | Source)

    nodes = jax.tree.leaves_with_path(sources, is_leaf=is_leaf)
    found = [
        (prefix + pytree.name_of(path), node.weight) for path, node in nodes if _has_modules(node)
    ]
    return [*found, *((prefix + path, source) for path, source in per_head(sources).items())]


def _float_sources(model: Any, config: Any) -> tuple[str, Any]:
    """Returns where weights lie in the params, and their sources in a checkpoint of floats."""
    if (part := _part(config)) is not None:
        prefix, own, below = part
        return prefix, _float_sources(own, below)[1]
    if isinstance(config, StageConfig):
        config = config.shards[config.rank]
    whole, family = getattr(config, "whole", config), model
    if isinstance(config, ShardedConfig):
        family = config.family
    if isinstance(whole, QuantizedConfig):
        family, whole = whole.family, whole.plain
    if isinstance(config, ShardedConfig):
        return "", copied_sources(family, whole, config.mesh.shape[TENSOR])
    return "", family.sources(whole)


def _part(config: Any) -> tuple[str, Any, Any] | None:
    """Returns where the params of a model hold those of the one with layers, and which it is."""
    if isinstance(config, DraftedConfig):
        return TARGET, config.model, config.target
    if isinstance(config, PooledConfig):
        return BASE, config.model, config.base
    return None


def _has_modules(node: Any) -> bool:
    """Whether a node is made of matrices of modules."""
    if not isinstance(node, Linear):
        return False
    source: Any = node.weight
    named = all(name.endswith(WEIGHT) for name in source.names)
    return named and all(len(shape) == 2 for shape in source.shapes)


def _shapes(model: Any, config: Any) -> dict[str, tuple[tuple[int, ...], tuple[int, ...]]]:
    """Returns the sizes of outputs and inputs of each product of layers, by path."""
    found: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {}

    def note(path: str, given: Any, dims: Any) -> tuple[type, Any, Any]:
        if given is not None and given["outputs"] != "V":
            axes = (given[name].split() for name in ("outputs", "inputs"))
            out, inner = (tuple(pytree.size(dims, axis) for axis in part) for part in axes)
            found[prefix + path] = out, inner
        return Linear, given, dims

    prefix, model, config = _part(config) or ("", model, config)
    dims = config.dims
    kinds = dims.get("kinds", {}) | {Linear: note}
    tree = pytree.abstract(model.params, {**dims, "kinds": kinds, "param": "float32"})
    of_heads = {prefix + path: (w.shape[:-1], w.shape[-1:]) for path, w in per_head(tree).items()}
    return found | of_heads


def _num_blocks(weight: Source, shape: tuple[tuple[int, ...], tuple[int, ...]]) -> int:
    """Returns how many modules lie one behind the other along the first axis of outputs."""
    (outputs, _), num = shape, len(weight.names)
    if num == 1 or outputs[0] != num:
        return 1
    narrow = [np.full((rows, 1), i) for i, (rows, _) in enumerate(weight.shapes)]
    try:
        joined = weight.join(narrow)
    except ValueError:  # it knows the width
        return 1
    alike = joined.shape == (*outputs, 1) and all(np.all(joined[i] == i) for i in range(num))
    return num if alike else 1


def _places(source: Source, shape: tuple[tuple[int, ...], tuple[int, ...]]) -> Places:
    outputs, inputs = shape

    def joined(values: Sequence[np.ndarray]) -> np.ndarray:
        views = [np.broadcast_to(v, s) for v, s in zip(values, source.shapes, strict=True)]
        made = source.join([np.asarray(view, np.int32) for view in views])
        return made.reshape(int(np.prod(outputs)), int(np.prod(inputs)))

    rows = joined([np.arange(rows)[:, None] for rows, _ in source.shapes])
    columns = joined([np.arange(columns)[None] for _, columns in source.shapes])
    if len(source.names) == 1:
        module = np.zeros(outputs, np.int32)
    else:
        module = joined([np.full((1, 1), i) for i in range(len(source.names))])[:, 0].reshape(
            outputs
        )
    if rows.shape[0] > 1 and (rows[:, 0] == rows[0, 0]).all():  # stored with inputs first
        rows, columns = columns, rows
    return Places(module, rows[:, 0].reshape(outputs), columns[0].reshape(inputs))


def _key(join: Any) -> Any:
    """Returns what two functions that join tensors alike have in common; None if not known."""
    if isinstance(join, functools.partial):
        parts = _key(join.func), *map(_key_of, join.args), *map(_key_of, join.keywords.values())
        return None if None in parts else parts
    cells = tuple(_key_of(cell.cell_contents) for cell in getattr(join, "__closure__", None) or ())
    return None if None in cells else (getattr(join, "__code__", join), cells)


def _key_of(value: Any) -> Any:
    if callable(value):
        return _key(value)
    try:
        hash(value)
    except TypeError:
        return None
    return type(value), value
