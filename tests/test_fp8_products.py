"""Products of fp8 with fp8 in blocks: which a kernel serves, and what it computes."""

from dataclasses import replace
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrunner.kernels_pallas.cases.fp8_case import fp8_products
from jaxrunner.kernels_pallas.quantized.fp8_blocks import fp8_blocks, num_halves, num_parts
from jaxrunner.kernels_pallas.quantized.fp8_rounding import fp8_rounding
from jaxrunner.kernels_pallas.quantized.fp8_tiles import TuningConfig
from jaxrunner.kernels_pallas.registers import OWN_REGISTERS
from jaxrunner.linear import Linear
from jaxrunner.ops import products
from jaxrunner.ops.fp8_products import BLOCKS as OF_FP8_BLOCKS
from jaxrunner.ops.fp8_products import IN_PARTS as OF_FP8_BLOCKS_IN_PARTS
from jaxrunner.ops.fp8_products import of_gates, refuses_gates
from jaxrunner.quantization.activations import rounded
from jaxrunner.quantization.quantized_linear import QuantizedLinear
from jaxrunner.quantization.scheme import Activation, Scheme
from tests.support import oracles
from tests.support.lowering import cuda, lowers
from tests.support.states import interpreted

FP8 = "float8_e4m3fn"
ROUNDING = Activation(FP8, group=128)
BLOCKS = Scheme(FP8, (128, 128), activation=ROUNDING)


def weights(scheme: Scheme = BLOCKS, inputs: int = 256) -> QuantizedLinear:
    """Returns random weights, [2, 128, inputs]."""
    keys = jax.random.split(jax.random.key(0))
    weight = jax.random.normal(keys[0], (2, 128, inputs), jnp.bfloat16).astype(FP8)
    shape = (2, 128 // scheme.block[0], inputs // (scheme.block[1] or inputs))
    scale = jax.random.uniform(keys[1], shape, jnp.float32, 0.5, 1.5)
    return QuantizedLinear(weight, scale, None, None, None, None, scheme)


def tokens(num: int, inputs: int = 256, dtype: Any = jnp.bfloat16) -> jax.Array:
    return jax.random.normal(jax.random.key(1), (num, inputs), dtype)


def near(got: Any, want: Any) -> bool:
    got, want = map(oracles.wide, (got, want))
    return bool(np.linalg.norm(got - want) < 0.01 * np.linalg.norm(want))


def test_the_oracle_of_the_kernel_is_what_plain_jax_computes():
    """In float32, in which plain JAX rounds nothing more than the inputs."""
    w, x = weights(), tokens(8, dtype=jnp.float32)
    numbers, x_scale = rounded(x, ROUNDING, None, None)
    got = np.asarray(w.product(x)).reshape(8, 256)
    want = oracles.fp8_blocks(numbers, x_scale.T, w.weight.reshape(256, 256), w.scale.reshape(2, 2))
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-3)


@lowers
@pytest.mark.parametrize(
    ("sizes", "config"),
    [
        ((136, 1280, 256), dict(num_ctas=2)),  # tiles whose last scales are of two steps
        ((256, 1152, 256), dict(num_ctas=4, together=1)),  # clusters share weights
        ((64, 1152, 512), dict(num_ctas=2)),  # clusters share tokens
        ((72, 384, 128), {}),  # no cluster, rows of scales that are padded
        ((64, 2048, 256), dict(parts=8)),  # parts that begin between the places of copies
        # Two tiles of outputs at once, and a last run of tiles that is shorter than others.
        ((520, 512, 512), dict(halves=2, num_ctas=4, together=2)),
    ],
)
def test_the_kernel_computes_what_its_oracle_does(
    sizes: tuple[int, int, int], config: dict[str, int]
):
    args = fp8_products(*sizes).make(0)
    run = functools.partial(
        fp8_blocks, config=TuningConfig(**config), dtype=jnp.float32, interpret=interpreted()
    )
    got, want = oracles.wide(jax.jit(run)(*args)), oracles.fp8_blocks(*args)
    got = got.sum(0) if got.ndim == 3 else got
    assert np.linalg.norm(got - want) < 1e-3 * np.linalg.norm(want)


@pytest.mark.gpu
@pytest.mark.parametrize("num", [64, 200, 256, 512])
def test_the_kernel_computes_what_plain_jax_does(num: int):
    w, x = weights(), tokens(num)
    assert OF_FP8_BLOCKS.refuses(x, w) is None
    assert near(*(jax.jit(run)(x, w) for run in (OF_FP8_BLOCKS.run, lambda x, w: w.product(x))))


@pytest.mark.gpu
@pytest.mark.parametrize("num", [64, 256])
def test_parts_add_up_to_what_plain_jax_computes(num: int):
    w, x = weights(inputs=2048), tokens(num, 2048)
    assert OF_FP8_BLOCKS_IN_PARTS.refuses(x, w) is None
    parts = jax.jit(OF_FP8_BLOCKS_IN_PARTS.run)(x, w)
    assert parts.ndim == 3 and parts.dtype == jnp.float32
    assert near(parts.sum(0).reshape(num, 2, 128), jax.jit(lambda x, w: w.product(x))(x, w))


@lowers
@pytest.mark.parametrize("num", [8, 48, 512])
def test_tokens_are_rounded_as_plain_jax_rounds_them(num: int):
    x = tokens(num, 512).at[3].set(0)
    want, scales = jax.jit(lambda x: rounded(x, ROUNDING, None, None))(x)
    numbers, got = jax.jit(lambda x: fp8_rounding(x, interpret=interpreted()))(x)
    np.testing.assert_array_equal(got, scales.T)
    np.testing.assert_array_equal(oracles.wide(numbers), oracles.wide(want))


def units_of(both: jax.Array) -> jax.Array:
    """Returns SwiGLU of gates and units, where XLA rounds other intermediate results."""
    gate, unit = np.moveaxis(oracles.wide(both), 1, 0)
    gate = oracles.wide(jnp.asarray(gate / (1 + np.exp(-gate)), jnp.bfloat16))
    return jnp.asarray(gate * unit, jnp.bfloat16)


@lowers
def test_units_of_gates_are_rounded_as_they_come():
    both = tokens(64, 2048).reshape(64, 2, 1024)
    numbers, scales = jax.jit(lambda x: fp8_rounding(x, interpret=interpreted()))(both)
    want, other = rounded(units_of(both), ROUNDING, None, None)
    assert (oracles.wide(numbers) != oracles.wide(want)).mean() < 1e-3
    np.testing.assert_allclose(scales, other.T, rtol=2**-7)


@pytest.mark.gpu
@pytest.mark.parametrize("bias", [False, True])
def test_units_of_gates_are_multiplied(bias: bool):
    w = weights(inputs=1024)
    if bias:
        w = replace(w, bias=jnp.full((2, 128), 3.0, jnp.bfloat16))
    both = tokens(64, 2048).reshape(64, 2, 1024)
    got = jax.jit(of_gates)(both, w)
    assert got.ndim == 3 and got.dtype == (jnp.bfloat16 if bias else jnp.float32)
    want = jax.jit(lambda x, w: w.product(x))(units_of(both), w).reshape(64, 256)
    assert near(got.reshape(64, 256) if bias else got.sum(0), want)


@lowers
@pytest.mark.parametrize("tokens", [64, 256, 512])
def test_steps_of_many_tokens_are_served(tokens: int):
    x = jax.ShapeDtypeStruct((tokens, 256), jnp.bfloat16)
    assert OF_FP8_BLOCKS.refuses(x, weights()) is None
    with cuda():
        text = jax.jit(OF_FP8_BLOCKS.run).trace(x, weights()).lower(lowering_platforms=("cuda",))
    assert "mosaic_gpu" in text.as_text() and text.out_info.shape == (tokens, 2, 128)


@lowers
@pytest.mark.parametrize(
    ("tokens", "dtype", "scheme", "words"),
    [
        (512, jnp.bfloat16, Scheme(FP8, (128, 128)), "weights and inputs in fp8"),
        (512, jnp.bfloat16, Scheme(FP8, activation=Activation(FP8)), "share a scale by 128"),
        (56, jnp.bfloat16, BLOCKS, "at least 64 tokens, got 56"),
        (512, jnp.float32, BLOCKS, "bfloat16 or float16, got float32"),
        (516, jnp.bfloat16, BLOCKS, "multiples of 8 tokens and of 128 terms, got (516, 256)"),
        (512, jnp.bfloat16, Scheme(FP8, (64, 128), activation=BLOCKS.activation), "of 128 outputs"),
    ],
)
def test_other_products_are_refused_in_words(tokens: int, dtype: Any, scheme: Scheme, words: str):
    x: Any = jax.ShapeDtypeStruct((tokens, 256), dtype)
    assert words in str(OF_FP8_BLOCKS.refuses(x, weights(scheme)))


@lowers
@pytest.mark.parametrize(
    ("x", "x_scale", "weight", "words"),
    [
        ((8, 256, jnp.bfloat16), (2, 8, jnp.float32), (256, 256), "tokens and weights in float8"),
        ((8, 256, FP8), (2, 8, jnp.bfloat16), (256, 256), "scales in float32, got bfloat16"),
        ((8, 256, FP8), (2, 8, jnp.float32), (192, 256), "outputs of 128, got 256 and 192"),
        ((8, 256, FP8), (1, 8, jnp.float32), (256, 256), r"a scale for 128 terms, got \(1, 8\)"),
        ((16, 256, FP8), (2, 8, jnp.float32), (256, 256), r"scales of 16 tokens, .*\(2, 8\)"),
    ],
)
def test_the_kernel_refuses_in_words(x: Any, x_scale: Any, weight: Any, words: str):
    tokens, x_scale, weight = (jnp.zeros(of[:2], of[2]) for of in (x, x_scale, (*weight, FP8)))
    with pytest.raises(ValueError, match=f"fp8_blocks wants .*{words}"):
        fp8_blocks(tokens, x_scale, weight, jnp.ones((2, 2)))


@lowers
def test_the_kernel_refuses_parts_that_do_not_divide_its_sums():
    x, scale = jnp.zeros((8, 256), FP8), jnp.ones((2, 8))
    with pytest.raises(ValueError, match="fp8_blocks wants parts that divide 2 steps, got 4"):
        fp8_blocks(x, scale, x[:1].repeat(256, 0), jnp.ones((2, 2)), config=TuningConfig(parts=4))


def test_tiles_at_once_are_those_that_end_first():
    best = functools.partial(num_halves, config=TuningConfig())
    for F in 4096, 6144, 28672:
        assert best(8192, F) == (2 if OWN_REGISTERS else 1)
    assert best(64, 6144) == best(8192, 384) == num_halves(8192, 6144, TuningConfig(parts=4)) == 1


@lowers
def test_the_kernel_refuses_tiles_at_once_that_do_not_divide_its_outputs():
    x, scale = jnp.zeros((8, 256), FP8), jnp.ones((2, 8))
    for halves in 2, 3:
        want = f"fp8_blocks wants halves=1, or 2 where they divide 3 tiles, or 0, got {halves}"
        with pytest.raises(ValueError, match=want):
            config = TuningConfig(halves=halves)
            fp8_blocks(x, scale, x[:1].repeat(384, 0), jnp.ones((3, 2)), config=config)


@pytest.mark.parametrize(("tokens", "terms", "outputs"), [(64, 14336, 4096), (256, 4096, 4096)])
def test_parts_leave_fewer_multiprocessors_idle(tokens: int, terms: int, outputs: int):
    parts = num_parts(tokens, terms, outputs)
    tiles = -(-tokens // 128) * (outputs // 128)
    assert terms // 128 % parts == 0 and 100 < tiles * parts <= 132
    assert num_parts(8192, terms, outputs) == 1


@lowers
@pytest.mark.parametrize(
    ("shape", "dtype", "words"),
    [
        ((12, 256), jnp.bfloat16, r"multiples of 8 tokens and of 128 terms, got \(12, 256\)"),
        ((8, 2, 192), jnp.bfloat16, r"multiples of 8 tokens and of 128 terms, got \(8, 2, 192\)"),
        ((8, 256), jnp.float32, "tokens in bfloat16 or float16, got float32"),
    ],
)
def test_other_tokens_are_not_rounded(shape: tuple[int, ...], dtype: Any, words: str):
    with pytest.raises(ValueError, match=f"fp8_rounding wants {words}"):
        fp8_rounding(jnp.zeros(shape, dtype))


@lowers
@pytest.mark.parametrize(
    ("activation", "w", "words"),
    [
        ("gelu_tanh", weights(), "wants gates of silu, got gelu_tanh"),
        ("silu", Linear(jnp.zeros((256, 256), jnp.bfloat16), None), "wants weights of few bits"),
        ("silu", weights(Scheme(FP8, (128, 128))), "weights and inputs in fp8"),
        ("silu", weights(), None),
    ],
)
def test_units_are_rounded_for_products_in_fp8_alone(activation: str, w: Any, words: str | None):
    x: Any = jax.ShapeDtypeStruct((64, 512), jnp.bfloat16)
    reason = refuses_gates(x, w, activation)
    assert reason is None if words is None else words in str(reason)


@lowers
def test_an_mlp_in_fp8_rounds_its_units_as_they_come():
    found: list[Any] = []
    gate_up, down = weights(inputs=512), weights(inputs=128)
    y = jax.eval_shape(
        lambda x, gate_up, down: products.mlp(x, gate_up, down, note=found.append),
        jax.ShapeDtypeStruct((64, 512), jnp.bfloat16), gate_up, down,
    )  # fmt: skip
    assert {one.name for one in found} == {"two products in fp8"}
    assert y.shape[-2:] == (2, 128)
