"""A product's weights with the adapters that are on the device, and what these add to it."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from jaxrunner.indexing import take
from jaxrunner.linear import precision_of
from jaxrunner.ops.grouping import cut_tiles, group
from jaxrunner.pytree import leaf, pytree
from jaxrunner.types import Array

# Up to here a product with the ranks of all places costs little beside the base product; it reads
# each adapter once, whoever has it.
MOST_RANKS = 512
LARGEST_TILE = 256  # tokens; for each tile an adapter's matrices are copied


@pytree
class Stack:
    """Matrices of all adapters of one product: y += b a x, with the scale in b.

    Of each block of outputs they lie one behind the other, in places of one rank; what an adapter
    does not fill is zero, and adds exact zeros.
    """

    a: Array = leaf("lora_blocks lora_places lora_rank inputs", "param")
    b: Array = leaf("lora_blocks lora_places lora_rank block_outputs", "param")


@pytree
class AdaptedLinear:
    """Stands in for weights of a product in steps in which a request has an adapter.

    It has no `product`: what tokens have which adapter is known to `ops` alone.
    """

    base: Any  # a `Weights`
    stack: Stack

    @property
    def num_inputs(self) -> int:
        """The inputs of its product."""
        return self.base.num_inputs

    def on_shard(self, axis: str) -> "AdaptedLinear":
        """Returns the weights of a device that has some of the inputs of a product.

        What adapters add is a part of a sum there too; a bias is added by one device alone.
        """
        base = self.base.on_shard(axis) if hasattr(self.base, "on_shard") else self.base
        if (bias := getattr(base, "bias", None)) is not None:
            base = replace(base, bias=jnp.where(jax.lax.axis_index(axis) == 0, bias, 0))
        return replace(self, base=base)


def delta(x: Array, stack: Stack, place: Array, dtype: Any) -> Array:
    """Returns what adapters add to a product of x, [T, *inputs]: [T, outputs] in `dtype`, flat.

    place: [T], of each token's adapter, plus one; 0 for none. Sums are of float32, and a token's
    bits do not depend on who else is in the batch.
    """
    places, rank = stack.a.shape[1:3]
    of = _masked if places * rank <= MOST_RANKS else _grouped
    return of(x.reshape(x.shape[0], -1), stack, place, dtype)


def _masked(x: Array, stack: Stack, place: Array, dtype: Any) -> Array:
    """Computes `delta` of x, [T, I], by two products with the ranks of all adapters one behind the
    other: between them, those of other adapters become zero."""
    T, (blocks, places, rank) = len(x), stack.a.shape[:3]
    low = _own(x, stack, place).astype(x.dtype).reshape(T, blocks, places * rank)
    b = stack.b.reshape(blocks, places * rank, -1)
    if blocks == 1:
        return _dot(low[:, 0], b[0], (((1,), (0,)), ((), ())), dtype)
    return jnp.moveaxis(_dot(low, b, (((2,), (1,)), ((1,), (0,))), dtype), 0, 1).reshape(T, -1)


def own_ranks(x: Array, stack: Stack, place: Array) -> Array:
    """Returns a x of each token's own adapter, [T, blocks * rank] in the dtype of x, [T, I].

    Those of a token without adapter are zeros.
    """
    return _own(x, stack, place).sum(2).astype(x.dtype).reshape(len(x), -1)


def _own(x: Array, stack: Stack, place: Array) -> Array:
    """Returns a x, [T, blocks, places, rank] in float32: zeros but of a token's own adapter."""
    T, (blocks, places, rank) = len(x), stack.a.shape[:3]
    a = stack.a.reshape(blocks * places * rank, -1)
    low = _dot(x, a, (((1,), (1,)), ((), ())), jnp.float32).reshape(T, blocks, places, rank)
    own = place[:, None] == 1 + jnp.arange(places)[None]
    return jnp.where(own[:, None, :, None], low, 0)


def _grouped(x: Array, stack: Stack, place: Array, dtype: Any) -> Array:
    """Computes `delta` of x, [T, I], in tiles of tokens of one adapter, each with its ranks."""
    T, (blocks, places, rank) = len(x), stack.a.shape[:3]
    tile = tile_rows(T, places)
    own = jnp.where(place > 0, place - 1, places).astype(jnp.int32)
    groups = group(own[:, None], places)
    tiles = cut_tiles(groups.sizes, T, tile)
    step = jnp.arange(tile, dtype=jnp.int32)[None]
    token = groups.order[jnp.clip(tiles.first[:, None] + step, 0, T - 1)]
    token = jnp.where(step < tiles.rows[:, None], token, T)  # [N, tile]
    a, b = (part.reshape(blocks, places, rank, -1)[:, tiles.expert] for part in (stack.a, stack.b))
    x_NtI = take(x, token)
    x_bNtI = jnp.broadcast_to(x_NtI[None], (blocks, *x_NtI.shape))
    low_bNtr = _dot(x_bNtI, a, (((3,), (3,)), ((0, 1), (0, 1))), jnp.float32).astype(x.dtype)
    y_bNtO = _dot(low_bNtr, b, (((3,), (2,)), ((0, 1), (0, 1))), dtype)
    y = jnp.moveaxis(y_bNtO, 0, 2).reshape(token.size, -1)
    return jnp.zeros((T, y.shape[1]), y.dtype).at[token.reshape(-1)].set(y, mode="drop")


def delta_per_head(x: Array, stack: Stack, place: Array, part: slice, *, up: bool) -> Array:
    """Returns what adapters add to a product of each head, [T, H, ...] in float32.

    x: [T, H, inputs] where `up`, with `part` of the outputs; else [T, H, some outputs], multiplied
    with the inputs that they are made of. The stack is of [outputs, H] and [inputs].
    """
    places = stack.a.shape[1]
    a_PRI, b_PROH = stack.a[0], stack.b[0][:, :, part]
    own_TP = place[:, None] == 1 + jnp.arange(places)[None]
    low_THPR = _einsum("thi,pri->thpr" if up else "tho,proh->thpr", x, a_PRI if up else b_PROH)
    low_THPR = jnp.where(own_TP[:, None, :, None], low_THPR, 0).astype(x.dtype)
    if up:
        return _einsum("thpr,proh->tho", low_THPR, b_PROH)
    return _einsum("thpr,pri->thi", low_THPR, a_PRI)


def _einsum(axes: str, x: Array, y: Array) -> Array:
    return jnp.einsum(axes, x, y, precision=precision_of(x), preferred_element_type=jnp.float32)


def tile_rows(num_tokens: int, places: int) -> int:
    """Returns the tokens of a tile: as many as an adapter has of a batch that they share, a power
    of two."""
    share = max(1, num_tokens // places)
    return min(LARGEST_TILE, 1 << (share - 1).bit_length())


def _dot(x: Array, y: Array, dims: Any, dtype: Any) -> Array:
    precision = precision_of(x)
    return jax.lax.dot_general(x, y, dims, precision, preferred_element_type=dtype)
