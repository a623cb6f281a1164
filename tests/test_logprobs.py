"""What is told of tokens: logprobs, ranks and likeliest tokens, against float64."""

import functools
import math
from typing import Any

import numpy as np
import pytest

from jaxrunner.api.sampling_params import SamplingParams
from jaxrunner.config import LOGPROBS_MODES
from jaxrunner.program.bucket import Bucket, SampleSize
from jaxrunner.program.shapes import logprob_widths
from jaxrunner.runner.request_table import RequestTable
from jaxrunner.sampling.sampler import SamplerOutput
from tests.support import rules, tiny
from tests.support.rules import Row

V = 61
WIDE = 128256
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "greedy": dict(temperature=0.0),
    "temperature": dict(temperature=0.7),
    "top-k": dict(top_k=3),
    "top-p": dict(top_p=0.6, temperature=1.5),
    "min-p": dict(min_p=0.2),
    "all three": dict(top_k=9, top_p=0.8, min_p=0.05, temperature=1.3),
    "allowed ids": dict(allowed_token_ids=[3, 9, 27, 8], top_k=2),
    "penalties": dict(frequency_penalty=1.5, repetition_penalty=1.4, top_p=0.9),
    "bias": dict(logit_bias={4: 3.0, 8: -2.0}, top_k=7),
}
ROWS = [Row(SamplingParams(**kind), [1, 2], [3, 8, 3], drafts=[8, 4]) for kind in KINDS.values()]


def log_softmax(x) -> np.ndarray:
    """Returns the logprobs of all tokens, in float64."""
    x = np.asarray(x, np.float64) - max(x)
    return x - math.log(math.fsum(math.exp(v) for v in x))


def likeliest(x) -> list[int]:
    """Returns all tokens: the likeliest first, of equals the lowest."""
    return sorted(range(len(x)), key=lambda t: (-x[t], t))


def told(
    rows, logits, *, mode="raw_logprobs", num_logprobs=V, J=3, size=rules.SIZE
) -> list[SamplerOutput]:
    """Samples a token for each position of each row, with logprobs."""
    sample = rules.sampler(rules.program(mode), SampleSize(size, True, num_logprobs))
    return rules.run(sample, rows, logits, J=J, size=size)


@functools.cache
def batch(mode: str) -> tuple[np.ndarray, list[SamplerOutput]]:
    """Returns logits with ties and -inf for all kinds, and what was told of the tokens drawn."""
    logits = np.round(np.random.default_rng(5).normal(size=(len(ROWS), 3, V)) * 2, 1) + 0.0
    logits[..., 50:53] = -np.inf
    return logits.astype(np.float32), told(ROWS, logits, mode=mode)


@pytest.mark.parametrize("mode", LOGPROBS_MODES)
@pytest.mark.parametrize("kind", KINDS)
def test_values_ranks_and_order_equal_their_oracle(kind, mode):
    i = list(KINDS).index(kind)
    logits, got = batch(mode)
    for j in range(3):
        want = rules.expected(ROWS[i], j, logits[i, j])
        x = logits[i, j].astype(np.float64) if mode.startswith("raw") else want.logits
        values = log_softmax(x) if mode.endswith("logprobs") else x
        token, out = int(got[i].token_ids[j]), got[i].logprobs[0]
        close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5)
        close(out.value[j], values[token])
        assert out.rank[j] == sum(v >= x[token] for v in x)
        assert out.top_ids[j].tolist() == likeliest(x)
        close(out.top_value[j], values[likeliest(x)])
        close(out.raw[j], log_softmax(logits[i, j])[token])
        close(out.processed[j], log_softmax(want.logits)[token])
        close(out.kept_mass[j], want.kept_mass)


@pytest.mark.parametrize("kind", KINDS)
def test_removed_tokens_are_minus_infinity_and_the_sampled_one_is_not(kind):
    i = list(KINDS).index(kind)
    logits, got = batch("processed_logprobs")
    for j in range(3):
        kept = rules.expected(ROWS[i], j, logits[i, j]).logits > -np.inf
        out = got[i].logprobs[0]
        assert np.isfinite(out.value[j]) and np.isfinite(out.processed[j])
        assert (np.isfinite(out.top_value[j]) == kept[out.top_ids[j]]).all()
        assert (out.top_value[j, kept.sum() :] == -np.inf).all()


def test_modes_change_no_token_and_none_of_the_three_scores():
    (_, first), *others = (batch(mode) for mode in LOGPROBS_MODES)
    for _, other in others:
        for a, b in zip(first, other, strict=True):
            np.testing.assert_array_equal(a.token_ids, b.token_ids)
            for name in ("raw", "processed", "kept_mass"):
                one, two = (getattr(x.logprobs[0], name) for x in (a, b))
                np.testing.assert_allclose(one, two, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_processed_is_the_tempered_logprob_over_the_kept_mass(kind):
    i = list(KINDS).index(kind)
    logits, got = batch("raw_logprobs")
    whole: dict[str, Any] = {**KINDS[kind], "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    row = ROWS[i]._replace(params=SamplingParams(**whole))
    for j in range(3):
        x, token = rules.expected(row, j, logits[i, j]).logits, got[i].token_ids[j]
        out = got[i].logprobs[0]
        want = log_softmax(x)[token] - math.log(out.kept_mass[j])
        np.testing.assert_allclose(out.processed[j], want, rtol=1e-5, atol=1e-5)
        truncates = {"top_k", "top_p", "min_p"} & set(KINDS[kind])
        assert (out.kept_mass[j] < 1) if truncates else (out.kept_mass[j] == 1)


COLD = 2.0**-6  # quotients are exact, so only what follows them may round
LARGE = {
    "cold": (dict(temperature=COLD, top_k=2), 30.0, 0.005),
    "cold, nothing cut": (dict(temperature=COLD), 30.0, 0.005),
    "large": (dict(top_k=2), 1e4, 0.5),
    "large, nothing cut": (dict(temperature=0.5), 1e4, 0.5),
    "huge": (dict(top_k=2), 1e30, 0.0),
}


@pytest.mark.parametrize("kind", LARGE)
def test_scores_stay_exact_where_logits_are_large(kind):
    """A low temperature makes any logits large: their differences count, not their size."""
    params, base, spread = LARGE[kind]
    row = Row(SamplingParams(**params), drafts=[0, 0])
    noise = np.random.default_rng(2).normal(size=(1, 3, V)) * spread
    logits = (base + noise).astype(np.float32)
    got = told([row], logits)[0]
    for j in range(3):
        want, token, out = rules.expected(row, j, logits[0, j]), got.token_ids[j], got.logprobs[0]
        close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5)
        close(out.kept_mass[j], want.kept_mass)
        close(out.processed[j], log_softmax(want.logits)[token])
        close(out.raw[j], log_softmax(logits[0, j])[token])
        close(out.value[j], out.raw[j])
        close(out.top_value[j, 0], max(log_softmax(logits[0, j])))


def test_zeros_of_both_signs_are_one_logit():
    for zeros in ([-0.0, 0.0, -0.0], [0.0, -0.0, 0.0]):
        got = forced(zeros)
        assert [out.logprobs[0].rank[0] for out in got] == [3, 3, 3]
        assert got[0].logprobs[0].top_ids[0, :3].tolist() == [0, 1, 2]


def forced(logits, params=(), **rest) -> list[SamplerOutput]:
    """Samples token t in row t: the raw logprobs of each."""
    wide = np.full((len(logits), 3, V), -np.inf, np.float32)
    wide[..., : len(logits)] = logits
    allow = [SamplingParams(allowed_token_ids=[t], **dict(params)) for t in range(len(logits))]
    return told([Row(p) for p in allow], wide, **rest)


def test_logprobs_and_ranks_of_four_tokens():
    got = forced([1.0, 3.0, 3.0, 2.0])
    assert [int(out.token_ids[0]) for out in got] == [0, 1, 2, 3]
    parts = [out.logprobs[0] for out in got]
    assert [round(float(p.value[0]), 4) for p in parts] == [-2.9176, -0.9176, -0.9176, -1.9176]
    assert [int(p.rank[0]) for p in parts] == [4, 2, 2, 3]
    for p in parts:
        assert p.top_ids[0, :4].tolist() == [1, 2, 3, 0]  # of equals the lower id
        shown = [round(float(v), 4) for v in p.top_value[0, :4]]
        assert shown == [-0.9176, -0.9176, -1.9176, -2.9176]
        assert (p.top_value[0, 4:] == -np.inf).all()


def test_raw_mode_does_not_see_the_temperature():
    cold, warm = (forced([1.0, 3.0, 3.0, 2.0], dict(temperature=t)) for t in (0.5, 2.0))
    for a, b in zip(cold, warm, strict=True):
        np.testing.assert_array_equal(a.logprobs[0].value, b.logprobs[0].value)
        np.testing.assert_array_equal(a.logprobs[0].top_value, b.logprobs[0].top_value)


def test_a_request_with_fewer_columns_gets_the_first_of_the_many():
    logits, many = batch("raw_logprobs")
    for few, out in zip(told(ROWS, logits, num_logprobs=5), many, strict=True):
        a, b = few.logprobs[0], out.logprobs[0]
        assert a.top_ids.shape == (3, 5) and b.top_ids.shape == (3, V)
        np.testing.assert_array_equal(few.token_ids, out.token_ids)
        np.testing.assert_array_equal(a.top_ids, b.top_ids[:, :5])
        np.testing.assert_allclose(a.top_value, b.top_value[:, :5], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "counts,columns",
    [([0], 1), ([None, 0], 1), ([None, None], 0), ([1, 0], 1), ([2, 5, None, 0], 20), ([-1, 3], V)],
)
def test_a_batch_has_the_columns_of_its_widest_request(counts, columns):
    slots = RequestTable(rules.program())
    for i, count in enumerate(counts):
        params = SamplingParams(logprobs=count)
        slots.add(tiny.new_request(str(i), [1], blocks=[i], params=params))
    size = slots.sample_size([str(i) for i in range(len(counts))], Bucket(5, 5))
    assert size == SampleSize(5, columns > 0, columns)
    assert logprob_widths(V)[-1] == V and logprob_widths(WIDE)[-1] == WIDE


def test_all_columns_hold_every_token_once():
    logits, got = batch("raw_logprobs")
    for i, out in enumerate(got):
        for j in range(3):
            part = out.logprobs[0]
            assert sorted(part.top_ids[j].tolist()) == list(range(V))
            total = np.exp(part.top_value[j].astype(np.float64)).sum()
            np.testing.assert_allclose(total, 1.0, rtol=1e-5)
            assert np.isfinite(logits[i, j, out.token_ids[j]])


@pytest.mark.parametrize("columns", [5, V])
def test_custom_ids_stand_in_their_order_beside_rows_of_likeliest(columns):
    logits, _ = batch("raw_logprobs")
    rows = [
        Row(SamplingParams(logprobs=2), drafts=[1, 2]),
        Row(SamplingParams(logprob_token_ids=[7, 3]), drafts=[4]),
        Row(SamplingParams(logprob_token_ids=[60, 0, 51, 60], top_k=1), drafts=[1, 1]),
        Row(SamplingParams(temperature=0, logprobs=2)),
    ]
    named = {1: [7, 3], 2: [60, 0, 51]}
    got = told(rows, logits[:4], num_logprobs=columns)
    for i, row in enumerate(rows):
        for j in range(row.num_due):
            x, part = log_softmax(logits[i, j]), got[i].logprobs[0]
            ids = named.get(i, likeliest(logits[i, j])[:2])
            assert part.top_ids[j, : len(ids)].tolist() == ids
            np.testing.assert_allclose(part.top_value[j, : len(ids)], x[ids], rtol=1e-5, atol=1e-5)
            own = x[got[i].token_ids[j]]
            np.testing.assert_allclose(part.value[j], own, rtol=1e-5, atol=1e-5)


def test_128_custom_ids_are_told_and_one_more_is_refused():
    ids = list(range(200, 72, -1))
    logits = np.random.default_rng(3).normal(size=(2, 1, 501)).astype(np.float32)
    rows = [Row(SamplingParams(logprob_token_ids=ids)), Row()]
    got = told(rows, logits, num_logprobs=128, J=1, size=2)
    assert got[0].logprobs[0].top_ids[0].tolist() == ids
    assert got[1].logprobs[0].top_ids[0].tolist() == likeliest(logits[1, 0])[:128]
    with pytest.raises(ValueError, match="logprob_token_ids has 129 distinct elements, it may"):
        SamplingParams(logprob_token_ids=[*ids, 1])


def test_scores_are_exact_at_the_width_of_a_real_vocabulary():
    rng = np.random.default_rng(4)
    logits = (np.round(rng.normal(size=(2, 1, WIDE)) * 3, 2) + 0.0).astype(np.float32)
    rows = [Row(SamplingParams(top_p=0.9, temperature=0.8)), Row(SamplingParams(min_p=0.01))]
    for i, out in enumerate(told(rows, logits, num_logprobs=20, J=1, size=2)):
        x, want = logits[i, 0], rules.expected(rows[i], 0, logits[i, 0])
        part, token = out.logprobs[0], out.token_ids[0]
        close = functools.partial(np.testing.assert_allclose, rtol=2e-5)
        close(part.raw[0], log_softmax(x)[token])
        close(part.processed[0], log_softmax(want.logits)[token], atol=2e-5)
        close(part.kept_mass[0], want.kept_mass)
        assert part.top_ids[0].tolist() == likeliest(x)[:20]
        assert part.rank[0] == (x >= x[token]).sum()
