"""Products of fp8 with fp8 in blocks: which a kernel serves, and what it computes."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrunner.kernels_pallas.fp8_blocks import fp8_blocks
from jaxrunner.ops.quantized_products import OF_FP8_BLOCKS
from jaxrunner.quantization.activations import rounded
from jaxrunner.quantization.quantized_linear import QuantizedLinear
from jaxrunner.quantization.scheme import Activation, Scheme
from tests.support import oracles
from tests.support.lowering import cuda, lowers

FP8 = "float8_e4m3fn"
BLOCKS = Scheme(FP8, (128, 128), activation=Activation(FP8, group=128))


def weights(scheme: Scheme = BLOCKS, inputs: int = 256) -> QuantizedLinear:
    """Returns random weights, [2, 128, inputs]."""
    keys = jax.random.split(jax.random.key(0))
    weight = jax.random.normal(keys[0], (2, 128, inputs), jnp.bfloat16).astype(FP8)
    shape = (2, 128 // scheme.block[0], inputs // (scheme.block[1] or inputs))
    scale = jax.random.uniform(keys[1], shape, jnp.float32, 0.5, 1.5)
    return QuantizedLinear(weight, scale, None, None, None, None, scheme)


def test_the_oracle_of_the_kernel_is_what_plain_jax_computes():
    """In float32, in which plain JAX rounds nothing more than the inputs."""
    w, x = weights(), jax.random.normal(jax.random.key(1), (8, 256), jnp.float32)
    assert BLOCKS.activation is not None
    numbers, x_scale = rounded(x, BLOCKS.activation, None, None)
    got = np.asarray(w.product(x)).reshape(8, 256)
    want = oracles.fp8_blocks(numbers, x_scale, w.weight.reshape(256, 256), w.scale.reshape(2, 2))
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-3)


@pytest.mark.gpu
def test_the_kernel_computes_what_plain_jax_does():
    w, x = weights(), jax.random.normal(jax.random.key(1), (512, 256), jnp.bfloat16)
    assert OF_FP8_BLOCKS.refuses(x, w) is None
    got, want = (
        oracles.wide(jax.jit(run)(x, w)) for run in (OF_FP8_BLOCKS.run, lambda x, w: w.product(x))
    )
    assert np.linalg.norm(got - want) < 0.01 * np.linalg.norm(want)


@lowers
def test_steps_of_many_tokens_are_served():
    x = jax.ShapeDtypeStruct((512, 256), jnp.bfloat16)
    assert OF_FP8_BLOCKS.refuses(x, weights()) is None
    with cuda():
        text = jax.jit(OF_FP8_BLOCKS.run).trace(x, weights()).lower(lowering_platforms=("cuda",))
    assert "mosaic_gpu" in text.as_text() and text.out_info.shape == (512, 2, 128)


@lowers
@pytest.mark.parametrize(
    ("tokens", "dtype", "scheme", "words"),
    [
        (512, jnp.bfloat16, Scheme(FP8, (128, 128)), "weights and inputs in fp8"),
        (512, jnp.bfloat16, Scheme(FP8, activation=Activation(FP8)), "share a scale by 128"),
        (256, jnp.bfloat16, BLOCKS, "at least 257 tokens, got 256"),
        (512, jnp.float32, BLOCKS, "bfloat16 or float16, got float32"),
        (516, jnp.bfloat16, BLOCKS, "tokens in multiples of 8, got 516"),
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
        ((8, 256, jnp.bfloat16), (8, 2, jnp.float32), (256, 256), "tokens and weights in float8"),
        ((8, 256, FP8), (8, 2, jnp.bfloat16), (256, 256), "scales in float32, got bfloat16"),
        ((8, 256, FP8), (8, 2, jnp.float32), (192, 256), "outputs of 128, got 256 and 192"),
        ((8, 256, FP8), (8, 1, jnp.float32), (256, 256), r"a scale for 128 terms, got \(8, 1\)"),
    ],
)
def test_the_kernel_refuses_in_words(x: Any, x_scale: Any, weight: Any, words: str):
    tokens, x_scale, weight = (jnp.zeros(of[:2], of[2]) for of in (x, x_scale, (*weight, FP8)))
    with pytest.raises(ValueError, match=f"fp8_blocks wants .*{words}"):
        fp8_blocks(tokens, x_scale, weight, jnp.ones((2, 2)))
