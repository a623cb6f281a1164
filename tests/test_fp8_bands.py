"""Pairs of fp8 in bands of rows: what they are exactly, who gets them, and products with them."""

from dataclasses import replace
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrunner.kernels_pallas.cases.band_case import (
    banded,
    banded_norms,
    banded_products,
    banded_units,
    floats,
)
from jaxrunner.kernels_pallas.products.add_norm import add_rms_norm
from jaxrunner.kernels_pallas.quantized.add_norm_fp8 import add_norm_fp8
from jaxrunner.kernels_pallas.quantized.fp8_blocks import fp8_blocks
from jaxrunner.kernels_pallas.quantized.fp8_gates import fp8_gates
from jaxrunner.kernels_pallas.quantized.fp8_tiles import TuningConfig
from jaxrunner.linear import Linear
from jaxrunner.ops import banded_products as ops_of_bands
from jaxrunner.ops.rounded_tokens import BandedTokens
from jaxrunner.quantization.scheme import Scheme
from tests.support import oracles
from tests.support.lowering import lowers
from tests.support.quantized_shapes import BOTH_IN_BLOCKS, FP8, mlp_weights, shaped, weights
from tests.support.readers import chosen, norm_and_mlp
from tests.support.states import interpreted

BLOCKS = Scheme(FP8, (128, 128))
MLP = mlp_weights(BLOCKS)
BANDED = "two products of pairs"


def far(got: Any, want: Any) -> float:
    got, want = oracles.wide(got), oracles.wide(want)
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


@lowers
def test_a_pair_is_the_number_but_for_its_last_bits():
    x, residual, weight = banded_norms(8, 4096).make(0)
    x = x.at[1, :128].set(0).at[2].multiply(1e-20).at[3, 130:].multiply(2.0**-8)
    run = functools.partial(add_norm_fp8, eps=1e-5, interpret=interpreted())
    args = x, residual * 0, weight
    total, numbers, scale = jax.jit(functools.partial(run, pairs=True))(*args)
    np.testing.assert_array_equal(oracles.wide(total), oracles.wide(x))
    _, want = oracles.add_rms_norm(*args, eps=1e-5)
    found, most = oracles.wide(floats(numbers, scale)), np.abs(want).reshape(8, -1, 128).max(-1)
    assert (np.abs(found - want) <= 2.0**-7 * np.abs(want) + most.repeat(128, 1) * 2.0**-17).all()
    mantissa, _ = np.frexp(oracles.wide(scale))
    assert (mantissa == 0.5).all()  # powers of two


@pytest.mark.gpu
def test_bands_are_the_norm_that_is_a_kernel_of_its_own():
    args = banded_norms(64, 4096, 4).make(0)
    run = functools.partial(add_norm_fp8, eps=1e-5, pairs=True)
    _, *bands = jax.jit(run)(*args)
    _, norm = jax.jit(functools.partial(add_rms_norm, eps=1e-5))(*args)
    found, want = oracles.wide(floats(*bands)), oracles.wide(norm)
    most = np.abs(want).reshape(64, -1, 128).max(-1).repeat(128, 1)
    near = np.abs(want) >= most * 2.0**-9
    np.testing.assert_array_equal(found[near], want[near])
    assert (np.abs(found - want) <= most * 2.0**-17).all()


@lowers
@pytest.mark.parametrize(
    ("sizes", "config"),
    [
        ((64, 384, 128), {}),
        ((72, 512, 256), dict(num_ctas=2)),  # of the second tile most rows are none
        ((136, 1280, 256, 256), dict(num_ctas=2)),
    ],
)
def test_units_are_those_of_both_products(sizes: tuple[int, ...], config: dict[str, int]):
    args = banded_units(*sizes).make(0)
    how: Any = dict(pairs=True, interpret=interpreted(), config=TuningConfig(**config))
    found = jax.jit(functools.partial(fp8_gates, **how))(*args)
    assert found[0].shape == (2 * sizes[0], sizes[2])
    assert far(floats(*found), oracles.fp8_gates_of_pairs(*args)) < 6e-3


@lowers
@pytest.mark.parametrize(
    ("sizes", "config"),
    [
        ((64, 384, 128), {}),
        ((136, 1280, 256), dict(num_ctas=2)),
        ((64, 2048, 256), dict(parts=4)),
        ((200, 512, 256), dict(halves=2, num_ctas=4)),
    ],
)
def test_the_kernel_computes_what_its_oracle_does(
    sizes: tuple[int, int, int], config: dict[str, int]
):
    args = banded_products(*sizes).make(0)
    how: Any = dict(pairs=True, dtype=jnp.float32, interpret=interpreted())
    got = jax.jit(functools.partial(fp8_blocks, **how, config=TuningConfig(**config)))(*args)
    got = got.sum(0) if got.ndim == 3 else got
    assert got.shape == (sizes[0], sizes[2])
    assert far(got, oracles.fp8_blocks_of_pairs(*args)) < 1e-3


def test_bands_hold_tokens():
    x = jax.random.normal(jax.random.key(0), (16, 256), jnp.bfloat16)
    numbers, scale = banded(x)
    np.testing.assert_array_equal(oracles.wide(floats(numbers, scale)), oracles.wide(x))


@lowers
@pytest.mark.parametrize(
    ("x", "words"),
    [
        (shaped(8, 4096, dtype=jnp.float16), "wants pairs of bfloat16, got float16"),
        (shaped(12, 4096), "wants bands of 8 tokens, got 12"),
    ],
)
def test_other_tokens_are_refused(x: Any, words: str):
    with pytest.raises(ValueError, match=f"add_norm_fp8 {words}"):
        run = functools.partial(add_norm_fp8, eps=1e-5, pairs=True)
        jax.eval_shape(run, x, x, shaped(4096, dtype=x.dtype))


OTHER = mlp_weights(Scheme("int8"))


@lowers
@pytest.mark.parametrize(
    ("tokens", "gate_up", "down", "names"),
    [
        (64, *MLP, ("add_norm_bands", BANDED)),
        (64, MLP[0], OTHER[1], ("add_norm_bands", "two products")),
        (64, MLP[0], replace(MLP[1], bias=shaped(4096)), ("add_norm_bands", BANDED)),
        (96, *MLP, ("add_norm_pairs", "two products, units as pairs")),
        (64, replace(MLP[0], bias=shaped(2, 14336)), MLP[1],
         ("add_norm_pairs", "two products, units as pairs")),
        (64, OTHER[0], MLP[1], ("add_rms_norm", "two products, units as pairs")),
        (64, *mlp_weights(Scheme(FP8)), ("add_norm_pairs", "two products, units as pairs")),
    ],
)  # fmt: skip
def test_bands_are_made_for_gates_in_fp8(
    tokens: int, gate_up: Any, down: Any, names: tuple[str, str]
):
    told = chosen(norm_and_mlp, shaped(tokens, 4096), shaped(4096), gate_up, down)
    assert (told["add_norm"], told["mlp"]) == names
    if names == ("add_norm_bands", "two products"):
        assert told["gate_up"] == "fp8_blocks of pairs"


@lowers
def test_who_cannot_take_bands_gets_others():
    def run(ops: Any, x: Any, norm: Any, w: Any) -> Any:
        return ops.add_norm(x, x, norm, 1e-5, readers=(w,))[1]

    given, w = (shaped(64, 4096), shaped(4096)), weights(BLOCKS, 6144, 4096)
    assert chosen(run, *given, w)["add_norm"] == "add_norm_pairs"
    assert chosen(run, *given, weights(BOTH_IN_BLOCKS, 512, 4096))["add_norm"] == "add_norm_fp8"
    h = BandedTokens(shaped(128, 4096, dtype=FP8), shaped(32, 128, dtype=jnp.float32), jnp.bfloat16)
    assert h.shape == (64, 4096)
    refuses: Any = ops_of_bands.MLP.refuses
    silu: Any = "silu", None
    assert refuses(h, *MLP, *silu) is None
    assert refuses(h, *MLP, "gelu", None) == "wants gates of silu, got gelu"
    assert refuses(given[0], *MLP, *silu) == "wants tokens that come as pairs in bands"
    plain = Linear(shaped(4096, 14336), None)
    assert refuses(h, MLP[0], plain, *silu) == "wants weights of few bits"
    order = replace(MLP[1], permutation=shaped(14336, dtype=jnp.int32))
    assert "held as they come" in str(refuses(h, MLP[0], order, *silu))
