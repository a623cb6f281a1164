"""Wraps a model so that its products have quantised weights; its interface stays the same.

A family declares products as `Linear`, and the sources of float tensors. A `Method` says which
products a checkpoint holds quantised, and which tensors their leaves are read from.
"""

from collections import Counter
from dataclasses import dataclass, field
import functools
from typing import Any, Protocol, cast

import jax

from jaxrunner import pytree
from jaxrunner.config import ModelConfig, WrappingConfig
from jaxrunner.linear import Linear
from jaxrunner.mixtures.experts import Experts
from jaxrunner.model import Model, Source
from jaxrunner.pytree import host_value
from jaxrunner.quantization.placing import Placing
from jaxrunner.quantization.quantized_experts import QuantizedExperts
from jaxrunner.quantization.quantized_linear import QuantizedLinear
from jaxrunner.quantization.scheme import Given, Scheme
from jaxrunner.quantization.widened import widened

OF_EXPERTS = "gate_up", "down"  # products of `Experts`
EXPERTS = ".experts."  # in the names of their modules


class Method(Protocol):
    """A format of quantised weights, with the settings of one checkpoint. Hashable."""

    @property
    def name(self) -> str:
        """Its name in messages, and in `LLM(quantization=...)`."""
        ...

    def scheme(self, module: str, shape: tuple[int, int]) -> Scheme | None:
        """Returns how the weights of a module, [outputs, inputs], are held; None for as floats."""
        ...

    @property
    def stacks(self) -> Scheme | None:
        """How experts are held that a float checkpoint has in one tensor; None for as floats."""
        ...

    def sources(self, placing: Placing, bias: Source | None) -> QuantizedLinear:
        """Returns where the leaves of a product's weights come from."""
        ...


@dataclass(frozen=True)
class QuantizedConfig(WrappingConfig):
    """The config of a model, with how its products are held."""

    family: Model = field(repr=False)
    plain: Any  # its own config
    method: Any  # a `Method`
    schemes: tuple[tuple[str, Scheme], ...]  # by path in the params

    @functools.cached_property
    def dims(self) -> dict[str, Any]:
        """The dims of the model, with the stand-ins for `Linear` and `Experts`."""
        kinds = self.plain.dims.get("kinds", {})
        stand_in = functools.partial(_stand_in, dict(self.schemes))
        experts = functools.partial(_stand_in_experts, dict(self.schemes))
        return self.plain.dims | dict(kinds=kinds | {Linear: stand_in, Experts: experts})


def _stand_in_experts(
    schemes: dict[str, Scheme], path: str, given: Given | None, dims: Given
) -> tuple[type, Given | None, Given]:
    """Returns what is built in the place of `Experts` at a path; its products have their own."""
    few = any(f"{path}.{name}" in schemes for name in OF_EXPERTS)
    return (QuantizedExperts if few else Experts), given, dims


def _stand_in(
    schemes: dict[str, Scheme], path: str, given: Given | None, dims: Given
) -> tuple[type, Given | None, Given]:
    """Returns what is built in the place of `Linear` at a path, as `pytree.build` asks."""
    if path not in schemes:
        return Linear, given, dims
    assert given is not None
    return QuantizedLinear, *schemes[path].declare(given, dims)


def quantize(model: Model, config: ModelConfig, method: Method) -> tuple[Model, ModelConfig]:
    """Returns a model whose products are held as a method says.

    Raises:
      ValueError: modules that one product computes are held in several ways, or sizes that the
        method does not hold; names them.
    """
    schemes = tuple(
        (path, scheme)
        for path, linear in _linears(model, config)
        if (scheme := _scheme(method, path, linear.weight)) is not None
    )
    if not schemes:
        raise ValueError(
            f"quantization={method.name!r} leaves all products of {config.architecture} as they "
            "are: leave it out"
        )
    quantized = QuantizedConfig(model, config, method, schemes)
    pytree.abstract(model.params, quantized.dims | {"param": "float32"})  # refuses sizes by name
    return model._replace(sources=sources), cast(ModelConfig, quantized)


def sources(config: QuantizedConfig) -> Any:
    """Returns where each weight lies in a checkpoint."""
    held = pytree.abstract(config.family.params, config.dims | {"param": "float32"})
    floats, made = config.family.sources(config.plain), functools.partial(_made, config)
    return jax.tree.map(made, floats, held, is_leaf=_is_whole)


def plain_config(config: Any) -> Any:
    """Returns a model's own config, whether its products are quantised or not."""
    return config.plain if isinstance(config, QuantizedConfig) else config


def describe(config: Any) -> str:
    """Returns the report's line about quantised weights; empty where all weights are floats."""
    schemes = Counter(scheme for _, scheme in getattr(config, "schemes", ()))
    if not schemes:
        return ""
    said = "; ".join(
        f"{count} products in {scheme.describe()}" for scheme, count in schemes.items()
    )
    return f"weights: {config.method.name}, {said}\n"


def _made(config: QuantizedConfig, node: Any, held: Any) -> Any:
    if isinstance(held, QuantizedExperts):
        own = {name: _made(config, w, getattr(held, name)) for name, w in _of_experts(node).items()}
        return host_value(QuantizedExperts, **vars(node) | own)
    if isinstance(node, Source):
        return widened(node, config.method) if node.is_module else node
    if not isinstance(held, QuantizedLinear):
        return node
    return config.method.sources(Placing(node.weight, node.num_in, held), node.bias)


def _linears(model: Model, config: ModelConfig) -> list[tuple[str, Any]]:
    """Returns the sources of a model's products, by path."""
    nodes = jax.tree.leaves_with_path(model.sources(config), is_leaf=_is_whole)
    found = []
    for path, node in nodes:
        if isinstance(node, Linear):
            found.append((pytree.name_of(path), node))
        elif isinstance(node, Experts):
            found += [
                (f"{pytree.name_of(path)}.{name}", w) for name, w in _of_experts(node).items()
            ]
    return found


def _of_experts(node: Any) -> dict[str, Linear]:
    """Returns the sources of experts' products, without their biases."""
    names = {name: getattr(node, name) for name in OF_EXPERTS}
    return {n: host_value(Linear, weight=source, bias=None) for n, source in names.items()}


def _is_whole(node: Any) -> bool:
    return isinstance(node, Linear | Experts | Source)


def _scheme(method: Method, path: str, source: Any) -> Scheme | None:
    """Returns how the modules of one product are held."""
    if EXPERTS in path and len(source.names) == 1:
        return method.stacks
    found = {}
    for name, (rows, *rest) in zip(source.names, source.shapes, strict=True):
        if len(rest) != 1 or not name.endswith(".weight"):
            return None  # no module of a published checkpoint
        module = name.removesuffix(".weight")
        found[module] = method.scheme(module, (rows, rest[0]))
    first, *others = found
    for other in others:
        if found[other] != found[first]:
            raise ValueError(
                f"{first} and {other} must be quantised alike, as one product computes both, got "
                f"{found[first] or 'float'} and {found[other] or 'float'}: name both or none"
            )
    return found[first]
