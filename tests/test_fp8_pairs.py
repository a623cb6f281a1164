"""Tokens as pairs of fp8: what they are exactly, who gets them, and products with them."""

from dataclasses import replace
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrunner.kernels_pallas.cases import band_case
from jaxrunner.kernels_pallas.cases.pair_case import paired_norms, pairs
from jaxrunner.kernels_pallas.quantized.add_norm_fp8 import add_norm_fp8
from jaxrunner.kernels_pallas.quantized.add_norm_pairs import add_norm_pairs
from jaxrunner.kernels_pallas.quantized.fp8_pairs import fp8_pairs
from jaxrunner.kernels_pallas.quantized.quantized_tile import TuningConfig, quantized_tile
from jaxrunner.linear import Linear
from jaxrunner.ops import paired_products
from jaxrunner.ops.backends import fused
from jaxrunner.ops.rounded_tokens import PairedTokens
from jaxrunner.quantization.quantized_linear import QuantizedLinear
from jaxrunner.quantization.scheme import Activation, Scheme
from tests.support import oracles
from tests.support.lowering import lowers
from tests.support.quantized_shapes import BOTH_IN_BLOCKS, FP8, mlp_weights, shaped, weights
from tests.support.readers import NO_STEP, chosen, norm_and_mlp
from tests.support.states import interpreted

BLOCKS = Scheme(FP8, (128, 128))


def sums(numbers: Any, scale: Any) -> np.ndarray:
    high, low = oracles.wide(numbers)
    return (high + low) * oracles.wide(scale)[:, None]


@lowers
@pytest.mark.parametrize("size", [3072, 4096, 14336])
def test_a_pair_is_the_number_of_bfloat16(size: int):
    (x,) = pairs(8, size).make(0)
    x = x.at[1].set(0).at[2].multiply(1e-20).at[3].multiply(1e20).at[4, 1:].multiply(2.0**-8)
    numbers, scale = jax.jit(functools.partial(fp8_pairs, interpret=interpreted()))(x)
    found, want = sums(numbers, scale), oracles.wide(x)
    most = np.abs(want).max(1, keepdims=True)
    near = np.abs(want) >= most * 2.0**-9
    np.testing.assert_array_equal(found[near], want[near])
    assert (np.abs(found - want) <= most * 2.0**-17).all()
    mantissa, _ = np.frexp(oracles.wide(scale))
    assert (mantissa == 0.5).all()  # powers of two


@lowers
def test_pairs_of_units_are_of_a_swiglu():
    (x,) = pairs(8, 2, 1536).make(0)
    numbers, scale = jax.jit(functools.partial(fp8_pairs, interpret=interpreted()))(x)
    want = oracles.fp8_pairs(x)
    assert np.linalg.norm(sums(numbers, scale) - want) < 2e-3 * np.linalg.norm(want)


IN_BANDS = functools.partial(add_norm_fp8, pairs=True)


@lowers
@pytest.mark.parametrize("parts", [None, 0, 3])
@pytest.mark.parametrize("one_more", [False, True])
@pytest.mark.parametrize(
    ("kernel", "norms", "size", "floats"),
    [
        (add_norm_pairs, paired_norms, (8, 4096), sums),
        (IN_BANDS, band_case.banded_norms, (16, 2048), band_case.floats),
    ],
)
def test_norms_come_as_pairs(
    kernel: Any, norms: Any, size: tuple[int, int], floats: Any, one_more: bool, parts: int | None
):
    args = norms(*size, parts).make(0)
    how: Any = dict(eps=1e-5, one_more=one_more)
    run = functools.partial(kernel, **how, interpret=interpreted())
    total, numbers, scale = jax.jit(run)(*args)
    whole, normed = oracles.add_rms_norm(*args, **how)
    for found, want in (total, whole), (floats(numbers, scale), normed):
        assert np.linalg.norm(oracles.wide(found) - want) < 4e-3 * np.linalg.norm(want)


@lowers
@pytest.mark.parametrize(
    ("x", "words"),
    [
        (shaped(8, 4096, dtype=jnp.float16), "wants tokens in bfloat16, got float16"),
        (
            shaped(8, 640),
            r"wants tokens of which each of 8 warpgroups holds 512 .*, got \(8, 640\)",
        ),
        (shaped(8, 32768), r"wants tokens of which each of 8 warpgroups .*, got \(8, 32768\)"),
    ],
)
def test_other_tokens_are_refused(x: Any, words: str):
    with pytest.raises(ValueError, match=f"fp8_pairs {words}"):
        jax.eval_shape(fp8_pairs, x)


@lowers
@pytest.mark.parametrize(
    ("size", "weight", "words"),
    [(640, 640, "wants tokens of which"), (4096, 512, r"weight must be \[4096\], got \[512\]")],
)
def test_other_norms_are_refused(size: int, weight: int, words: str):
    x = shaped(8, size)
    with pytest.raises(ValueError, match=f"add_norm_pairs {words}"):
        jax.eval_shape(functools.partial(add_norm_pairs, eps=1e-5), x, x, shaped(weight))


@lowers
@pytest.mark.parametrize(
    ("x", "code", "group", "sizes", "words"),
    [
        (
            jnp.int8,
            FP8,
            128,
            {},
            "wants weights and pairs in float8_e4m3fn, .* got float8_e4m3fn, int8",
        ),
        (
            FP8,
            "int8",
            128,
            {},
            "wants weights and pairs in float8_e4m3fn, .* got int8, float8_e4m3fn",
        ),
        (FP8, FP8, 128, dict(terms=64), "wants 128 terms a step, .* got 64"),
        (FP8, FP8, 64, {}, "wants 128 terms a step, and as many to share a scale"),
    ],
)
def test_other_products_of_pairs_are_refused(
    x: Any, code: str, group: int, sizes: dict[str, Any], words: str
):
    given = shaped(2, 64, 512, dtype=x), shaped(512, 512, dtype=FP8)
    scales = shaped(4, 512 // group, dtype=jnp.float32), shaped(64, dtype=jnp.float32)
    run = functools.partial(quantized_tile, code=code, config=TuningConfig(**sizes))
    with pytest.raises(ValueError, match=f"quantized_tile {words}"):
        jax.eval_shape(run, *given, *scales)


MLP = mlp_weights(BLOCKS)
PAIRS, UNITS = "quantized_tile of pairs", "two products, units as pairs"


@lowers
@pytest.mark.parametrize(
    ("tokens", "gate_up", "down", "names"),
    [
        (96, *MLP, ("add_norm_pairs", PAIRS, UNITS)),
        (128, *MLP, ("add_norm_pairs", PAIRS, UNITS)),
        (256, *MLP, ("add_rms_norm", None, "quantized_tile of units")),
        (64, *mlp_weights(Scheme(FP8)), ("add_norm_pairs", PAIRS, UNITS)),
        (96, MLP[0], mlp_weights(Scheme("int8"))[1], ("add_norm_pairs", PAIRS, "two products")),
        (64, mlp_weights(Scheme("int8"))[0], MLP[1], ("add_rms_norm", "quantized_tile", UNITS)),
        (64, replace(MLP[0], permutation=shaped(4096, dtype=jnp.int32)), MLP[1],
         ("add_rms_norm", "quantized_tile", UNITS)),
    ],
)  # fmt: skip
def test_pairs_are_made_for_weights_in_fp8(
    tokens: int, gate_up: Any, down: Any, names: tuple[str | None, ...]
):
    told = chosen(norm_and_mlp, shaped(tokens, 4096), shaped(4096), gate_up, down)
    assert (told["add_norm"], told.get("gate_up"), told["mlp"]) == names


@lowers
def test_a_sum_in_parts_is_whole_with_a_bias():
    def run(ops: Any, x: Any, norm: Any, w: Any) -> Any:
        return ops.project(ops.add_norm(x, x, norm, 1e-5, readers=(w,))[1], w)

    w = weights(BLOCKS, 4096, 4096)
    given = shaped(64, 4096), shaped(4096)
    assert chosen(run, *given, w)["project"] == f"{PAIRS} in parts"
    assert chosen(run, *given, replace(w, bias=shaped(4096)))["project"] == PAIRS


@lowers
def test_floats_are_not_made_pairs_for_one_product():
    def run(ops: Any, x: Any, w: Any) -> Any:
        return ops.linear(x, w)

    assert chosen(run, shaped(64, 4096), weights(BLOCKS, 6144, 4096))["linear"] == "quantized_tile"


@lowers
def test_who_cannot_take_pairs_gets_floats():
    def run(ops: Any, x: Any, norm: Any, *readers: Any) -> Any:
        return ops.add_norm(x, x, norm, 1e-5, readers=readers)[1]

    def ended(ops: Any, x: Any, norm: Any, w: Any) -> Any:
        return ops.add_norm(x, x, norm, 1e-5, False, norm, readers=(w,))[1]

    given, w = (shaped(64, 4096), shaped(4096)), weights(BLOCKS, 6144, 4096)
    for readers in (w, Linear(shaped(512, 4096), None)), (w, weights(BOTH_IN_BLOCKS, 512, 4096)):
        assert chosen(run, *given, *readers)["add_norm"] == "add_rms_norm"
    assert chosen(ended, *given, w)["add_norm"] == "add_rms_norm"
    gates = paired_products.refuses_gates
    assert gates(given[0], MLP[1], "gelu") == "wants gates of silu, got gelu"
    assert "one axis of inputs" in str(gates(given[0], Linear(shaped(4096, 14336), None), "silu"))
    h = PairedTokens(shaped(2, 64, 1024, dtype=FP8), shaped(64, dtype=jnp.float32), jnp.bfloat16)
    assert h.shape == (64, 1024)


@pytest.mark.gpu
@pytest.mark.parametrize("num", [64, 128])
@pytest.mark.parametrize("activation", [None, Activation(FP8, group=128)])
def test_a_norm_and_an_mlp_are_those_of_float64(num: int, activation: Activation | None):
    """With inputs in fp8, too, whose rounding shows what pairs keep."""
    keys = jax.random.split(jax.random.key(0), 4)
    x, norm = (jax.random.normal(keys[0], shape, jnp.bfloat16) for shape in ((num, 4096), (4096,)))
    scheme = replace(BLOCKS, activation=activation)

    def real(key: jax.Array, *shape: int) -> QuantizedLinear:
        weight = jax.random.normal(key, shape, jnp.bfloat16).astype(FP8)
        scale = jnp.full((*shape[:-2], shape[-2] // 128, shape[-1] // 128), 2.0**-6)
        return QuantizedLinear(weight, scale, None, None, None, None, scheme)

    gate_up, down = real(keys[1], 2, 3072, 4096), real(keys[2], 4096, 3072)
    y, total = jax.jit(functools.partial(norm_and_mlp, fused(NO_STEP)))(x, norm, gate_up, down)
    whole, normed = oracles.add_rms_norm(x, x, norm, eps=1e-5)
    h = oracles.wide(jnp.asarray(normed, jnp.bfloat16))
    both = h @ oracles.few_bits(*gate_up.matrices(), code=FP8).T
    units = oracles.units(*np.split(oracles.wide(jnp.asarray(both, jnp.bfloat16)), 2, -1))
    want = units @ oracles.few_bits(*down.matrices(), code=FP8).T
    found = oracles.wide(y).reshape(-1, num, 4096).sum(0)
    far = np.linalg.norm(found - want) / np.linalg.norm(want)
    assert far < 8e-3 if activation is None else 2e-2 < far < 8e-2
    assert np.linalg.norm(oracles.wide(total) - whole) < 4e-3 * np.linalg.norm(whole)
