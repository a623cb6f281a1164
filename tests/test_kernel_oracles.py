"""Oracles of attention, norms and writes are right: plain JAX tells the same, on any device."""

from dataclasses import replace
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrunner.kernels_pallas import reference
from jaxrunner.kernels_pallas.cases.catalog import TESTS, Case
from jaxrunner.model import AttentionSpec, RopeAndNorm
from jaxrunner.ops.attention import ROTATE_WRITE
from jaxrunner.ops.packed_parts import PackedParts
from jaxrunner.ops.plain import add_rms_norm
from jaxrunner.types import LayerCache
from tests.support import oracles
from tests.support.kernels import BOUND, batch_of, case_id, error

attend = jax.jit(reference.attend, static_argnames="spec")  # else each operation is compiled


@functools.partial(jax.jit, static_argnames=("eps", "one_more"))
def add(x, residual, weight, end=None, **options):
    whole = residual if residual.ndim == 2 else residual.sum(0).astype(x.dtype)
    return add_rms_norm(x, whole, weight, end=end, **options)


@functools.partial(jax.jit, static_argnames=("eps", "one_more", "dtype"))
def rotate_and_write(qkv, cos, sin, k, v, at, q_norm=None, k_norm=None, dtype=None, **options):
    qkv, plain = qkv if dtype is None else PackedParts(qkv, dtype), ROTATE_WRITE[-1]
    batch = batch_of(1, [0, 0], [0], np.zeros((1, 1), np.int32), k.shape)
    heads, cache = RopeAndNorm(cos, sin, q_norm, k_norm, **options), LayerCache(k, v, None, None)
    q, cache = plain.run(replace(batch, cache_index=(at,)), qkv, heads, cache, 0)
    return q, cache.k, cache.v


def plain_jax(case: Case, *args):
    """Runs the specification of a kernel."""
    if case.kernel == "add_rms_norm":
        return add(*args, **case.options)
    if case.kernel == "rope_write":
        return rotate_and_write(*args, **case.options)
    q, k, v, blocks, *rows = args
    Q = case.options.get("query_len", 1)
    starts = jnp.arange(0, len(q) + 1, Q) if case.kernel == "decode_attention" else rows.pop(0)
    lens = rows.pop(0)
    several = dict(query_len=Q, num=np.asarray(rows.pop(0))) if Q > 1 else {}
    batch = batch_of(len(q), starts, lens, blocks, k.shape, **several)
    spec = AttentionSpec(0, case.options["window"], case.options["scale"])
    out = attend(batch, q, LayerCache(k, v, *(rows or (None, None))), spec=spec)
    # Places without a token have anything here, zeros in the kernels.
    return jnp.where((batch.row < len(lens))[:, None, None], out, 0) if several else out


FEW = (
    "edges", "blocks of 16", "groups of 7", "fp8", "int8", "4 tokens a row", "4 tokens, narrow",
    "4 tokens, fp8",
)  # fmt: skip
PLAIN = [
    case for case in TESTS if case.name in FEW or case.kernel in ("add_rms_norm", "rope_write")
]


@pytest.mark.parametrize("case", PLAIN, ids=case_id)
def test_plain_jax_equals_the_oracles_of_kernels(case: Case):
    """On any device: the oracles are right, and the reference is what the kernels are."""
    args = case.make(7)
    want = getattr(oracles, case.kernel)(*args, **case.options)
    got = plain_jax(case, *args)
    got, want = (x if isinstance(x, tuple) else (x,) for x in (got, want))
    for mine, right in zip(got, want, strict=True):
        assert error(mine, np.asarray(right)) < 2 * BOUND[str(mine.dtype)]
