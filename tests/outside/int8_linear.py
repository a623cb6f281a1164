"""Weights of 8 bits with a scale for each output, made of a float checkpoint while it is read."""

from dataclasses import dataclass
import functools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxrunner.hf_config import Settings
from jaxrunner.linear import Linear, multiply
from jaxrunner.model import Model, Source
from jaxrunner.models.decoder_config import DecoderConfig
from jaxrunner.models.llama import Params, llama
from jaxrunner.operation import Operation
from jaxrunner.pytree import host_value, leaf, pytree, static
from jaxrunner.types import Array


@pytree
class Int8Linear:
    """Stands in for `Linear`: weight * scale is what it multiplies with."""

    weight: Array = leaf("outputs inputs", jnp.int8)
    scale: Array = leaf("outputs", jnp.float32)
    bias: Array | None = leaf("outputs", "param", when="bias")
    num_in: int = static(default=1)  # axes of `inputs`
    kernels: ClassVar[tuple[Operation, ...]] = ()

    def product(self, x: Array) -> Array:
        """Multiplies x, [..., *inputs]. Returns [..., *outputs]."""
        y = multiply(x, self.weight.astype(x.dtype), axes=self.num_in)
        y = y * jnp.broadcast_to(self.scale.astype(x.dtype), y.shape)
        return y if self.bias is None else y + jnp.broadcast_to(self.bias, y.shape)


@dataclass(frozen=True)
class Config(DecoderConfig):
    """A Llama whose products are all of 8 bits."""

    @property
    def dims(self) -> dict[str, Any]:
        """Axis sizes and flags for `pytree`, and the class that stands in for `Linear`."""
        return super().dims | dict(kinds={Linear: Int8Linear})


def read(settings: Settings) -> Config:
    """Reads config.json."""
    return Config(**vars(llama.read(settings)))


def quantized(weight: np.ndarray, num_in: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns numbers of 8 bits and their scales, of weight [*outputs, *inputs]."""
    axes = tuple(range(weight.ndim - num_in, weight.ndim))
    wide = weight.astype(np.float32)
    scale = np.abs(wide).max(axes, keepdims=True) / np.float32(127)
    return np.round(wide / scale).astype(np.int8), scale.reshape(weight.shape[: axes[0]])


def sources(config: Config) -> Params:
    """Returns where each weight lies in a Hugging Face checkpoint, or what it is made of."""
    return jax.tree.map(_quantizing, llama.sources(config), is_leaf=_is_linear)


def _is_linear(node: Any) -> bool:
    return isinstance(node, Linear | Source)


def _quantizing(node: Any) -> Any:
    if isinstance(node, Source):
        return node
    join, n = functools.partial(_part, node.weight.join, node.num_in), node.num_in
    weight, scale = (
        node.weight._replace(join=functools.partial(join, i), split=None) for i in (0, 1)
    )
    return host_value(Int8Linear, weight=weight, scale=scale, bias=node.bias, num_in=n)


def _part(join: Any, num_in: int, i: int, arrays: list[np.ndarray]) -> np.ndarray:
    return quantized(join(arrays), num_in)[i]


int8_llama = Model(read, Params, llama.embed, llama.layers, llama.logits, sources)
