"""Experts with weights of few bits in kernels: which are served, and what they compute."""

from dataclasses import replace
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrunner.kernels_pallas.cases.quantized_grouped_case import QUANTIZED_MIXTURES, few_bits
from jaxrunner.kernels_pallas.mixtures.group_tokens import Groups
from jaxrunner.kernels_pallas.quantized import quantized_grouped
from jaxrunner.kernels_pallas.quantized.quantized_grouped import Few
from jaxrunner.linear import Linear
from jaxrunner.mixtures.experts import Routes
from jaxrunner.ops.grouped_experts import OF_FEW_BITS
from jaxrunner.quantization.quantized_experts import QuantizedExperts
from jaxrunner.quantization.quantized_linear import QuantizedLinear
from jaxrunner.quantization.scheme import CODES, Activation, Scheme
from tests.support import oracles
from tests.support.lowering import cuda, lowers

FP8, INT4, MXFP4 = "float8_e4m3fn", "int4", "float4_e2m1fn"
SCHEMES = {
    "blocks": Scheme(FP8, (128, 128)),
    "blocks, rounded inputs": Scheme(FP8, (128, 128), activation=Activation(FP8, group=128)),
    "channels, rounded inputs": Scheme("int8", activation=Activation("int8")),
    "zero points": Scheme(INT4, (1, 64), has_zero=True),
    "exponents": Scheme(MXFP4, (1, 32), scale="uint8"),
}


def held(scheme: Scheme, *outputs: int, inputs: int, key: jax.Array) -> QuantizedLinear:
    """Returns random weights of a stack, [*outputs, inputs]."""
    keys, (rows, cols) = jax.random.split(key, 3), scheme.block
    code = CODES[scheme.code]
    weight: Any = jax.random.randint(
        keys[0], (*outputs, inputs // code.packed), -100, 100, jnp.int8
    )
    shape = (*outputs[:-1], outputs[-1] // rows, *((inputs // cols,) if cols else ()))
    scale: Any = jax.random.uniform(keys[1], shape, jnp.float32, 0.01, 0.02) * inputs**-0.5
    if scheme.scale == "uint8":
        scale = jax.random.randint(keys[1], shape, 119, 124, jnp.int32).astype(jnp.uint8)
    zero = jax.random.randint(keys[2], shape, -8, 8, jnp.int8) if scheme.has_zero else None
    return QuantizedLinear(weight.astype(code.stored), scale, zero, None, None, None, scheme)


def experts_of(scheme: Scheme, X: int, E: int, F: int, *, bias: bool = False) -> QuantizedExperts:
    keys = jax.random.split(jax.random.key(5), 4)
    clamped = "clamped_swiglu" if bias else "swiglu"
    gate_up: Any = held(scheme, X, 2, F, inputs=E, key=keys[0])
    down: Any = held(scheme, X, E, inputs=F, key=keys[1])
    return QuantizedExperts(
        gate_up,
        down,
        jax.random.normal(keys[2], (X, 2, F), jnp.bfloat16) if bias else None,
        jax.random.normal(keys[3], (X, E), jnp.bfloat16) if bias else None,
        clamped,
    )


def routes_of(tokens: int, X: int, k: int) -> Routes:
    """Returns routes of which every seventh token has none."""
    rng = np.random.default_rng(0)
    chosen = np.argsort(rng.normal(size=(tokens, X)), 1)[:, :k].astype(np.int32)
    chosen[::7] = X
    weights = rng.uniform(0.1, 1, chosen.shape).astype(np.float32)
    return Routes(jnp.asarray(chosen), jnp.asarray(np.where(chosen < X, weights, 0)))


def abstract(w: Any) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), w)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 40, 600])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_kernels_compute_what_plain_jax_does(scheme: str, tokens: int):
    w = experts_of(SCHEMES[scheme], 8, 512, 256, bias=scheme == "exponents")
    x, routes = (
        jax.random.normal(jax.random.key(1), (tokens, 512), jnp.bfloat16),
        routes_of(tokens + 1, 8, 2),
    )
    routes = Routes(*(part[1:] for part in routes))
    assert OF_FEW_BITS.refuses(x, routes, w) is None
    got = jax.jit(OF_FEW_BITS.run)(x, routes, w).astype(jnp.float32).sum(0)
    want = jax.jit(lambda *args: args[2].product(*args[:2]))(x, routes, w)
    real = np.asarray(routes.experts[:, 0] < 8)
    got, want = oracles.wide(got)[real], oracles.wide(want)[real]
    assert np.linalg.norm(got - want) < 0.02 * np.linalg.norm(want)


@pytest.mark.parametrize("case", [QUANTIZED_MIXTURES[i] for i in (1, 3)], ids=["zeros", "clamped"])
def test_plain_jax_equals_the_oracle_of_the_kernels(case):
    """On any device: the oracle is right about biases, zero points and exponents."""
    x, logits, real, *arrays = case.make(3)
    names, options = case.options["names"], case.options
    both = (dict(zip(names, part, strict=True)) for part in np.split(np.arange(len(arrays)), 2))
    E, X = x.shape[1], logits.shape[1]
    products: list[Any] = []
    biases: list[Any] = []
    for places, axes in zip(both, ((X, 2, -1), (X, E)), strict=True):
        part = {name: arrays[i] for name, i in places.items()}
        scale: Any = part["scale"]
        zero = part.get("zero")
        group = part["weight"].shape[1] * CODES[options["code"]].packed // scale.shape[1]
        scheme = Scheme(
            options["code"], (1, group), has_zero=zero is not None, scale=str(scale.dtype)
        )
        scale, zero = (None if a is None else a.reshape(*axes, a.shape[1]) for a in (scale, zero))
        weight = part["weight"].reshape(*axes, part["weight"].shape[1])
        products.append(QuantizedLinear(weight, scale, zero, None, None, None, scheme))
        biases.append(part["bias"].reshape(axes) if "bias" in part else None)
    w = QuantizedExperts(products[0], products[1], biases[0], biases[1], options["activation"])
    mass, chosen = jax.lax.top_k(logits, options["k"])
    routes = Routes(
        jnp.where(real[:, None], chosen, X), jnp.where(real[:, None], jax.nn.softmax(mass, -1), 0)
    )
    got = jax.jit(w.product)(x.astype(jnp.float32), routes)
    want = oracles.quantized_grouped(x, logits, real, *arrays, **options)
    assert np.linalg.norm(got - want) < 4e-3 * np.linalg.norm(want)


@lowers
@pytest.mark.parametrize("tokens", [8, 4096], ids=["decode", "prefill"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_kernels_serve_the_formats_of_mixtures(scheme: str, tokens: int):
    E = F = 2880 if scheme == "exponents" else 2048
    w = jax.eval_shape(lambda: experts_of(SCHEMES[scheme], 32, E, F, bias=E == 2880))
    x = jax.ShapeDtypeStruct((tokens, E), jnp.bfloat16)
    routes = jax.eval_shape(lambda: routes_of(tokens, 32, 4))
    assert OF_FEW_BITS.refuses(x, routes, w) is None
    with cuda():
        parts = jax.eval_shape(OF_FEW_BITS.run, x, routes, w)
    assert parts.shape == (4, tokens, E)
    assert parts.dtype == (jnp.float32 if tokens == 8 else jnp.bfloat16)


@lowers
def test_kernels_say_what_they_do_not_serve():
    w, routes = experts_of(SCHEMES["blocks"], 4, 256, 128), routes_of(3, 4, 2)
    x, gate_up = jnp.ones((3, 256), jnp.bfloat16), w.gate_up
    assert isinstance(gate_up, QuantizedLinear)
    floats: Any = Linear(jnp.ones((4, 2, 128, 256), jnp.bfloat16), None)
    others: list[tuple[Any, Any, str]] = [
        (x, floats, "wants weights that are QuantizedExperts, got Linear"),
        (x, replace(w, gate_up=floats), "both products of few bits"),
        (x, replace(w, gate_up=replace(gate_up, permutation=x)), "groups that are runs of inputs"),
        (x, replace(w, gate_up=replace(gate_up, input_scale=x)), "not by an expert's scale"),
        (x.astype(jnp.float32), w, "tokens in bfloat16 or float16"),
        (x, replace(w, activation="relu2"), "wants one of .*swiglu.*, got relu2"),
    ]
    for tokens, other, words in others:
        assert re.search(words, str(OF_FEW_BITS.refuses(tokens, routes, other)))


SMALL = few_bits((8, 4, 2, 256, 128), INT4, tile=8, group=64, zero=True)


@lowers
@pytest.mark.parametrize(
    ("changes", "tile", "words"),
    [
        (dict(x=(32, 256, jnp.float16)), 8, "tokens in bfloat16 and scales in float32 or e8m0"),
        (dict(code="uint8"), 8, "weights in one of"),
        ({}, 4, r"tiles of \(8, .* rows, got 4"),
        (dict(x=(32, 288, jnp.bfloat16)), 8, "a multiple of 64, got 288 and "),
        (dict(scale=(1024, 8, jnp.float32)), 8, "at least 64 inputs where there are zero points"),
        (dict(scale=(1024, 16, jnp.float32)), 8, "scales of runs that divide 128"),
        (dict(scale=(1024, 4, jnp.uint8)), 8, "float32 where there are zero points, got e8m0"),
        (dict(x=(32, 384, jnp.bfloat16), scale=(1024, 4, jnp.float32)), 8, "divide 128"),
        (dict(x=(32, 576, jnp.bfloat16), scale=(1024, 6, jnp.float32)), 8, "a multiple of 64"),
    ],
)
def test_a_product_of_experts_refuses_in_words(changes: dict[str, Any], tile: int, words: str):
    shapes = dict(x=(32, 256, jnp.bfloat16), scale=(1024, 4, jnp.float32)) | {
        name: of for name, of in changes.items() if name != "code"
    }
    x: Any
    scale: Any
    x, scale = (jax.ShapeDtypeStruct(of[:2], of[2]) for of in (shapes["x"], shapes["scale"]))
    weight: Any = jax.ShapeDtypeStruct((1024, x.shape[1] // 2), jnp.uint8)
    w, code = Few(weight, scale, scale, None), changes.get("code", INT4)
    row, one = jnp.ones(32), jnp.ones(32 // tile)
    groups = Groups(jnp.ones(x.shape, x.dtype), row, row, one, one, one)
    for run in (
        lambda: quantized_grouped.units(groups, w, 4, code=code, activation="swiglu"),
        lambda: quantized_grouped.outputs(groups, w, 4, (8, 2), code=code),
    ):
        with pytest.raises(ValueError, match=f"quantized_grouped wants .*{words}"):
            run()
