"""Layers behind the pooling: products in float32, each with an activation and perhaps a norm."""

from collections.abc import Callable
from dataclasses import dataclass
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrunner.linear import Linear
from jaxrunner.model import Source
from jaxrunner.models.blocks.forward import NORMS
from jaxrunner.models.blocks.weights import Norm
from jaxrunner.models.sources import linear_source
from jaxrunner.pytree import each, host_value, nested, pytree
from jaxrunner.types import Array

ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "identity": lambda x: x,
    "tanh": jnp.tanh,
    "relu": jax.nn.relu,
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "silu": jax.nn.silu,
}


@dataclass(frozen=True)
class DenseConfig:
    """One layer: its sizes, and what its tensors are called."""

    name: str  # of the product in the checkpoint
    inputs: int
    outputs: int
    bias: bool = True
    activation: str = "identity"  # of `ACTIVATIONS`
    norm: str = ""  # name of the LayerNorm behind the activation, "" for none
    norm_bias: bool = False
    eps: float = 1e-5
    # Where the product is rows of an output layer, [V, inputs]: the rows, and V. One output of two
    # rows is what the second has over the first.
    rows: tuple[int, ...] = ()
    vocab_size: int = 0

    @property
    def dims(self) -> dict[str, Any]:
        """Axis sizes and flags for `pytree`."""
        return dict(
            dense_in=self.inputs, dense_out=self.outputs, dense_bias=self.bias,
            dense_norm=bool(self.norm), dense_norm_bias=self.norm_bias,
        )  # fmt: skip


@pytree
class Dense:
    """Weights of one layer."""

    product: Linear = nested(outputs="dense_out", inputs="dense_in", bias="dense_bias")
    norm: Norm | None = nested(E="dense_out", bias="dense_norm_bias", when="dense_norm")


@pytree
class HeadParams:
    """Weights of all layers behind the pooling."""

    layers: tuple[Dense, ...] = each("dense")


def run(configs: tuple[DenseConfig, ...], params: HeadParams, x: Array) -> Array:
    """Returns what the layers make of x, [..., inputs of the first]; in float32."""
    x = x.astype(jnp.float32)
    for config, layer in zip(configs, params.layers, strict=True):
        w = jax.tree.map(lambda a: a.astype(jnp.float32), layer.product)
        x = ACTIVATIONS[config.activation](w.product(x))
        if layer.norm is not None:
            x = NORMS["layer"](x, layer.norm.norm_weight, layer.norm.norm_bias, config.eps)
    return x


def sources(configs: tuple[DenseConfig, ...]) -> HeadParams:
    """Returns where the weights lie in a checkpoint."""
    return host_value(HeadParams, layers=tuple(map(_layer, configs)))


def _layer(c: DenseConfig) -> Dense:
    bias = Source.whole(f"{c.name}.bias", c.outputs) if c.bias else None
    norm = None
    if c.norm:
        offset = Source.whole(f"{c.norm}.bias", c.outputs) if c.norm_bias else None
        weight = Source.whole(f"{c.norm}.weight", c.outputs)
        norm = host_value(Norm, norm_weight=weight, norm_bias=offset)
    weight = Source.whole(f"{c.name}.weight", c.outputs, c.inputs)
    if c.rows:
        shape = c.vocab_size, c.inputs
        weight = Source((f"{c.name}.weight",), (shape,), functools.partial(_taken, c), None)
    return host_value(Dense, product=linear_source(weight, bias), norm=norm)


def _taken(c: DenseConfig, arrays: list[np.ndarray]) -> np.ndarray:
    """Returns the rows of an output layer that are scores, [outputs, inputs]."""
    rows = arrays[0][list(c.rows)]
    if c.outputs == len(c.rows):
        return rows
    return (rows[1:].astype(np.float32) - rows[:1].astype(np.float32)).astype(rows.dtype)
