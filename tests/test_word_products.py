"""Products of weights in 4 bits with tokens in the order of words, as far as no GPU is needed."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrunner.kernels_pallas.products.add_norm import add_rms_norm
from jaxrunner.kernels_pallas.quantized import quantized_fit
from jaxrunner.kernels_pallas.quantized.quantized_fit import TuningConfig
from jaxrunner.kernels_pallas.quantized.quantized_tile import quantized_tile
from jaxrunner.kernels_pallas.quantized.widen_tile import in_order
from jaxrunner.ops import word_products
from jaxrunner.ops.packed_parts import PackedParts
from jaxrunner.ops.rounded_tokens import OrderedTokens
from jaxrunner.quantization.scheme import Activation, Scheme
from tests.support.lowering import lowers
from tests.support.quantized_shapes import mlp_weights, shaped, weights
from tests.support.readers import chosen, norm_and_mlp

FOUR = Scheme("int4", (1, 128))
ORDERED = OrderedTokens(shaped(64, 4096))


def test_tokens_lie_where_a_thread_has_the_words_of_weights():
    """Of each run of 32 terms, for the four threads that share a row of `wgmma`'s operand."""
    found = in_order(np.arange(3 * 64).reshape(3, 64))
    for thread in range(4):
        word = range(8 * thread, 8 * thread + 8)  # numbers of four bytes
        # What `wgmma` takes of a thread, of sixteen terms and the next sixteen.
        places = [16 * half + 8 * high + 2 * thread + i for half in range(2) for high in range(2)
                  for i in range(2)]  # fmt: skip
        pairs = [number for i in range(4) for number in (word[i], word[i + 4])]
        np.testing.assert_array_equal(found[1, 32:][places], np.add(64 + 32, pairs))


@lowers
@pytest.mark.parametrize(
    ("tokens", "scheme", "names"),
    [
        (64, FOUR, ("add_rms_norm for words", "quantized_tile of words")),
        (32, FOUR, ("add_rms_norm", "quantized_matmul")),
        (128, FOUR, ("add_rms_norm", "quantized_tile")),
        (64, replace(FOUR, has_order=True), ("add_rms_norm", "quantized_tile")),
        (64, replace(FOUR, has_zero=True), ("add_rms_norm", "quantized_matmul")),
        (64, Scheme("int4", (1, 4096)), ("add_rms_norm", "quantized_tile")),
        (64, Scheme("int8", (1, 128)), ("add_rms_norm", "quantized_tile")),
    ],
)
def test_a_norm_comes_in_order_where_words_of_weights_are_read(tokens, scheme, names):
    def run(ops: Any, x: Any, residual: Any, norm: Any, w: Any) -> Any:
        _, h = ops.add_norm(x, residual, norm, 1e-5, readers=(w,))
        y = ops.linear(h, w)
        assert isinstance(h, OrderedTokens) == ("words" in names[0])
        assert h.shape == (tokens, 4096) and y.shape == (tokens, 6144)

    norm = shaped(tokens, 4096), shaped(4, tokens, 4096, dtype=jnp.float32), shaped(4096)
    told = chosen(run, *norm, weights(scheme, 6144, 4096))
    assert told == dict(add_norm=names[0], linear=names[1])


@lowers
@pytest.mark.parametrize(
    ("tokens", "packed", "name", "parts"),
    [
        (64, 6, "quantized_tile of words in parts", 4),  # of three warpgroups' rows, in 128 blocks
        (64, 8, "quantized_tile of words", 0),  # of one warpgroup's rows, in 128 blocks
        (128, 6, "quantized_tile", 0),
    ],
)
def test_qkv_comes_in_parts_where_that_leaves_less_to_the_busiest(tokens, packed, name, parts):
    def run(ops: Any, x: Any, norm: Any, w: Any) -> Any:
        _, h = ops.add_norm(x, x, norm, 1e-5, readers=(w,))
        qkv = ops.project_qkv(h, w)
        assert isinstance(qkv, PackedParts) == bool(parts)
        assert (qkv.shape, qkv.dtype) == ((tokens, 8, packed, 128), x.dtype)
        assert not parts or qkv.parts.shape == (parts, *qkv.shape)

    w = weights(FOUR, 8 * packed * 128, 4096)
    w = jax.tree.map(lambda a: shaped(8, packed, 128, *a.shape[1:], dtype=a.dtype), w)
    told = chosen(run, shaped(tokens, 4096), shaped(4096), w)
    assert told["linear"] == name


@lowers
@pytest.mark.parametrize(
    ("outputs", "groups", "shared"), [(28672, 4, True), (24576, 3, False), (16384, 2, False)]
)
def test_tiles_of_words_leave_the_busiest_multiprocessor_least(outputs, groups, shared):
    shapes = shaped(64, 4096), shaped(outputs, 2048), shaped(outputs, 32, dtype=jnp.float32)
    c = quantized_fit.fit(*shapes, "int4", activation="silu", words=True)
    assert isinstance(c, TuningConfig)
    assert (c.groups, c.shared) == (groups, shared)
    assert 118 < outputs // c.height * c.cluster <= 132  # blocks


@lowers
@pytest.mark.parametrize(("terms", "outputs", "groups"), [(14336, 4096, 2), (4096, 6144, 3)])
def test_two_warpgroups_have_registers_for_two_sums(terms, outputs, groups):
    x, scale = shaped(64, terms), shaped(outputs, terms // 128, dtype=jnp.float32)
    c = quantized_fit.fit(x, shaped(outputs, terms // 2), scale, "int4", in_parts=True, words=True)
    assert isinstance(c, TuningConfig)
    assert c.groups == groups
    s = quantized_fit.share_out(x.shape, outputs, scale.shape, "int4", c, None, True)
    assert isinstance(s, quantized_fit.Shares)
    assert s.form.at_once == (2 if groups == 2 else 1)  # sums, for which registers have room


@lowers
def test_products_are_left_whole_in_words():
    def reason(tokens: int, outputs: int) -> str | None:
        shapes = shaped(tokens, 4096), shaped(outputs, 2048), shaped(outputs, 32, dtype=jnp.float32)
        return quantized_fit.refuses_parts(*shapes, "int4", words=True)

    assert reason(64, 6144) is None
    assert reason(64, 8192) == "leaves as much to the busiest multiprocessor in 4 parts"
    assert reason(56, 6144) == "is ahead for 64 to 256 tokens, got 56"


@lowers
def test_units_come_in_the_order_that_the_second_product_wants():
    def run(ops: Any, *args: Any) -> Any:
        y, _ = norm_and_mlp(ops, *args)
        assert y.shape == (4, 64, 4096)

    norm, of_norm = (shaped(64, 4096), shaped(4096)), dict(add_norm="add_rms_norm for words")
    of_units, (gate_up, down) = dict(mlp="quantized_tile of units"), mlp_weights(FOUR)
    told = chosen(run, *norm, gate_up, down)
    assert told == of_norm | of_units | dict(project="quantized_tile of words in parts")
    told = chosen(run, *norm, gate_up, weights(Scheme("int8", (1, 128)), 4096, 14336))
    assert told == of_norm | of_units | dict(project="quantized_tile in parts")


@lowers
@pytest.mark.parametrize(
    ("x", "changed", "words"),
    [
        (ORDERED, dict(permutation=shaped(4096, dtype=jnp.int32)), "inputs that are held as they"),
        (ORDERED, dict(bias=shaped(2, 14336)), "gates without bias, whose inputs stay floats"),
        (ORDERED, dict(scheme=replace(FOUR, activation=Activation("int8"))), "inputs stay floats"),
        (ORDERED, dict(zero=shaped(2, 14336, 32, dtype=jnp.int8)), "weights without zero points"),
        (shaped(64, 4096), {}, None),
        (ORDERED, {}, None),
    ],
)  # fmt: skip
def test_gates_that_no_tile_serves_are_refused_in_words(x, changed, words):
    gate_up, _ = mlp_weights(FOUR)
    assert word_products.refuses_units(x, weights(FOUR), "silu") is not None
    reason = word_products.refuses_units(x, replace(gate_up, **changed), "silu")
    assert reason is None if words is None else words in str(reason)


@lowers
def test_kernels_refuse_another_order_in_words():
    x, scale = shaped(64, 256), shaped(256, 2, dtype=jnp.float32)
    how: Any = dict(words=True, config=TuningConfig(exact=True))
    with pytest.raises(ValueError, match=r"quantized_tile wants words of int4 .* got int8"):
        jax.eval_shape(
            lambda *a: quantized_tile(*a, code="int8", **how),
            x, shaped(256, 256, dtype=jnp.int8), scale,
        )  # fmt: skip
    for changed, reason in (
        (dict(shared=True), "clusters of two, and no turns, where blocks share rows"),
        ({}, "one warpgroup's rows where others take steps by turns"),
    ):
        how = dict(config=TuningConfig(groups=2, turns=2, exact=True, **changed))
        with pytest.raises(ValueError, match=reason):
            jax.eval_shape(
                lambda *a, how=how: quantized_tile(*a, code="int4", **how),
                x, shaped(256, 128), scale,
            )  # fmt: skip
    norm = shaped(4, 192), shaped(4, 192), shaped(192)
    with pytest.raises(ValueError, match="wants 8 neighbours of a row in a thread, got 1 of 192"):
        jax.eval_shape(lambda *a: add_rms_norm(*a, eps=1e-5, for_words=True), *norm)
