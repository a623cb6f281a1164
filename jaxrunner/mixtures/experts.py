"""Weights of a mixture's experts, `ops.experts(x, routes, w)`, as one pytree.

Another way to store them, in 4 bits with scales for example, is another class that has what
`ExpertWeights` asks for.
"""

from collections.abc import Callable
from typing import ClassVar, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from jaxrunner.linear import precision_of
from jaxrunner.operation import Operation
from jaxrunner.ops.grouping import cut_tiles, group
from jaxrunner.pytree import leaf, pytree, static
from jaxrunner.types import Array

ALPHA, LIMIT = 1.702, 7.0  # of "clamped_swiglu"
MOST_ROWS, FEWEST_ROWS = 128, 8  # of one product in plain JAX


class Routes(NamedTuple):
    """The experts that compute each token, and their weights."""

    experts: Array  # [T, k], int32: X, one past the last, where nothing is to be computed
    weights: Array  # [T, k], float32: of the sum over a token's experts


class ExpertWeights(Protocol):
    """The interface of the pytree that holds the weights of a mixture's experts."""

    # (x, routes, w) -> `product`: candidates before plain JAX
    kernels: ClassVar[tuple[Operation, ...]]

    @property
    def num_experts(self) -> int:
        """Experts, X."""
        ...

    def product(self, x: Array, routes: Routes) -> Array:
        """Runs x, [T, E], through its experts, in plain JAX. Returns their weighted sum, [T, E]."""
        ...

    def differentiable(self, x: Array, routes: Routes) -> Array:
        """Does what `product` does, and has a gradient."""
        ...


@pytree
class Experts:
    """Weights in the dtype that is computed in."""

    gate_up: Array = leaf("X gate_up F E", "param")
    down: Array = leaf("X E F", "param")
    gate_up_bias: Array | None = leaf("X gate_up F", "param", when="bias")
    down_bias: Array | None = leaf("X E", "param", when="bias")
    activation: str = static(default="swiglu")  # or one more of `activate`
    kernels: ClassVar[tuple[Operation, ...]] = ()

    @property
    def num_experts(self) -> int:
        """Experts, X."""
        return self.gate_up.shape[0]

    def product(self, x: Array, routes: Routes) -> Array:
        """Runs x, [T, E], through its experts. Returns their weighted sum, [T, E]."""
        return by_tiles(x, routes, self.num_experts, self._of_one)

    def differentiable(self, x: Array, routes: Routes) -> Array:
        """Does what `product` does by one ragged product of all rows, which has a gradient."""
        k, X = routes.experts.shape[1], self.num_experts
        groups = group(routes.experts, X)
        expert = jnp.minimum(routes.experts.reshape(-1)[groups.order], X - 1)
        rows = _ragged(x[groups.order // k], self.gate_up.reshape(X, -1, x.shape[1]), groups.sizes)
        rows = rows.reshape(-1, *self.gate_up.shape[1:3])
        if self.gate_up_bias is not None:
            rows += self.gate_up_bias[expert].astype(jnp.float32)
        rows = _ragged(activate(rows, self.activation).astype(x.dtype), self.down, groups.sizes)
        if self.down_bias is not None:
            rows += self.down_bias[expert].astype(jnp.float32)
        return weighted_sum(rows[groups.place], routes).astype(x.dtype)

    def _of_one(self, expert: Array, x: Array) -> Array:
        """Runs rows, [block, E], through one expert. Returns [block, E], float32."""
        gate_up, down, gate_up_bias, down_bias = (
            None if w is None else jax.lax.dynamic_index_in_dim(w, expert, keepdims=False)
            for w in (self.gate_up, self.down, self.gate_up_bias, self.down_bias)
        )
        assert gate_up is not None and down is not None
        h = _product(x, gate_up.reshape(-1, x.shape[1])).reshape(-1, *gate_up.shape[:2])
        if gate_up_bias is not None:
            h += gate_up_bias.astype(jnp.float32)[None]
        out = _product(activate(h, self.activation).astype(x.dtype), down)
        return out if down_bias is None else out + down_bias.astype(jnp.float32)[None]


def by_tiles(
    x: Array, routes: Routes, num_experts: int, of_one: Callable[[Array, Array], Array]
) -> Array:
    """Runs x, [T, E], through experts by tiles. Returns their weighted sum, [T, E].

    Tiles of one expert's rows follow each other; the time goes by the tiles that there are.
    of_one: (expert, rows [block, E]) -> [block, E], float32.
    """
    T, k = routes.experts.shape
    block = rows_of_tile(T * k, num_experts)
    groups = group(routes.experts, num_experts)
    each = cut_tiles(groups.sizes, T * k, block)
    rows = jnp.pad(x[groups.order // k], ((0, block), (0, 0)))

    def run(i: Array, out: Array) -> Array:
        # Results of a tile beyond its rows are junk, which the next tile overwrites.
        some = jax.lax.dynamic_slice_in_dim(rows, each.first[i], block)
        made = of_one(each.expert[i], some)
        return jax.lax.dynamic_update_slice_in_dim(out, made, each.first[i], 0)

    out = jnp.zeros((T * k + block, x.shape[1]), jnp.float32)
    out = jax.lax.fori_loop(0, each.num, run, out)
    return weighted_sum(out[groups.place], routes).astype(x.dtype)


def rows_of_tile(num_routes: int, num_experts: int) -> int:
    """Returns the rows that one product takes: as many as an expert has, if all have alike."""
    mean = max(1, num_routes // num_experts)
    return min(max(1 << (mean - 1).bit_length(), FEWEST_ROWS), MOST_ROWS)


def activate(gate_up: Array, activation: str) -> Array:
    """Returns the units of MLPs, [rows, F], of their products, [rows, 2, F].

    "clamped_swiglu" is gpt-oss': both are bounded, the gate's sigmoid is steeper, and one is added
    to the other. "relu2" is of MLPs without gates, whose products are [rows, 1, F].
    """
    if activation == "relu2":
        return jnp.square(jax.nn.relu(gate_up[:, 0]))
    gate, up = gate_up[:, 0], gate_up[:, 1]
    if activation == "swiglu":
        return jax.nn.silu(gate) * up
    assert activation == "clamped_swiglu", activation
    gate, up = jnp.minimum(gate, LIMIT), jnp.clip(up, -LIMIT, LIMIT)
    return gate * jax.nn.sigmoid(ALPHA * gate) * (up + 1)


def weighted_sum(rows: Array, routes: Routes) -> Array:
    """Returns the sum over a token's experts, [T, E], of rows in the order of routes, [T * k, E].

    One after the other in float32: the sum is of the same bits whatever else is in the batch.
    """
    T, k = routes.weights.shape
    each = rows.reshape(T, k, -1)
    total = jnp.zeros_like(each[:, 0])
    for j in range(k):
        total += routes.weights[:, j, None] * each[:, j]
    return total


def _product(x: Array, weight: Array) -> Array:
    """Multiplies x, [rows, in], with weight, [out, in]. Returns [rows, out], float32."""
    contracted = ((1,), (1,)), ((), ())
    return jax.lax.dot_general(
        x, weight, contracted, precision=precision_of(x), preferred_element_type=jnp.float32
    )


def _ragged(x: Array, weights: Array, sizes: Array) -> Array:
    """Multiplies runs of x, [rows, in], with one weight each, [X, out, in]; returns float32."""
    return jax.lax.ragged_dot(
        x, jnp.swapaxes(weights, 1, 2), sizes, precision=precision_of(x),
        preferred_element_type=jnp.float32,
    )  # fmt: skip
