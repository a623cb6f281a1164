"""Kernels compute what their oracles do, on a GPU; everywhere they lower."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
import functools
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrunner import pytree
from jaxrunner.kernels_pallas.attention.decode_plan import TuningConfig, plan
from jaxrunner.kernels_pallas.attention.prefill_tiles import tiles
from jaxrunner.kernels_pallas.cases.attention_case import Attention
from jaxrunner.kernels_pallas.cases.catalog import TESTS, Case
from jaxrunner.kernels_pallas.sampling.sampler import sample_tokens
from jaxrunner.model import AttentionSpec, RopeAndNorm
from jaxrunner.ops import backends
from jaxrunner.program.bucket import WIDE, SampleSize
from jaxrunner.sampling import RULES
from jaxrunner.sampling.gumbel import MAX_USUAL
from jaxrunner.sampling.min_p import min_p
from jaxrunner.sampling.sampler import sample
from jaxrunner.sampling.seed import TARGET, noise, seed
from jaxrunner.sampling.temperature import temperature
from jaxrunner.sampling.top_k_top_p import top_k_top_p
from jaxrunner.types import Batch, LayerCache
from tests.support import oracles, rules, state_oracles
from tests.support.kernels import BOUND, batch_of, case_id, error
from tests.support.lowering import cuda, lowers


@pytest.mark.gpu
@pytest.mark.parametrize("case", [c for c in TESTS if c.kernel != "sample_tokens"], ids=case_id)
def test_kernels_equal_their_oracles(case: Case):
    args = case.make(time.time_ns() % 2**31)
    of_states = case.kernel.startswith("state_")
    oracle = getattr(state_oracles if of_states else oracles, case.kernel)
    want = oracle(*args, **case.options)
    got = jax.jit(case.run)(*args)
    got, want = (x if isinstance(x, tuple) else (x,) for x in (got, want))
    # Approximate tanh, and a product of two roundings.
    loose = 3 if case.options.get("soft_cap") else 2
    for mine, right in zip(got, want, strict=True):
        assert error(mine, right) < loose * bound(case, str(args[0].dtype), str(mine.dtype))


def bound(case: Case, first: str, dtype: str) -> float:
    """Returns the bound of a result, given the dtypes of the first argument and of the result."""
    if case.kernel == "lora_expand":  # a product of rounded numbers, to whatever it is added
        return BOUND["bfloat16"]
    if case.kernel in ("fp8_gates", "add_norm_fp8") and dtype == "float32":
        return 8e-3  # a number may be rounded to its neighbour in fp8, which is 6% away
    if dtype == "float32" and first == "bfloat16" and case.kernel.startswith("state_"):
        return 5e-5  # a sum whose last bit differs may round a state to its neighbour
    return 1e-5 if dtype == "float32" and case.kernel == "state_chunks" else BOUND[dtype]


def plain_tokens(logits, words, positions, greedy, heat, floor, k, p):
    """Draws in plain JAX, which has an oracle of its own."""
    N = len(positions)
    tables = {r.name: pytree.zeros(r.params, WIDE | dict(R=N, key=2)) for r in RULES}
    values = {
        seed: dict(words=words, greedy=greedy), temperature: dict(value=heat),
        min_p: dict(log=floor), top_k_top_p: dict(k=k, p=p),
    }  # fmt: skip
    for rule, fields in values.items():
        tables[rule.name] = replace(tables[rule.name], **fields)
    batch = rules.batched(rules.requests(N), range(N), positions)
    draw = functools.partial(sample, program=rules.program(), size=SampleSize(N))
    return jax.jit(draw)(logits.astype(jnp.float32), batch, tables).token_ids


@pytest.mark.gpu
@pytest.mark.parametrize("case", [c for c in TESTS if c.kernel == "sample_tokens"], ids=case_id)
def test_the_sampler_draws_the_tokens_of_plain_jax(case: Case):
    args = case.make(time.time_ns() % 2**31)
    drawn = jax.jit(case.run)(*args)
    np.testing.assert_array_equal(drawn.token_ids, plain_tokens(*args))
    assert not np.asarray(drawn.not_finite | drawn.no_choice).any()
    broken = args[0].at[1, 7].set(jnp.nan), *args[1:]
    again = jax.jit(case.run)(*broken)
    assert np.asarray(again.not_finite).tolist() == [i == 1 for i in range(len(args[2]))]
    others = np.arange(len(args[2])) != 1
    np.testing.assert_array_equal(again.token_ids[others], drawn.token_ids[others])


@pytest.mark.gpu
def test_a_rare_noise_reaches_what_no_other_could():
    """Rows that a rare token decides: a likely one is a little above or below it."""
    V, likely, none = 128_256, 99_999, np.full(8, -np.inf, np.float32)
    words = jnp.stack([jnp.zeros(2048, jnp.uint32), jnp.arange(2048, dtype=jnp.uint32)], 1)
    draw = jax.jit(functools.partial(noise, stream=TARGET, shape=(V,)))
    best, own = jax.lax.map(lambda w: (draw(w, 7).max(), draw(w, 7)[likely]), words)
    rows = jnp.argsort(best)[-8:]
    assert best[rows].min() > MAX_USUAL
    near = best[rows] - own[rows] + jnp.array([-3.0, -0.1, 0.1, 3.0] * 2)
    args = jnp.zeros((8, V)).at[:, likely].set(near), words[rows], jnp.full(8, 7, jnp.int32)
    ones, zeros = np.ones(8, np.float32), np.zeros(8, np.int32)
    args = *args, np.zeros(8, bool), ones, none, zeros, ones
    got = jax.jit(sample_tokens)(*args).token_ids
    np.testing.assert_array_equal(got, plain_tokens(*args))
    assert np.asarray(got != likely).tolist() == [True, True, False, False] * 2


def mixed_batch(kv_dtype: str | None) -> tuple[Batch, LayerCache]:
    """Rows of one token and of many, side by side."""
    sizes = (1, 1, 40, 0, 70), (99, 0, 64, 0, 0), 8, 2
    made = Attention("", *sizes, kv_dtype=kv_dtype).make(3, decode=False)
    _, k, v, blocks, starts, lens, *scales = made
    cache = LayerCache(k, v, *(scales or (None, None)))
    return batch_of(128, starts, lens, blocks, k.shape), cache


def verify_batch(kv_dtype: str | None) -> tuple[Batch, LayerCache]:
    """Rows that verify drafts: four places each, of which some have fewer tokens or none."""
    new = (4, 1, 0, 3) * 8
    sizes = Attention("", new, (99, 64, 0, 0) * 8, 8, 2, kv_dtype=kv_dtype, query_len=4)
    _, k, v, blocks, lens, _, *scales = sizes.make(3, decode=True)
    starts, cache = np.arange(len(new) + 1) * 4, LayerCache(k, v, *(scales or (None, None)))
    return batch_of(128, starts, lens, blocks, k.shape, query_len=4, num=new), cache


@pytest.mark.gpu
@pytest.mark.parametrize("make_batch", [mixed_batch, verify_batch], ids=["mixed", "verify"])
@pytest.mark.parametrize("kv_dtype", [None, "float8_e4m3fn"], ids=["bfloat16", "fp8"])
@pytest.mark.parametrize("chunk_size", [None, 64])
def test_layers_of_mixed_batches_equal_plain_jax(make_batch, kv_dtype, chunk_size):
    """Through all kernels of `attend`."""
    rng, (batch, cache) = np.random.default_rng(), make_batch(kv_dtype)
    qkv = jnp.asarray(rng.standard_normal((128, 2, 6, 128)), jnp.bfloat16)
    angle = jnp.asarray(rng.uniform(0, 6, (128, 1, 64)), jnp.float32)
    heads = RopeAndNorm(jnp.cos(angle), jnp.sin(angle), None, None, 1e-6)
    spec = AttentionSpec(0, None, 128**-0.5, chunk_size=chunk_size)

    def run(make):
        attend = jax.jit(lambda qkv, cache: make(batch).rotate_attend(qkv, heads, cache, spec))
        return attend(qkv, cache)

    (got, after), (want, expected) = run(backends.fused), run(backends.paged)
    real = np.asarray(batch.row < batch.seq_lens.size)
    assert error(got[real], oracles.wide(want[real])) < 2 * BOUND["bfloat16"]
    for held, wanted in (after.k, expected.k), (after.v, expected.v):  # what no token is in is NaN
        np.testing.assert_allclose(oracles.wide(held), oracles.wide(wanted), rtol=2**-7, atol=1e-5)


@pytest.mark.parametrize("window", [None, 100], ids=["all keys", "window"])
@pytest.mark.parametrize("B", [1, 9, 256])
def test_tiles_cover_each_token_once(B: int, window: int | None):
    """Those of rows of length 0, too, which share tiles where nothing is between them."""
    rng, T, keys = np.random.default_rng(), 1024, 64
    cut = jax.jit(functools.partial(tiles, T=T, tile=128, keys=keys, window=window))
    for share in np.linspace(0, 1, 40):
        new = np.where(rng.random(B) < 0.5, 1, rng.integers(0, 3 * T // B, B))
        starts = np.append(0, np.minimum(np.cumsum(new), T))
        new, some = np.diff(starts), rng.random(B) < share
        lens = np.where(some, new + rng.integers(0, 400, B), 0)
        *table, (num, *_) = np.asarray(cut(jnp.asarray(starts), jnp.asarray(lens)))
        assert num <= len(table)
        table, owner, times = np.stack(table[:num]), np.full(T, -1), np.zeros(T, int)
        owner[: starts[-1]] = np.repeat(np.where(some, np.arange(B), -1), new)
        for row, first, low, high, zero, start, length, steps in table:
            assert first % 8 == 0 and first <= low < high <= first + 128
            assert (owner[low:high] == (row if steps else -1)).all()
            times[low:high] += 1
            if steps:
                least = 0 if window is None else max(low + zero - window + 1, 0)
                assert length == lens[row] == zero + starts[row + 1]
                assert start == least // keys and start + steps == -(-(high + zero) // keys)
        assert (times == 1).all() and (np.diff(table[:, 7]) <= 0).all()
        gaps = 1 + (some & (new > 0)).sum()
        assert (table[:, 7] == 0).sum() <= gaps + (T + 7 * gaps) // 128


def marked(cases: Sequence[Case]) -> Iterator[Any]:
    """Yields cases, those behind the first three of a kernel as slow ones."""
    at = Counter[str]()
    for case in cases:
        at[case.kernel] += 1
        marks = [pytest.mark.slow] if at[case.kernel] > 3 else []
        yield pytest.param(case, id=case_id(case), marks=marks)


@lowers
@pytest.mark.parametrize("case", [*marked(TESTS)])
def test_kernels_lower_for_cuda(case: Case):
    args = jax.eval_shape(lambda: case.make(0))
    with cuda():
        text = jax.jit(case.run).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    assert "mosaic_gpu" in text


planned = jax.jit(
    plan, static_argnums=(2, 3, 4), static_argnames=("skip_empty", "query_len")
)  # else each operation is compiled


@pytest.mark.parametrize("skip_empty", [False, True])
def test_rows_without_tokens_cost_an_item_only_where_zeros_are_wanted(skip_empty):
    lens, blocks = jnp.array([0, 300, 0, 0, 5, 0]), jnp.zeros((6, 8), jnp.int32)
    items = planned(lens, blocks, (9, 2, 64, 64), None, TuningConfig(), skip_empty=skip_empty)
    rows = np.asarray(items.row)
    assert set(rows[rows < 6].tolist()) == ({1, 4} if skip_empty else set(range(6)))
    nothing = planned(lens * 0, blocks, (9, 2, 64, 64), None, TuningConfig(), skip_empty=skip_empty)
    assert (np.asarray(nothing.row) < 6).sum() == (0 if skip_empty else 6)


def test_a_plan_reads_the_keys_of_a_row_s_first_query_in_a_window():
    """Its window starts before that of the last: at a tile's edge, in the tile before."""
    lens, blocks = jnp.array([256, 0, 259]), jnp.zeros((3, 8), jnp.int32)
    shape, sizes = (9, 2, 64, 64), dict(skip_empty=True)
    one = planned(lens, blocks, shape, 64, TuningConfig(), **sizes)
    four = planned(lens, blocks, shape, 64, TuningConfig(), query_len=4, **sizes)
    first = {int(r): int(f) for r, f in zip(one.row[::-1], one.first[::-1], strict=True)}
    before = {int(r): int(f) for r, f in zip(four.row[::-1], four.first[::-1], strict=True)}
    assert (first[0], before[0]) == (3, 2) and first[2] == before[2] == 3
