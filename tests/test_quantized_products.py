"""What products with weights of few bits run through on a GPU, and what kernels refuse."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrunner.kernels_pallas.quantized_matmul import MAX_PARTS, quantized_matmul, refuses
from jaxrunner.kernels_pallas.quantized_tile import TuningConfig, quantized_tile
from jaxrunner.ops import products
from jaxrunner.ops.quantized_products import OF_FP8
from jaxrunner.quantization.quantized_linear import QuantizedLinear
from jaxrunner.quantization.scheme import CODES, Activation, Scheme
from tests.support.lowering import lowers

FP8 = "float8_e4m3fn"
BLOCKS, FOUR = Scheme(FP8, (128, 128)), Scheme("int4", (1, 128), has_zero=True)
DYNAMIC = Scheme(FP8, activation=Activation(FP8))


def shaped(*shape: int, dtype: Any = jnp.bfloat16) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype)


def weights(scheme: Scheme, outputs: int = 512, inputs: int = 1024) -> QuantizedLinear:
    """Returns shapes of weights, [outputs, inputs]."""
    rows, cols = scheme.block
    code = CODES[scheme.code]
    of_scale = (outputs // rows, inputs // cols) if cols else (outputs // rows,)
    return QuantizedLinear(
        shaped(outputs, inputs // code.packed, dtype=code.stored),
        shaped(*of_scale, dtype=jnp.float32),
        shaped(*of_scale, dtype=jnp.int8) if scheme.has_zero else None,
        None, None, None, scheme,
    )  # fmt: skip


@lowers
@pytest.mark.parametrize(
    ("run", "tokens", "scheme", "name"),
    [
        (products.linear, 8, BLOCKS, "quantized_matmul"),
        (products.linear, 1, FOUR, "quantized_matmul"),
        (products.project, 64, FOUR, "quantized_matmul in parts"),
        (products.linear, 256, DYNAMIC, "quantized_matmul"),
        (products.linear, 512, BLOCKS, "plain JAX"),
        (products.linear, 512, DYNAMIC, "fp8 product"),
    ],
)
def test_what_runs_a_product_follows_its_tokens(run, tokens, scheme, name):
    found: list[Any] = []
    y = jax.eval_shape(
        lambda x, w: run(x, w, note=found.append), shaped(tokens, 1024), weights(scheme)
    )
    assert found[-1].name == name
    parts = name.endswith("parts")
    assert y.shape[parts:] == (tokens, 512) and y.dtype == (jnp.float32 if parts else jnp.bfloat16)


def test_an_fp8_product_is_that_of_plain_jax():
    w, rng = weights(DYNAMIC, 48, 64), np.random.default_rng(0)
    made = QuantizedLinear(
        jnp.asarray(rng.normal(size=(48, 64)), FP8),
        jnp.asarray(rng.uniform(0.5, 1.5, 48), jnp.float32),
        None, None, None, None, w.scheme,
    )  # fmt: skip
    x = jnp.asarray(rng.normal(size=(32, 64)), jnp.float32)
    assert OF_FP8.refuses(x, made) is None
    got, want = jax.jit(OF_FP8.run)(x, made), jax.jit(made.product)(x)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("scheme", "tokens", "words"),
    [
        (BLOCKS, 32, "wants weights and inputs in fp8"),
        (Scheme(FP8, (128, 128), activation=Activation(FP8)), 32, "wants a scale for all inputs"),
        (DYNAMIC, 33, "wants tokens and outputs in multiples of 16"),
    ],
)
def test_other_products_than_of_fp8_are_refused(scheme, tokens, words):
    assert words in str(OF_FP8.refuses(shaped(tokens, 1024), weights(scheme)))


@lowers
@pytest.mark.parametrize(
    ("x", "weight", "scale", "code", "words"),
    [
        (shaped(8, 256, dtype=jnp.float16), (64, 256), (64, 1), FP8, "tokens in bfloat16"),
        (shaped(8, 256), (64, 256), (64, 1), "uint8", "weights in one of"),
        (shaped(9, 256), (64, 256), (64, 1), FP8, "wants 1, 8, 16, .* 256 tokens, got 9"),
        (shaped(512, 256), (64, 256), (64, 1), FP8, "256 tokens, got 512"),
        (shaped(8, 192), (64, 192), (64, 1), FP8, "a multiple of 128 terms and outputs of 8"),
        (shaped(8, 384), (64, 384), (64, 5), FP8, "scales of runs that divide 128"),
        (shaped(8, 256), (64, 256), (64, 8), FP8, "scales of a multiple of 64 terms, got 32"),
        (shaped(8, 256), (8 * 331, 256), (8 * 331, 1), FP8, None),
    ],
)
def test_the_kernel_refuses_in_words(x, weight, scale, code, words):
    weight = shaped(*weight, dtype=jnp.float8_e4m3fn)
    scale = shaped(*scale, dtype=jnp.float32)
    if words is None:
        assert refuses(x, weight, scale, code, MAX_PARTS) is None
        return
    with pytest.raises(ValueError, match=f"quantized_matmul .*{words}"):
        jax.eval_shape(
            lambda *args: quantized_matmul(*args, code=code, max_parts=MAX_PARTS), x, weight, scale
        )


@lowers
@pytest.mark.parametrize(
    ("x", "weight", "scale", "code", "sizes", "words"),
    [
        (shaped(64, 256, dtype=jnp.float16), (256, 256), (2, 2), FP8, {}, "tokens in bfloat16"),
        (shaped(64, 256), (256, 256), (2, 2), "uint8", {}, "weights in one of"),
        (shaped(72, 256), (256, 256), (2, 2), FP8, {}, "multiples of 16, 72 at a time, got 72"),
        (shaped(64, 192), (256, 192), (2, 1), FP8, {}, "a multiple of 128 terms and outputs"),
        (shaped(64, 256), (192, 256), (2, 2), FP8, {}, "outputs of 256, got 256 and 192"),
        (shaped(64, 256), (256, 256), (2, 8), FP8, {}, "scales of runs that divide 128"),
        (shaped(256, 256), (256, 256), (2, 2), FP8, dict(parts=2), "fewer tokens at a time"),
    ],
)
def test_the_kernel_of_tiles_refuses_in_words(x, weight, scale, code, sizes, words):
    weight, scale = shaped(*weight, dtype=jnp.float8_e4m3fn), shaped(*scale, dtype=jnp.float32)
    config = TuningConfig(**sizes)
    with pytest.raises(ValueError, match=f"quantized_tile .*{words}"):
        jax.eval_shape(
            lambda *args: quantized_tile(*args, code=code, config=config), x, weight, scale
        )
