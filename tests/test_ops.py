"""Kernels refuse in words what they cannot serve, and run where they were seen to be ahead."""

from dataclasses import replace
import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrunner import pytree
from jaxrunner.bench.presets import PRESETS
from jaxrunner.device.operations import operations
from jaxrunner.device.program_key import Key
from jaxrunner.hf_config import Settings
from jaxrunner.kernels_pallas.attention import decode_attention, prefill_attention, rope_write
from jaxrunner.kernels_pallas.products import add_norm, gated_mlp, matmul
from jaxrunner.kernels_pallas.sampling import sampler
from jaxrunner.linear import Linear
from jaxrunner.models.llama import llama
from jaxrunner.models.registry import read_model
from jaxrunner.operation import Operation, run_first, unnoted
from jaxrunner.ops import backends, plain, quantized_products
from jaxrunner.ops.adapters import low_rank
from jaxrunner.program.bucket import Bucket
from jaxrunner.program.program import Program
from jaxrunner.programs.build import build
from jaxrunner.sampling import RULES
from tests.support import tiny
from tests.support.lowering import cuda, lowers


def shape(*sizes: int, dtype="bfloat16") -> Any:
    return jax.ShapeDtypeStruct(sizes, jnp.dtype(dtype))


KV = shape(9, 2, 64, 128)


@pytest.mark.parametrize(
    ("kernel", "q", "k", "words"),
    [
        (decode_attention, shape(1, 8, 128, dtype="float32"), KV, "one dtype, bfloat16 or float16"),
        (decode_attention, shape(1, 8, 72), shape(9, 2, 64, 72), "head_dim that is a multiple"),
        (decode_attention, shape(1, 130, 128), KV, "at most 64 query heads for a KV head"),
        (decode_attention, shape(1, 8, 128), shape(9, 2, 24, 128), "block_size that divides"),
        (prefill_attention, shape(8, 8, 128, dtype="float32"), KV, "dtype"),
        (prefill_attention, shape(8, 8, 72), shape(9, 2, 64, 72), "head_dim"),
        (prefill_attention, shape(8, 9, 128), KV, "multiple of the KV heads"),
        (prefill_attention, shape(8, 8, 128), shape(9, 2, 24, 128), "block_size"),
    ],
)
@lowers
def test_attention_refuses_in_words(kernel, q, k, words):
    assert words in kernel.refuses(q, k)
    name = "decode_attention" if kernel is decode_attention else "prefill_attention"
    rows = [shape(1, dtype="int32")] * (1 if kernel is decode_attention else 2)
    with pytest.raises(ValueError, match=f"{name} wants"):
        jax.eval_shape(
            functools.partial(getattr(kernel, name), scale=1.0), q, k, k, shape(1, 3), *rows
        )


@pytest.mark.parametrize(
    ("q", "query_len", "words"),
    [
        (shape(10, 32, 128), 5, "64 query tokens times heads for a KV head, got 5 x 16 = 80"),
        (shape(7, 8, 128), 4, "tokens for each of query_len=4 places of a row, got 7"),
        (shape(8, 8, 128), 0, "query_len=0 places"),
        (shape(8, 8, 128), 4, "q of 1 rows of query_len=4 tokens, got 8"),
    ],
)
@lowers
def test_attention_of_several_tokens_refuses_in_words(q, query_len, words):
    run = functools.partial(decode_attention.decode_attention, scale=1.0, query_len=query_len)
    with pytest.raises(ValueError, match=f"decode_attention wants.*{words}"):
        jax.eval_shape(run, q, KV, KV, shape(1, 3, dtype="int32"), shape(1, dtype="int32"))


def test_small_kernels_refuse_in_words():
    with pytest.raises(ValueError, match="x and residual must be"):
        add_norm.add_rms_norm(jnp.ones((2, 64)), jnp.ones((3, 64)), jnp.ones(64), eps=1e-6)
    rows = jnp.ones((2, 64), jnp.bfloat16)
    parts = jnp.ones((3, 2, 64), jnp.float16)
    assert "must be float32 or bfloat16" in str(add_norm.refuses(rows, parts, rows[0]))
    assert "must be bfloat16" in str(add_norm.refuses(rows, rows.astype(jnp.float32), rows[0]))
    ended = rows, parts[:0].astype(jnp.bfloat16), rows[0]
    assert add_norm.refuses(*ended) is None
    assert "in parts where it is normed" in str(add_norm.refuses(*ended, end=rows[0]))
    with pytest.raises(ValueError, match="logits are float16: float32 or bfloat16 is wanted"):
        sampler.sample_tokens(jnp.ones((2, 64), jnp.float16), *[jnp.ones(2)] * 7)
    qkv, turn, cache = jnp.ones((2, 2, 6, 16)), jnp.ones((2, 1, 8)), jnp.ones((3, 2, 8, 16))
    with pytest.raises(ValueError, match="qkv must be bfloat16 or float16, got float32"):
        rope_write.rope_write(qkv, turn, turn, cache, cache, jnp.zeros(2, jnp.int32), eps=1e-6)
    rest = turn, turn, cache, cache, jnp.zeros(2, jnp.int32)
    for given, words in (
        (rows, "must be [T, K, P, D], or parts of it, got [2, 64]"),
        (shape(4, 2, 2, 6, 16), "qkv [4, 2, 2, 6, 16] must be float32, got bfloat16"),
        (shape(2, 2, 6, 16, dtype="float32"), "qkv [2, 2, 6, 16] must be bfloat16, got float32"),
    ):
        assert words in str(rope_write.refuses(given, *rest, dtype="bfloat16"))


@pytest.mark.parametrize(
    ("x", "weight", "words"),
    [
        (shape(64, 512, dtype="float32"), shape(96, 512), "one dtype, bfloat16 or float16"),
        (shape(8, 512), shape(96, 512), "wants 64, 128, 192 or 256 tokens, got 8"),
        (shape(320, 512), shape(96, 512), "256 tokens, got 320"),
        (shape(64, 520), shape(96, 520), "wants sums of a multiple of 64 terms, got 520"),
        (shape(64, 512), shape(96, 256), "got 512 and 256"),
        (shape(64, 512), shape(2, 100, 512), "wants outputs in pairs of tiles of 16 to 128"),
        (shape(64, 256), shape(96, 256), "wants sums of at least 8 x 64 terms, got 256"),
    ],
)
@lowers
def test_products_refuse_in_words(x, weight, words):
    assert words in matmul.refuses(x, weight)
    with pytest.raises(ValueError, match="matmul wants"):
        jax.eval_shape(matmul.matmul if len(weight.shape) == 2 else matmul.glu, x, weight)


@pytest.mark.parametrize(
    ("T", "E", "F", "words"),
    [
        (7, 1024, 3072, "wants 8, 16, 24, ... 64 or 128 tokens, got 7"),
        (256, 1024, 3072, "got 256"),
        (8, 1056, 3072, "wants units that 106 to 132 blocks share in eights, got 3072 of 1056"),
        (8, 2560, 9728, "got 9728 of 2560"),
        (128, 4096, 14336, "wants at most 64 units a block of 128 tokens, got 112"),
        (8, 1024 + 64, 3072, "wants outputs that 106 to 132 blocks can share in tiles, got 1088"),
    ],
)
@lowers
def test_whole_mlps_refuse_in_words(T: int, E: int, F: int, words: str):
    with pytest.raises(ValueError, match=re.escape(words)):
        jax.eval_shape(gated_mlp.gated_mlp, shape(T, E), shape(2, F, E), shape(E, F))


@lowers
def test_whole_mlps_refuse_weights_that_do_not_fit():
    x, gate_up, down = shape(8, 1024), shape(2, 3072, 1024), shape(1024, 3072)
    with pytest.raises(ValueError, match="gated_mlp wants one dtype, bfloat16 or float16"):
        jax.eval_shape(gated_mlp.gated_mlp, x, gate_up, shape(1024, 3072, dtype="float32"))
    with pytest.raises(ValueError, match="gated_mlp wants weights of 512, "):
        jax.eval_shape(gated_mlp.gated_mlp, shape(8, 512), gate_up, down)
    for run, weights in (gated_mlp.gated_mlp, (gate_up, down)), (matmul.glu, (gate_up,)):
        with pytest.raises(
            ValueError, match=f"{run.__name__} wants one of .*gelu_tanh.*, got relu"
        ):
            jax.eval_shape(functools.partial(run, activation="relu"), x, *weights)


@pytest.mark.parametrize("activation", matmul.ACTIVATIONS)
def test_kernels_and_plain_jax_gate_as_in_float64(activation):
    y = 4 * np.random.default_rng(0).normal(size=(matmul.ROWS, 2, 48)).astype(np.float32)
    y[0], y[1] = -90, 90
    gate, up = y.astype(np.float64).swapaxes(0, 1)
    z = gate / 2 if activation == "silu" else (2 / np.pi) ** 0.5 * (gate + 0.044715 * gate**3)
    want = gate * (1 + np.tanh(z)) / 2 * up
    of_kernels = matmul.activate(jnp.asarray(y.reshape(matmul.ROWS, -1)), activation)
    np.testing.assert_allclose(of_kernels, want, rtol=2e-5, atol=1e-6)
    np.testing.assert_allclose(plain.glu(jnp.asarray(y), activation), want, rtol=2e-5, atol=1e-5)


def test_kernels_of_silu_alone_refuse_other_gates():
    none: Any = None  # what is asked later
    for operation in (quantized_products.MLP, *low_rank.KERNELS.units):
        args = (none, none, none, none)
        at = 3 if operation is quantized_products.MLP else 4
        asked = *args[:at], "gelu_tanh", *args[at:]
        assert operation.refuses(*asked) == "wants gates of silu, got gelu_tanh"


@lowers
def test_products_run_where_they_are_ahead():
    """Large weights and few tokens go through our own kernels; all else is XLA's."""
    batch: Any = None  # of which products know nothing
    fused = backends.fused(batch)

    def kernels(function, *args, cores: int = 132) -> str:
        with cuda(cores):
            # A new function each time, for which nothing is kept.
            traced = jax.jit(lambda *args: function(*args)).trace(*args)
        return " ".join(re.findall(r"kernel_name='(\w+)'", str(traced.jaxpr)))

    def linear(T: int, E: int, *out: int) -> str:
        return kernels(fused.linear, shape(T, E), Linear(shape(*out, E), None))

    def mlp(T: int, E: int, F: int, bias=None, cores: int = 132, activation="silu") -> str:
        gate_up, down = Linear(shape(2, F, E), bias), Linear(shape(E, F), None)
        run = functools.partial(fused.mlp, activation=activation)
        return kernels(run, shape(T, E), gate_up, down, cores=cores)

    large = [linear(T, 4096, 8, 6, 128) for T in (8, 64, 128, 256)]
    assert large == ["", "matmul", "matmul", ""] and not linear(64, 1024, 8, 4, 128)
    large = [mlp(T, 4096, 14336) for T in (1, 8, 64, 128, 256, 512)]
    assert large == ["", "gated_mlp", "gated_mlp", "glu", "glu", ""]
    small = [mlp(T, 1024, 3072) for T in (1, 8, 128, 256)]
    assert small == ["", "gated_mlp", "gated_mlp", ""]
    assert not mlp(64, 4096, 14336, shape(2, 14336))
    assert [mlp(T, 3840, 15360, activation="gelu_tanh") for T in (8, 256)] == ["gated_mlp", "glu"]
    assert [mlp(T, 3840, 15360, activation="gelu") for T in (8, 256)] == ["", ""]
    # Blocks of which some wait outside of a smaller chip would never meet.
    for cores, kernel in ((128, "gated_mlp"), (114, "glu")):
        assert mlp(64, 4096, 14336, cores=cores) == kernel


@lowers
def test_a_program_tells_what_runs_each_operation_and_why():
    """By bucket: decode, mixed, and rows that verify drafts, as far as they fit in a tile."""
    sizes = dict(hidden_size=4096, intermediate_size=14336, num_attention_heads=32, head_dim=128)
    config = tiny.config(**sizes, num_key_value_heads=8)
    engine = tiny.engine_config(block_size=64, dtype="bfloat16", kv_dtype="bfloat16")
    params = pytree.abstract(llama.params, config.dims | dict(param=jnp.dtype("bfloat16")))
    program = Program(llama, config, engine, backends.fused, RULES)

    reasons = {}

    def told(bucket: Bucket, make: Any = backends.fused) -> dict[str, str]:
        with cuda():
            found = operations(replace(program, ops=make), params, Key("step", bucket))
        for one in found:
            assert all(one.refused.values())
            reasons[one.operation] = one.refused
        return {one.operation: one.name for one in found}

    decode = told(Bucket(64, 64, 1))
    assert decode == dict(
        add_norm="add_rms_norm", linear="matmul", attention="decode_attention",
        mlp="gated_mlp", project="plain JAX in parts",
    ) | {"rotate and write": "rope_write"}  # fmt: skip
    mixed = told(Bucket(512, 5))
    assert (mixed["attention"], mixed["linear"]) == ("prefill_attention", "plain JAX")
    assert "as many tokens" in reasons["attention"]["decode_attention"]
    assert told(Bucket(10, 5, 2))["attention"] == "decode_attention"
    assert told(Bucket(80, 5, 16))["attention"] == "decode_attention"
    assert told(Bucket(85, 5, 17))["attention"] == "plain JAX"
    assert "got 17 x 4 = 68" in reasons["attention"]["decode_attention"]
    assert set(told(Bucket(64, 64, 1), backends.paged).values()) == {"plain JAX"}


@lowers
@pytest.mark.parametrize(
    ("dtype", "kv_dtype", "block_size"),
    [
        ("float32", "float32", 64),
        ("bfloat16", "float32", 64),
        ("float32", "int8", 64),
        ("bfloat16", "float8_e4m3fn", 24),
    ],
)
@pytest.mark.parametrize(
    ("name", "layers"),
    [("qwen06b", {}), ("granite4_h_tiny", dict(layer_types=["mamba", "attention"]))],
    ids=["qwen06b", "granite4_h_tiny"],
)
def test_attention_that_kernels_refuse_is_plain_jax(name, layers, dtype, kv_dtype, block_size):
    """In steps of each kind of bucket."""
    given = PRESETS[name].config | dict(num_hidden_layers=2) | layers
    model, config = read_model(Settings(given))
    engine = tiny.engine_config(block_size=block_size, dtype=dtype, kv_dtype=kv_dtype)
    program = Program(model, config, engine, backends.fused, RULES)
    params = pytree.abstract(model.params, config.dims | dict(param=jnp.dtype(dtype)))
    for bucket in (Bucket(16, 16, 1), Bucket(512, 16), Bucket(64, 16, 4)):
        with cuda():
            found = operations(program, params, Key("step", bucket))
        assert {one.name for one in found if one.operation == "attention"} == {"plain JAX"}


def test_engines_choose_in_the_open():
    """On a CPU the reference runs, and says why; kernels that cannot run are no silent choice."""
    config, engine = tiny.config(), tiny.engine_config()
    choice = backends.choose_ops(config, replace(engine, attention_backend="reference"))
    assert (choice.name, choice.reason) == ("reference", "it was asked for")
    with pytest.raises(ValueError, match="attention_backend must be one of"):
        replace(engine, attention_backend="flash")
    if jax.default_backend() == "cpu":
        choice = backends.choose_ops(config, engine)
        assert choice.name == "reference" and "wants a Hopper GPU" in choice.reason
        words = "attention_backend='mosaic_gpu' wants a Hopper GPU.*: use 'auto' or 'reference'"
        with pytest.raises(ValueError, match=words):
            backends.choose_ops(config, replace(engine, attention_backend="mosaic_gpu"))


def test_operations_of_the_user_run_and_no_cache_of_programs_knows_them(tmp_path):
    config, params = tiny.model_and_params()
    given = functools.partial(backends.paged)
    built = build(llama, config, tiny.engine_config(), params, ops=given, cache_dir=tmp_path)
    assert built.program.ops is given and built.choice.reason == "its operations were given"
    assert built.cache is None and built.task is None


def test_an_operation_that_nothing_serves_says_what_each_said():
    refusing = Operation("fast", lambda x: x, lambda x: f"wants 2, got {x}")
    with pytest.raises(AssertionError, match=r"all implementations of norm refuse: .*got 3"):
        run_first("norm", (refusing,), 3, note=unnoted)
