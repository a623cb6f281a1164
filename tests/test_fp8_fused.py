"""Norms and gated units that come rounded to fp8 from the kernels that make them."""

from dataclasses import replace
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrunner import pytree
from jaxrunner.device.operations import operations
from jaxrunner.device.program_key import Key
from jaxrunner.kernels_pallas.cases.fp8_case import fp8_units, rounded_norms
from jaxrunner.kernels_pallas.quantized.add_norm_fp8 import add_norm_fp8
from jaxrunner.kernels_pallas.quantized.fp8_gates import fp8_gates
from jaxrunner.kernels_pallas.quantized.fp8_rounding import fp8_rounding
from jaxrunner.kernels_pallas.quantized.fp8_tiles import TuningConfig
from jaxrunner.linear import Linear
from jaxrunner.loading.quantized import read_quantized
from jaxrunner.ops import fp8_products
from jaxrunner.ops.backends import fused
from jaxrunner.ops.rounded_tokens import RoundedTokens
from jaxrunner.program.bucket import Bucket
from jaxrunner.program.program import Program
from jaxrunner.quantization.quantized_linear import QuantizedLinear
from jaxrunner.quantization.scheme import Activation, Scheme
from jaxrunner.sampling import RULES
from tests.support import oracles, tiny
from tests.support.lowering import cuda, lowers
from tests.support.quantized_shapes import BOTH_IN_BLOCKS, FP8, mlp_weights, shaped, weights
from tests.support.readers import NO_STEP, chosen, norm_and_mlp
from tests.support.states import interpreted


def floats(numbers: Any, scale: Any) -> np.ndarray:
    return oracles.wide(numbers) * np.repeat(np.asarray(scale).T[: len(numbers)], 128, 1)


def far(got: np.ndarray, want: np.ndarray) -> float:
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


@lowers
@pytest.mark.parametrize(
    ("sizes", "config"),
    [
        ((72, 512, 256), dict(num_ctas=2)),  # clusters share tokens, of which the last are none
        ((256, 1152, 128), dict(num_ctas=4, together=1)),  # clusters share weights
        ((136, 1280, 256, 256), dict(num_ctas=2)),  # scales of two tiles of outputs
        ((64, 384, 128), {}),  # no cluster
        ((72, 512, 256), dict(num_ctas=2, width=64)),  # half a tile of outputs at a time
    ],
)
def test_units_are_those_of_both_products(sizes: tuple[int, ...], config: dict[str, int]):
    args = fp8_units(*sizes).make(0)
    run = functools.partial(fp8_gates, config=TuningConfig(**config), interpret=interpreted())
    # Mosaic copies a part of a row without regard to its end, which an interpreter heeds.
    assert jax.eval_shape(run, *args)[1].shape[1] % 128 == 0
    assert far(floats(*jax.jit(run)(*args)), oracles.fp8_gates(*args)) < 3e-3


@lowers
@pytest.mark.parametrize("sizes", [(8, 4096), (16, 2048, 3), (8, 5120, 1), (8, 2048, 0)])
def test_norms_are_rounded_as_they_are_made(sizes: tuple[int, ...]):
    args = rounded_norms(*sizes).make(0)
    run = functools.partial(add_norm_fp8, eps=1e-5, interpret=interpreted())
    total, numbers, scale = jax.jit(run)(*args)
    whole, normed = oracles.add_rms_norm(*args, eps=1e-5)
    assert far(oracles.wide(total), whole) < 4e-3
    holds_rounded(numbers, scale, normed)


def holds_rounded(numbers: Any, scale: Any, normed: np.ndarray) -> None:
    """Holds numbers to what a norm is in fp8: XLA may round less on the way than asked."""
    largest = np.abs(normed).reshape(len(normed), -1, 128).max(-1).T
    np.testing.assert_allclose(scale, largest / 448, rtol=2**-7)
    assert (np.abs(oracles.wide(numbers)).reshape(*largest.T.shape, 128).max(-1) == 448).all()
    np.testing.assert_allclose(floats(numbers, scale), normed, rtol=0.08, atol=2**-9)


@lowers
def test_a_norm_by_one_more_is_rounded_too():
    x, residual, weight = rounded_norms(8, 1024).make(0)
    run = functools.partial(add_norm_fp8, eps=1e-5, one_more=True, interpret=interpreted())
    _, numbers, scale = jax.jit(run)(x, residual, weight)
    _, normed = oracles.add_rms_norm(x, residual, weight, eps=1e-5, one_more=True)
    holds_rounded(numbers, scale, normed)


@lowers
@pytest.mark.parametrize(
    ("x", "x_scale", "weight", "words"),
    [
        ((8, 256, jnp.bfloat16), (2, 8), (512, 256), "tokens and weights in float8"),
        ((8, 256, FP8), (2, 8), (384, 256), "gates in multiples of 128, got 384 gates and units"),
    ],
)
def test_other_gates_are_refused(x: Any, x_scale: Any, weight: Any, words: str):
    given = jnp.zeros(x[:2], x[2]), jnp.ones(x_scale), jnp.zeros(weight, FP8)
    with pytest.raises(ValueError, match=f"fp8_gates wants {words}"):
        fp8_gates(*given, jnp.ones((weight[0] // 128, weight[1] // 128)))


@lowers
@pytest.mark.parametrize("config", [dict(parts=2), dict(halves=1), dict(halves=3)])
def test_gates_are_summed_whole_beside_what_they_gate(config: dict[str, int]):
    args = fp8_units(64, 256, 128).make(0)
    with pytest.raises(ValueError, match="fp8_gates wants parts=1 and halves=2, or 0, got parts="):
        fp8_gates(*args, config=TuningConfig(**config))


@lowers
@pytest.mark.parametrize(
    ("x", "weight", "words"),
    [
        ((8, 1536), 1536, r"wants rows of a multiple of 1024 numbers .*, got \(8, 1536\)"),
        ((8, 15360), 15360, r"wants rows of a multiple of 1024 numbers .*, got \(8, 15360\)"),
        ((8, 1024), 512, r"weight must be \[1024\], got \[512\]"),
    ],
)
def test_other_norms_are_refused(x: tuple[int, int], weight: int, words: str):
    given = jnp.zeros(x, jnp.bfloat16), jnp.zeros(x, jnp.bfloat16)
    with pytest.raises(ValueError, match=f"add_norm_fp8 {words}"):
        add_norm_fp8(*given, jnp.zeros(weight, jnp.bfloat16), eps=1e-5)


BLOCKS = mlp_weights(BOTH_IN_BLOCKS)
WITH_BIAS = replace(BLOCKS[0], bias=shaped(2, 14336))
BY_TOKEN = Scheme(FP8, activation=Activation(FP8))


@lowers
@pytest.mark.parametrize(
    ("tokens", "gate_up", "down", "names"),
    [
        (64, *BLOCKS, ("add_norm_fp8", "two products in fp8")),
        (8192, *BLOCKS, ("add_norm_fp8", "two products in fp8")),
        (8, *BLOCKS, ("add_rms_norm", "two products")),
        (64, WITH_BIAS, BLOCKS[1], ("add_norm_fp8", "two products, units in fp8")),
        (64, BLOCKS[0], mlp_weights(BY_TOKEN)[1], ("add_norm_fp8", "two products")),
        (64, *mlp_weights(BY_TOKEN), ("add_rms_norm", "two products")),
    ],
)
def test_who_reads_a_norm_says_whether_it_is_rounded(
    tokens: int, gate_up: Any, down: Any, names: tuple[str, str]
):
    told = chosen(norm_and_mlp, shaped(tokens, 4096), shaped(4096), gate_up, down)
    assert (told["add_norm"], told["mlp"]) == names


@lowers
def test_weights_that_read_floats_get_floats():
    def run(ops: Any, x: Any, norm: Any, *readers: Any) -> Any:
        return ops.add_norm(x, x, norm, 1e-5, readers=readers)[1]

    linear = Linear(shaped(512, 1024), None)
    for readers in (), (linear,), (weights(BOTH_IN_BLOCKS), linear):
        told = chosen(run, shaped(64, 1024), shaped(1024), *readers)
        assert told["add_norm"] == "add_rms_norm"
    h = RoundedTokens(shaped(64, 1024, dtype=FP8), shaped(8, 64, dtype=jnp.float32), jnp.bfloat16)
    assert h.shape == (64, 1024)


@pytest.mark.gpu
@pytest.mark.parametrize("num", [64, 200, 1024])
def test_kernels_make_what_those_apart_do(num: int):
    """Each kernel of the same tokens, as a neighbour in fp8 is 6% away and changes what follows."""
    keys = jax.random.split(jax.random.key(0), 3)
    x, norm = (jax.random.normal(keys[0], shape, jnp.bfloat16) for shape in ((num, 1024), (1024,)))
    gate_up, down = real(keys[1], 2, 512, 1024), real(keys[2], 1024, 512)
    run = functools.partial(norm_and_mlp, fused(NO_STEP))
    y, total = jax.jit(run)(x, norm, gate_up, down)
    other, h = jax.jit(lambda *args: fused(NO_STEP).add_norm(*args, 1e-5))(x, x, norm)
    np.testing.assert_array_equal(oracles.wide(total), oracles.wide(other))
    of_norm = jax.jit(functools.partial(add_norm_fp8, eps=1e-5))(x, x, norm)[1:]
    rounded = jax.jit(fp8_rounding)(h)
    assert far(floats(*of_norm), floats(*rounded)) < 0.02
    units = floats(*jax.jit(fp8_gates)(*of_norm, *gate_up.matrices()))
    want = units @ oracles.few_bits(*down.matrices(), code=FP8).T
    assert far(oracles.wide(y).reshape(-1, num, 1024).sum(0), want) < 0.01
    units = jax.jit(fp8_gates)(*rounded, *gate_up.matrices())
    both = jax.jit(fp8_products.BLOCKS.run)(h, gate_up)
    assert far(floats(*units), floats(*jax.jit(fp8_rounding)(both))) < 0.02


def real(key: jax.Array, *shape: int) -> QuantizedLinear:
    """Returns random weights in fp8 with scales of blocks."""
    weight = jax.random.normal(key, shape, jnp.bfloat16).astype(FP8)
    scale = jnp.full((*shape[:-2], shape[-2] // 128, shape[-1] // 128), 2.0**-5)
    return QuantizedLinear(weight, scale, None, None, None, None, BOTH_IN_BLOCKS)


SIZES = dict(
    hidden_size=1024, intermediate_size=512, num_attention_heads=8, num_key_value_heads=4,
    head_dim=128, num_hidden_layers=2, vocab_size=61, max_position_embeddings=128,
)  # fmt: skip
FALCON = dict(
    mamba_d_ssm=128, mamba_n_heads=8, mamba_d_head=16, mamba_n_groups=2, mamba_d_state=16,
    mamba_d_conv=4, mamba_chunk_size=16, attention_in_multiplier=1.3,
)  # fmt: skip
ROUNDED = dict(
    quant_method="fp8", fmt="e4m3", weight_block_size=[128, 128], activation_scheme="dynamic"
)


@lowers
@pytest.mark.parametrize(
    ("name", "more", "names"),
    [
        ("Llama", {}, {"add_norm_fp8", "add_rms_norm"}),  # the latter of hidden states
        ("Phi3", {}, {"add_norm_fp8", "add_rms_norm"}),
        ("Olmo2", {}, {"add_rms_norm"}),  # layers norm what they give
        ("FalconH1", FALCON, {"add_rms_norm"}),  # layers scale what they multiply
    ],
)
@pytest.mark.parametrize("bucket", [Bucket(64, 64, 1), Bucket(128, 8)])
def test_layers_are_given_what_they_read(name: str, more: Any, names: set[str], bucket: Bucket):
    settings = SIZES | more | dict(architectures=[f"{name}ForCausalLM"])
    model, config = read_quantized(settings | dict(quantization_config=ROUNDED), "a test")
    engine = tiny.engine_config(
        block_size=64, dtype="bfloat16", kv_dtype="bfloat16", max_num_batched_tokens=128
    )
    params = pytree.abstract(model.params, config.dims | dict(param=jnp.dtype("bfloat16")))
    with cuda():
        told = operations(Program(model, config, engine, fused, RULES), params, Key("step", bucket))
    assert {one.name for one in told if one.operation == "add_norm"} == names
