"""The kernel of convolutions of one new token a row, in Pallas' interpreter or on a GPU."""

from dataclasses import replace
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrunner.caches.state import ConvParts, StateCache
from jaxrunner.kernels_pallas.states.conv_step import TuningConfig, conv_step, refuses
from jaxrunner.operation import Chosen
from jaxrunner.ops.states import short_conv
from tests.support.lowering import lowers
from tests.support.states import batch_of, interpreted, sized

N, TAPS = 6, 3


def cache_of(C: int, dtype: Any) -> StateCache:
    """Returns a cache whose blocks 0 and 5 hold NaN."""
    conv = np.random.default_rng(1).normal(size=(N, TAPS, C)).astype(np.float32)
    conv[[0, 5]] = np.nan
    return StateCache(jnp.asarray(conv, dtype), None, None, None, None, S=2**30)


@lowers
@pytest.mark.parametrize(
    ("C", "dtype", "has_bias"), [(384, "bfloat16", True), (1024, "float32", False)]
)
def test_rows_of_one_token_equal_plain_jax(C: int, dtype: str, has_bias: bool):
    """One that goes on, a new one in a block of NaN, one without a token, and padding."""
    batch = batch_of([(4, 7, 1), (0, 0, 1), (5, 3, 0), (2, 30, 1)], 5, 5, 1)
    rng = np.random.default_rng(0)
    x, weight, bias = (
        jnp.asarray(rng.normal(size=size), dtype) for size in ((5, C), (C, TAPS + 1), C)
    )
    told, cache = list[Chosen](), cache_of(C, dtype)

    def run(candidates: Any) -> Any:
        return jax.jit(
            lambda batch, cache: short_conv.convolve(
                candidates, batch, x, weight, bias if has_bias else None, cache, 0,
                note=told.append,
            )
        )(batch, cache)  # fmt: skip

    kernel = functools.partial(short_conv.one_token, interpret=interpreted())
    kernels = short_conv.KERNELS[0]._replace(run=kernel), *short_conv.PLAIN
    (got, after), (want, expected) = run(kernels), run(short_conv.PLAIN)
    assert [one.name for one in told] == ["conv_step", "plain JAX"]
    rows = np.array([0, 1, 3])
    near = functools.partial(np.testing.assert_allclose, rtol=1e-2 if dtype == "bfloat16" else 1e-5)
    near(got[rows].astype(jnp.float32), want[rows].astype(jnp.float32), atol=1e-5)
    assert np.isfinite(got.astype(jnp.float32)).all()
    np.testing.assert_array_equal(after.conv.astype(jnp.float32), expected.conv.astype(jnp.float32))


@lowers
@pytest.mark.parametrize(
    ("G", "M", "parts", "dtype", "has_bias"),
    [
        # As of Mamba-2, between gates and steps; as of delta nets.
        (2, 400, ConvParts(100, (192, 32, 32)), "float32", True),
        (1, 3500, ConvParts(100, (3072, 128, 128)), "bfloat16", True),
        (4, 288, ConvParts(0, (64, 64, 128), (0.125, 1.0)), "bfloat16", False),
        (2, 768, ConvParts(0, (128, 128, 256), (128**-0.5, 1.0)), "float32", False),
        (4, 256, ConvParts(0, (64, 64, 64), (0.0, 2.0)), "float32", True),
    ],
)
def test_parts_of_sums_equal_those_of_plain_jax(
    G: int, M: int, parts: ConvParts, dtype: str, has_bias: bool
):
    num, batch = parts.channels, batch_of([(4, 7, 1), (0, 0, 1), (5, 3, 0), (2, 30, 1)], 5, 5, 1)
    rng, cache = np.random.default_rng(0), cache_of(G * num, dtype)
    x, weight, bias = (
        jnp.asarray(rng.normal(size=size), dtype)
        for size in ((5, G, M), (G, num, TAPS + 1), (G, num))
    )
    told = list[Chosen]()

    def run(candidates: Any) -> Any:
        args = batch, x, weight, bias if has_bias else None, cache, 0, parts
        return jax.jit(lambda: short_conv.convolve(candidates, *args, note=told.append))()

    # What stands in for stores of threads writes what it has read of others' places.
    how = interpreted(detect_races=False)
    kernel = functools.partial(short_conv.one_token, interpret=how)
    kernels = short_conv.KERNELS[0]._replace(run=kernel), *short_conv.PLAIN
    (got, after), (want, expected) = run(kernels), run(short_conv.PLAIN)
    assert [one.name for one in told] == ["conv_step", "plain JAX"]
    rows = np.array([0, 1, 3])
    for one, other, size in zip(got, want, parts.sizes, strict=True):
        assert one.shape == other.shape == (5, G, size) and one.dtype == jnp.float32
        # Sums are rounded to their dtype, one way or the other.
        tolerance = 2e-2 if dtype == "bfloat16" else 1e-5
        np.testing.assert_allclose(one[rows], other[rows], rtol=tolerance, atol=tolerance)
    for one, norm in zip(want, parts.l2_norms, strict=False):
        if norm:
            np.testing.assert_allclose(np.linalg.norm(one[rows], axis=-1), norm, rtol=1e-4)
    np.testing.assert_array_equal(after.conv.astype(jnp.float32), expected.conv.astype(jnp.float32))


@lowers
def test_threads_have_fewer_channels_where_there_are_few_rows():
    """Whatever they have, sums are the same."""
    x, weight = jnp.ones((2, 1024)), jnp.ones((1024, TAPS + 1))
    conv, source = cache_of(1024, "float32").conv, jnp.array([1, N], jnp.int32)
    run = functools.partial(conv_step, conv, x, weight, None, source, source)
    few, many = (
        run(config=TuningConfig(blocks=blocks), interpret=interpreted()) for blocks in (1, 10**6)
    )
    jax.tree.map(np.testing.assert_array_equal, few, many)
    np.testing.assert_allclose(few[1][0], 1 + conv[1].sum(0), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (dict(x=sized(3, 256, dtype="bfloat16")), "in one dtype, got bfloat16, float32"),
        (dict(conv=sized(9, 3, 200)), "wants channels of a multiple of 128, got 200"),
        (dict(weight=sized(256, 3)), r"wants weight of \[256, 4\], got \[256, 3\]"),
        (dict(bias=sized(3)), r"wants bias of \[256\], got \[3\]"),
        (
            dict(x=sized(3, 2, 100), parts=ConvParts(4, (64, 64))),
            r"wants parts that are 256 channels of \[2, 100\] numbers, got ConvParts",
        ),
        (dict(parts=ConvParts(0, (256,))), r"wants x of \[3, groups, numbers\], got \[3, 256\]"),
        (
            dict(x=sized(3, 2, 128), parts=ConvParts(0, (64, 64))),
            r"wants weight of \[2, 128, 4\], got \[256, 4\]",
        ),
        (
            dict(x=sized(3, 2, 128), parts=ConvParts(0, (32, 96), (1.0, 1.0))),
            "wants parts of whole warps, and vectors of one size, got ConvParts",
        ),
    ],
)
@lowers
def test_the_kernel_refuses_in_words(changes: dict[str, Any], words: str):
    given = dict(conv=sized(9, 3, 256), x=sized(3, 256), weight=sized(256, 4), bias=sized(256))
    source, given = sized(3, dtype="int32"), given | changes
    call = functools.partial(conv_step, parts=given.pop("parts", None))
    with pytest.raises(ValueError, match=f"conv_step .*{words}"):
        jax.eval_shape(call, *given.values(), source, source)


@pytest.mark.skipif(jax.__version_info__ >= (0, 11), reason="of an older JAX")
def test_an_older_jax_is_refused():
    told = refuses(sized(9, 3, 256), sized(3, 256), sized(256, 4), None)
    assert told == f"wants JAX 0.11 or later, got {jax.__version__}"


def test_longer_rows_and_drafts_run_in_plain_jax():
    kernel, cache = short_conv.KERNELS[0], cache_of(256, "float32")
    given: Any = None, sized(3, 256), sized(256, 4), None
    prompts = batch_of([(4, 0, 3)], 5, 5)
    wanted = "wants rows of one token each, which verify no drafts"
    assert kernel.refuses(prompts, *given, cache, None) == wanted
    drafted = replace(cache, drafted_conv=jnp.zeros((N, 2, 256)))
    assert kernel.refuses(batch_of([(4, 7, 1)], 5, 5, 1), *given, drafted, None) == wanted
