"""What products with weights of few bits run through on a GPU, and what kernels refuse."""

import functools
import itertools
import math
from typing import Any

import jax
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrunner.kernels_pallas.quantized import quantized_mlp
from jaxrunner.kernels_pallas.quantized.quantized_fit import FEWEST, TuningConfig, fit
from jaxrunner.kernels_pallas.quantized.quantized_matmul import (
    MAX_PARTS,
    TOKENS,
    quantized_matmul,
    refuses,
)
from jaxrunner.kernels_pallas.quantized.quantized_tile import multiply, quantized_tile
from jaxrunner.operation import Operation
from jaxrunner.ops import products
from jaxrunner.ops.quantized_products import OF_FP8, TILES, TILES_IN_PARTS
from jaxrunner.quantization.quantized_linear import QuantizedLinear
from jaxrunner.quantization.scheme import CODES, Activation, Scheme
from tests.support.lowering import cuda, lowers
from tests.support.quantized_shapes import BOTH_IN_BLOCKS, FP8, mlp_weights, shaped, weights

UNITS: dict[str, Any] = dict(activation="silu")
BLOCKS, FOUR = Scheme(FP8, (128, 128)), Scheme("int4", (1, 128), has_zero=True)
DYNAMIC = Scheme(FP8, activation=Activation(FP8))
Three = tuple[Any, Any, Any]


@lowers
@pytest.mark.parametrize(
    ("run", "tokens", "scheme", "outputs", "name"),
    [
        (products.linear, 8, BLOCKS, 6144, "quantized_matmul"),
        (products.linear, 1, FOUR, 512, "quantized_matmul"),
        (products.linear, 256, DYNAMIC, 6144, "quantized_tile"),
        (products.project, 64, FOUR, 4096, "quantized_matmul in parts"),
        (products.linear, 512, BLOCKS, 6144, "plain JAX"),
        (products.linear, 512, DYNAMIC, 6144, "fp8 product"),
        (products.linear, 512, BOTH_IN_BLOCKS, 6144, "fp8_blocks"),
        (products.project, 8192, BOTH_IN_BLOCKS, 4096, "fp8_blocks"),
        (products.linear, 64, BOTH_IN_BLOCKS, 6144, "fp8_blocks"),
        (products.linear, 32, BOTH_IN_BLOCKS, 6144, "quantized_matmul"),
        (products.project, 256, BOTH_IN_BLOCKS, 4096, "fp8_blocks in parts"),
    ],
)
def test_what_runs_a_product_follows_its_tokens(run, tokens, scheme, outputs, name):
    found: list[Any] = []
    y = jax.eval_shape(
        lambda x, w: run(x, w, note=found.append), shaped(tokens, 1024), weights(scheme, outputs)
    )
    assert found[-1].name == name
    parts = name.endswith("parts")
    assert y.shape[parts:] == (tokens, outputs)
    assert y.dtype == (jnp.float32 if parts else jnp.bfloat16)


@lowers
def test_tiles_serve_what_fills_the_chip():
    def reason(one: Operation, tokens: int, scheme: Scheme, outputs: int) -> str | None:
        return one.refuses(shaped(tokens, 1024), weights(scheme, outputs))

    assert reason(TILES, 64, BLOCKS, 6144) is reason(TILES, 256, DYNAMIC, 6144) is None
    assert reason(TILES_IN_PARTS, 64, BLOCKS, 4096) is None
    for one, tokens, scheme, outputs, words in (
        (TILES, 64, BLOCKS, 512, "wants work for"),
        (TILES_IN_PARTS, 56, BLOCKS, 4096, "is ahead for 64 to 256 tokens"),
        (TILES_IN_PARTS, 64, FOUR, 4096, "wants weights without zero points"),
    ):
        assert words in str(reason(one, tokens, scheme, outputs))


def matrices(tokens: int, outputs: int, inputs: int, code: str = FP8, group: int = 128) -> Three:
    """Returns shapes of tokens, weights and scales."""
    packed, run = CODES[code].packed, 128 if code == FP8 and group < inputs else 1
    return (
        shaped(tokens, inputs),
        shaped(outputs, inputs // packed, dtype=CODES[code].stored),
        shaped(outputs // run, inputs // group, dtype=jnp.float32),
    )


@lowers
@pytest.mark.parametrize("code", [FP8, "int4"])
@pytest.mark.parametrize("tokens", [64, 96, 128, 192, 256])
@pytest.mark.parametrize(
    ("outputs", "inputs"), [(6144, 4096), (4096, 4096), (24576, 4096), (28672, 4096), (4096, 14336)]
)
def test_tiles_keep_the_multiprocessors_busy(outputs, inputs, tokens, code):
    in_parts = outputs == 4096
    c = fit(*matrices(tokens, outputs, inputs, code), code, in_parts=in_parts)
    assert isinstance(c, TuningConfig)
    tiles = outputs // c.height * c.cluster * c.parts * -(-tokens // c.tokens)
    assert tiles / (-(-tiles // 132) * 132) > 0.7
    assert (c.parts > 1) == in_parts


@lowers
@pytest.mark.parametrize(
    ("tokens", "outputs", "group", "in_parts"),
    [(64, 28672, 128, False), (128, 4096, 128, True), (256, 6144, 128, False),
     (256, 4096, 4096, True)],
)  # fmt: skip
def test_tiles_of_a_shape_lower(tokens, outputs, group, in_parts):
    def run(*args: Any) -> Any:
        return multiply(*args, code=FP8, in_parts=in_parts)

    with cuda():
        shapes = matrices(tokens, outputs, 4096, group=group)
        jax.jit(run).trace(*shapes).lower(lowering_platforms=("cuda",))


@lowers
@pytest.mark.parametrize(
    ("shape", "words"),
    [
        ((56, 6144, 1024), "is ahead for 64 to 256 tokens, got 56"),
        ((264, 6144, 1024), "is ahead for 64 to 256 tokens, got 264"),
        ((72, 6144, 1024), "multiples of 16, 72 at a time, got 72"),
        ((64, 6144 + 64, 1024), "outputs of 128, got 1024 and 6208"),
        ((64, 2048, 1024), f"wants work for {132 // FEWEST} multiprocessors, got 32 tiles"),
    ],
)
def test_tiles_do_not_serve_other_shapes(shape, words):
    x, weight, scale = matrices(*shape, code="int8")
    assert words in str(fit(x, weight, scale, "int8"))
    with pytest.raises(ValueError, match=f"quantized_tile .*{words}"):
        jax.eval_shape(lambda *args: multiply(*args, code="int8"), x, weight, scale)


@lowers
@pytest.mark.parametrize("code", [FP8, "int4"])
@pytest.mark.parametrize(("outputs", "inputs"), [(6144, 4096), (4096, 4096), (384, 1792)])
def test_what_a_block_of_few_tokens_holds_fits_shared_memory(monkeypatch, outputs, inputs, code):
    held: list[Any] = []

    def kernel(body: Any, *, out_type: Any, scratch_types: Any, **_: Any) -> Any:
        held.append(scratch_types)
        return lambda *_: jnp.zeros(out_type.shape, out_type.dtype)

    x, weight, scale = matrices(1, outputs, inputs, code)
    monkeypatch.setattr(plgpu, "kernel", kernel)
    for tokens, most, zeros in itertools.product(TOKENS, (1, MAX_PARTS), (False, True)):
        zero = (jax.ShapeDtypeStruct(scale.shape, jnp.int8),) * zeros
        x = shaped(tokens, inputs)
        if refuses(x, weight, scale, code, most):
            assert tokens > 48  # of which a step is too long
            continue
        run = functools.partial(quantized_matmul, code=code, max_parts=most, dtype=jnp.float32)
        jax.eval_shape(run, x, weight, scale, *zero)
        arrays = [one for one in held[-1] if hasattr(one, "dtype")]
        size = sum(math.prod(one.shape) * jnp.dtype(one.dtype).itemsize for one in arrays)
        assert size <= 226 * 1024, (tokens, most, zeros)  # of 227 KiB, barriers need some
    assert len(held) > len(TOKENS) * 3


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
        (shaped(2, 64, 256), (256, 256), (2, 2), FP8, UNITS, "bfloat16 .* gates, got pairs"),
        (shaped(64, 256), (256, 256), (2, 2), FP8, UNITS | dict(parts=2), "whole sums .* parts=2"),
        (shaped(64, 256), (256, 256), (2, 2), FP8, dict(activation="relu"), "wants one of .*relu"),
    ],
)
def test_the_kernel_of_tiles_refuses_in_words(x, weight, scale, code, sizes, words):
    weight, scale = shaped(*weight, dtype=jnp.float8_e4m3fn), shaped(*scale, dtype=jnp.float32)
    rest = dict(sizes)
    how: Any = dict(code=code, activation=rest.pop("activation", None))
    run = functools.partial(quantized_tile, config=TuningConfig(**rest), **how)
    with pytest.raises(ValueError, match=f"quantized_tile .*{words}"):
        jax.eval_shape(run, x, weight, scale)


@lowers
@pytest.mark.parametrize(
    ("tokens", "scheme", "name"),
    [
        (1, BLOCKS, "quantized_mlp"),
        (8, Scheme("int4", (1, 128)), "quantized_mlp"),
        (32, Scheme("int8"), "quantized_mlp"),
        (32, Scheme("int4", (1, 128)), "two products"),
        (64, BLOCKS, "two products, units as pairs"),
        (64, Scheme("int4", (1, 128)), "quantized_tile of units"),
        (128, Scheme("int4", (1, 128), has_order=True), "quantized_tile of units"),
        (256, Scheme("int8"), "quantized_tile of units"),
        (64, FOUR, "two products"),
        (64, DYNAMIC, "two products"),
        (8, FOUR, "two products"),
        (8, DYNAMIC, "two products"),
    ],
)
def test_the_mlp_of_few_tokens_is_one_kernel(tokens, scheme, name):
    found: list[Any] = []
    with cuda():
        y = jax.eval_shape(
            lambda x, *w: products.mlp(x, *w, note=found.append),
            shaped(tokens, 4096), *mlp_weights(scheme),
        )  # fmt: skip
    assert next(one.name for one in found if one.operation == "mlp") == name
    assert y.shape == (8, tokens, 4096) or name != "quantized_mlp"


@lowers
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (dict(tokens=40), "tokens, got 40"),
        (dict(E=4224), "in tiles of 256, got 4224"),
        (dict(F=1000), "multiple of 128 terms"),
        (dict(F=28672), "128 each, got 28672"),
        (dict(rows=4352), "wants weights of 4096"),
        (dict(group=32), "scales of a multiple of 64 terms, got 32"),
        (dict(stages=3), "shared memory for 4 steps"),
    ],
)
def test_the_mlp_of_other_shapes_is_refused(change, words):
    given = dict(tokens=8, E=4096, F=14336, rows=0, group=128, stages=16) | change
    tokens, E, F, rows, group, stages = given.values()

    def few(outputs: int, inputs: int) -> quantized_mlp.Few:
        scale = shaped(outputs, inputs // group, dtype=jnp.float32)
        return quantized_mlp.Few(shaped(outputs, inputs, dtype=jnp.int8), scale)

    config = quantized_mlp.TuningConfig(stages=stages)
    args = shaped(tokens, E), few(2 * F, E), few(rows or E, F)
    with cuda():
        assert words in str(quantized_mlp.refuses(*args, "int8", config))
        with pytest.raises(ValueError, match=f"quantized_mlp .*{words}"):
            jax.eval_shape(
                lambda *a: quantized_mlp.quantized_mlp(*a, code="int8", config=config), *args
            )
