"""A mixture's experts with quantised weights: a `QuantizedLinear` with an axis of experts."""

from dataclasses import replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from jaxrunner.linear import Linear
from jaxrunner.mixtures.experts import Experts, Routes, activate, by_tiles
from jaxrunner.operation import Operation
from jaxrunner.pytree import leaf, nested, pytree, static
from jaxrunner.quantization.quantized_linear import QuantizedLinear
from jaxrunner.types import Array


@pytree
class QuantizedExperts:
    """Stands in for `Experts`; a product of which a checkpoint has floats stays one of floats.

    The tile of rows that one expert computes widens this expert's weights, in its turn of a loop:
    the others stay as they are stored, on a GPU too, where there is no kernel for them.
    """

    gate_up: Linear = nested(
        outputs="experts gate_up expert_units", inputs="expert_inputs", stack="experts"
    )
    down: Linear = nested(outputs="experts expert_inputs", inputs="expert_units", stack="experts")
    gate_up_bias: Array | None = leaf("X gate_up F", "param", when="bias")
    down_bias: Array | None = leaf("X E", "param", when="bias")
    activation: str = static(default="swiglu")
    kernels: ClassVar[tuple[Operation, ...]] = ()

    @classmethod
    def of(cls, experts: Experts) -> "QuantizedExperts":
        """Returns experts as products of floats."""
        products = Linear(experts.gate_up, None), Linear(experts.down, None)
        return cls(*products, experts.gate_up_bias, experts.down_bias, experts.activation)

    @property
    def num_experts(self) -> int:
        """Experts, X."""
        return self.gate_up.weight.shape[0]

    def product(self, x: Array, routes: Routes) -> Array:
        """Runs x, [T, E], through its experts. Returns their weighted sum, [T, E].

        Each product of an expert is rounded to the dtype of x, as those outside of experts are.
        """
        return by_tiles(x, routes, self.num_experts, self._of_one)

    def differentiable(self, x: Array, routes: Routes) -> Array:
        """Does what `product` does and has a gradient. All weights are widened, inputs stay."""
        gate_up, down = (_values(w, x.dtype) for w in (self.gate_up, self.down))
        floats = Experts(gate_up, down, self.gate_up_bias, self.down_bias, self.activation)
        return floats.differentiable(x, routes)

    def on_shard(self, axis: str) -> "QuantizedExperts":
        """Returns the weights of a device that has some of the units of each expert."""
        if isinstance(self.down, QuantizedLinear):
            return replace(self, down=self.down.on_shard(axis))
        return self

    def _of_one(self, expert: Array, x: Array) -> Array:
        """Runs rows, [block, E], through one expert. Returns [block, E], float32."""
        own: QuantizedExperts = jax.tree.map(
            lambda w: jax.lax.dynamic_index_in_dim(w, expert, keepdims=False), self
        )
        h = own.gate_up.product(x).astype(jnp.float32)
        if own.gate_up_bias is not None:
            h += own.gate_up_bias.astype(jnp.float32)[None]
        out = own.down.product(activate(h, self.activation).astype(x.dtype)).astype(jnp.float32)
        return out if own.down_bias is None else out + own.down_bias.astype(jnp.float32)[None]


def _values(w: Any, dtype: Any) -> Array:
    return w.values(dtype) if isinstance(w, QuantizedLinear) else w.weight
