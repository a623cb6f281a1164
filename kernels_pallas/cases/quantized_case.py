"""Problems for products with weights of 8 and 4 bits."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrunner.kernels_pallas.cases.case import Case
from jaxrunner.kernels_pallas.quantized import widen, widen_tile
from jaxrunner.kernels_pallas.quantized.quantized_fit import TuningConfig
from jaxrunner.kernels_pallas.quantized.quantized_matmul import quantized_matmul
from jaxrunner.kernels_pallas.quantized.quantized_mlp import Few, quantized_mlp
from jaxrunner.kernels_pallas.quantized.quantized_tile import multiply, quantized_tile
from jaxrunner.types import Array


def quantized_products(
    T: int, E: int, F: int, code: str, *, run: int = 1, group: int = 0, zero: bool = False,
    max_parts: int = 1,
) -> Case:  # fmt: skip
    """T tokens times a weight, [F, E], of which `run` x `group` numbers, or all E, share a scale.

    Where its sum is cut into parts, they are added up.
    """
    packed = widen.PACKED[code]

    make = functools.partial(few_bits, T, E, F, code, run, group or E, zero)

    def run_it(x: Array, *weights: Array) -> Array:
        if max_parts == 1:
            return quantized_matmul(x, *weights, code=code)
        wide: Any = dict(max_parts=max_parts, dtype=jnp.float32)
        return quantized_matmul(x, *weights, code=code, **wide).sum(0).astype(x.dtype)

    scales = f"{run} x {group or 'all'}" + ", zeros" * zero + ", parts" * (max_parts > 1)
    name, options = f"{T} x {E} x {F}, {code}, {scales}", dict(code=code)
    return Case("quantized_matmul", name, make, run_it, E * F / packed, "TB/s", options)


def quantized_tiles(
    T: int, E: int, F: int, code: str, *, run: int = 1, group: int = 0,
    activation: str | None = None, words: bool = False, **sizes: Any,
) -> Case:  # fmt: skip
    """T tokens times a weight, as above, in tiles of the sizes of a TuningConfig.

    With an activation half of the F outputs are gates of the others. words: whether tokens come in
    the order of words, and units leave in it.
    """
    config = TuningConfig(**sizes)
    make = functools.partial(few_bits, T, E, F, code, run, group or E, False)

    def run_it(x: Array, weight: Array, scale: Array) -> Array:
        x = widen_tile.in_order(x) if words else x
        if config.parts == 1:
            for_words = words and activation is not None
            how: Any = dict(config=config, words=words, for_words=for_words)
            y = quantized_tile(x, weight, scale, **how, **options)
            return in_turn(y) if for_words else y
        wide: Any = dict(dtype=jnp.float32, config=config, words=words)
        return quantized_tile(x, weight, scale, **wide, **options).sum(0).astype(x.dtype)

    options: Any = dict(code=code, activation=activation)
    told = ", ".join(f"{key} {value}" for key, value in sizes.items())
    units = (f", units of {activation}" if activation else "") + ", words" * words
    name, amount = f"{T} x {E} x {F}, {code}, {told}{units}", E * F / widen.PACKED[code]
    return Case("quantized_tile", name, make, run_it, amount, "TB/s", options)


def quantized_mlps(T: int, E: int, F: int, code: str, *, run: int = 1, group: int = 0) -> Case:
    """The gated MLP of T tokens and F units, of which `run` x `group` numbers share a scale."""

    def make(seed: int) -> tuple[Array, ...]:
        x, *gate_up = few_bits(T, E, 2 * F, code, run, group or E, False, seed)
        return x, *gate_up, *few_bits(T, F, E, code, run, group or F, False, seed + 1)[1:]

    def run_it(x: Array, *weights: Array) -> Array:
        both = Few(*weights[:2]), Few(*weights[2:])
        return quantized_mlp(x, *both, code=code).sum(0).astype(x.dtype)

    name, amount = f"{T} x {E} x {F}, {code}", 3 * E * F / widen.PACKED[code]
    return Case("quantized_mlp", name, make, run_it, amount, "TB/s", dict(code=code))


def fitted_tiles(
    T: int, E: int, F: int, code: str, run: int, *, in_parts: bool = False,
    activation: str | None = None, words: bool = False,
) -> Case:  # fmt: skip
    """T tokens times a weight, with groups of 128, in tiles of the sizes that `fit` finds.

    words: whether tokens come as if they were in the order of words.
    """

    def run_it(x: Array, weight: Array, scale: Array) -> Array:
        y = multiply(x, weight, scale, in_parts=in_parts, words=words, **options)
        return y.sum(0).astype(x.dtype) if in_parts else y

    options: Any = dict(code=code, activation=activation)

    make = functools.partial(few_bits, T, E, F, code, run, 128, False)
    name = f"{T} x {E} x {F}, {code}, fitted" + ", parts" * in_parts
    name += (f", units of {activation}" if activation else "") + ", words" * words
    amount = E * F / widen.PACKED[code]
    return Case("quantized_tile", name, make, run_it, amount, "TB/s", options)


def in_turn(x: Array) -> Array:
    """Undoes `widen_tile.in_order`."""
    return x[..., np.argsort(widen_tile.in_order(np.arange(x.shape[-1])))]


def few_bits(
    T: int, E: int, F: int, code: str, run: int, group: int, zero: bool, seed: int
) -> tuple[Array, ...]:
    keys = jax.random.split(jax.random.key(seed), 4)
    stored, shape = (F, E // widen.PACKED[code]), (F // run, E // group)
    x = jax.random.normal(keys[0], (T, E), jnp.bfloat16)
    weight: Any = jax.random.randint(keys[1], stored, -128, 128, jnp.int8)
    if code == "float8_e4m3fn":
        weight = jax.random.normal(keys[1], stored, jnp.bfloat16).astype(code)
    elif widen.PACKED[code] > 1:
        weight = weight.astype(jnp.uint8)
    scale = jax.random.uniform(keys[2], shape, jnp.float32, 0.5, 1.5) * E**-0.5
    zeros = [jax.random.randint(keys[3], shape, -8, 8, jnp.int8)] if zero else []
    return x, weight, scale, *zeros
