"""What vLLM 0.23.0 gets wrong in sampling, and we do not; each docstring says what vLLM does."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrunner import pytree, step
from jaxrunner.api.sampling_params import SamplingParams
from jaxrunner.program.bucket import MAX_STOP_IDS, WIDE, Bucket, SampleSize
from jaxrunner.runner.request_table import RequestTable
from jaxrunner.sampling.sampler import SamplerOutput
from jaxrunner.sampling.seed import ACCEPT, DRAFT, TARGET, noise
from jaxrunner.sampling.top_k_top_p import top_k_top_p
from jaxrunner.types import Requests, SamplingMetadata, State
from tests.support import rules, tiny
from tests.support.jaxprs import equations
from tests.support.rules import Row

V = 61
EOS = 8


def accept_or_replace(seed, position, draft_stream):
    """Runs the rejection sampler of one draft: drafted from q, so that p comes out."""
    p, q = jnp.array([0.2, 0.5, 0.3]), jnp.array([0.6, 0.3, 0.1])
    words = jnp.stack([jnp.uint32(0), seed])
    draws = functools.partial(noise, words, position)
    draft = jnp.argmax(jnp.log(q) + draws(stream=draft_stream, shape=(3,)))
    uniform = jnp.exp(-jnp.exp(-draws(stream=ACCEPT, shape=())))
    rest = jnp.log(jnp.maximum(p - q, 0.0))
    replaced = jnp.argmax(rest + draws(stream=TARGET, shape=(3,)))
    return jnp.where(uniform * q[draft] < p[draft], draft, replaced)


def outputs(draft_stream: int, seed: int) -> np.ndarray:
    """Returns how many of 200,000 positions had each output."""
    run = functools.partial(accept_or_replace, draft_stream=draft_stream)
    at = jnp.arange(200_000, dtype=jnp.int32)
    drawn = jax.jit(jax.vmap(run, in_axes=(None, 0)))(jnp.uint32(seed), at)
    return np.bincount(np.asarray(drawn), minlength=3)


def test_a_draft_and_what_replaces_it_share_no_noise():
    """vLLM draws both from one Gumbel vector, which gives (.200, .467, .333) for (.2, .5, .3)."""
    want, biased = np.array([0.2, 0.5, 0.3]) * 200_000, np.array([0.2, 0.4667, 0.3333]) * 200_000
    assert len({TARGET, ACCEPT, DRAFT}) == 3
    for seed in (1, 2):
        seen = outputs(DRAFT, seed)
        assert ((seen - want) ** 2 / want).sum() < 13.8  # two degrees of freedom, 0.999
        shared = outputs(TARGET, seed)
        assert ((shared - want) ** 2 / want).sum() > 500
        np.testing.assert_allclose(shared, biased, atol=800)


def flat(rows, *, J: int = 3) -> np.ndarray:
    """Returns logits of each row's tokens that fall from the first token to the last."""
    return np.broadcast_to(-np.arange(V, dtype=np.float32), (len(rows), J, V)).copy()


def test_min_tokens_holds_for_exactly_so_many():
    """vLLM compares the position of the input token, so EOS is banned for one token too long."""
    params = SamplingParams(temperature=0, min_tokens=4, logit_bias={EOS: 100})
    past = [Row(params, [5, 6], [9] * n, stop_ids=[EOS]) for n in range(7)]
    first = rules.step_draw(past, flat(past)).token_ids[:, 0]
    assert first.tolist() == [0, 0, 0, 0, EOS, EOS, EOS]
    drafted = [Row(params, [5, 6], [9] * n, drafts=[0, 0], stop_ids=[EOS]) for n in (1, 2, 3)]
    drawn = rules.step_draw(drafted, flat(drafted)).token_ids
    assert drawn.tolist() == [[0, 0, 0], [0, 0, EOS], [0, EOS, EOS]]


def test_bad_words_see_the_drafts_at_their_own_places():
    """vLLM's window over drafts is off by one: it compares each draft with its neighbour."""
    params = SamplingParams(temperature=0, bad_words=[[8, 0], [7, 8, 1], [3, 3, 3, 2]])
    rows = [
        Row(params, [1], [8], drafts=[5, 5]),
        Row(params, [1], [5], drafts=[8, 5]),
        Row(params, [1], [5], drafts=[5, 8]),
        Row(params, [1], [7], drafts=[8, 8]),
        Row(params, [1], [3], drafts=[3, 3]),
    ]
    logits = flat(rows)
    assert rules.step_draw(rows, logits).token_ids.tolist() == [
        [1, 0, 0], [0, 1, 0], [0, 0, 1], [0, 2, 1], [0, 0, 0],
    ]  # fmt: skip
    logits[..., 2] = 1.0  # the likeliest now, and the end of the longest word
    assert rules.step_draw(rows[4:], logits[4:]).token_ids.tolist() == [[2, 2, 0]]


@pytest.mark.parametrize("shuffle", range(3))
def test_allowed_ids_keep_their_logits_at_any_width(shuffle):
    """vLLM masks and restores in blocks that race: allowed ids of other blocks may be lost."""
    size, rng = 20011, np.random.default_rng(shuffle)
    ids = rng.choice(size, 1024, replace=False)
    rows = [Row(SamplingParams(allowed_token_ids=order.tolist())) for order in (ids, ids[::-1])]
    logits = rng.normal(size=(2, 1, size)).astype(np.float32)
    run = functools.partial(rules.run, rules.processor(rules.program()), rows, logits, J=1, size=2)
    want = np.full((2, size), -np.inf, np.float32)
    want[:, ids] = logits[:, 0, ids]
    for _ in range(10):
        got = [out.logits[0] for out in run()]
        np.testing.assert_array_equal(got, want)


def abstract_draw(B: int, J: int, size: int):
    """Returns `step.draw` traced on logits, [B, J, size], that no memory could hold."""
    dims = WIDE | dict(R=B, L=64, X=MAX_STOP_IDS, M=1, G=1, B=B, key=2)
    program = rules.program()
    tables = {t.name: pytree.abstract(t.params, dims) for t in program.tables}
    state = State(pytree.abstract(Requests, dims), (), tables)
    logits = jax.ShapeDtypeStruct((B, J, size), jnp.float32)
    mask = jax.ShapeDtypeStruct((B, J, -(-size // 32)), jnp.int32)
    draw = functools.partial(step.draw, program=program, size=SampleSize(B, True, 20))
    args = logits, state, pytree.abstract(SamplingMetadata, dims), mask
    return jax.eval_shape(draw, *args), jax.make_jaxpr(draw)(*args).jaxpr


def test_no_index_counts_the_logits_of_all_rows():
    """vLLM's offsets row * V are int32, which wrap from 2**31 logits on."""
    B, J, size = 5600, 3, 128256
    assert B * J * size > 2**31
    drawn, jaxpr = abstract_draw(B, J, size)
    assert drawn.token_ids.shape == (B, J) and drawn.not_finite.shape == (B, J)
    assert drawn.logprobs[0].top_ids.shape == (B * J, 20)
    found = list(equations(jaxpr))
    arrays = [v.aval for eqn in found for v in (*eqn.invars, *eqn.outvars) if v.aval.shape]
    assert max(a.size for a in arrays) > 2**31  # the logits are among them
    # An axis over all rows' logits, or a product with V, would need an index past int32.
    assert max(max(a.shape) for a in arrays) < 2**24
    names = [eqn.primitive.name for eqn in found]
    assert {"sort", "gather", "top_k", "argmax"} <= set(names)
    for eqn in found:
        if eqn.primitive.name in ("mul", "dot_general"):
            assert not jnp.issubdtype(eqn.outvars[0].aval.dtype, jnp.int32)


def test_all_logprobs_are_all_there_are():
    """vLLM takes -1 for none."""
    params = SamplingParams(logprobs=-1)
    assert params.num_logprobs == -1
    slots = RequestTable(rules.program())
    slots.add(tiny.new_request("a", [1], blocks=[0], params=params))
    size = slots.sample_size(["a"], Bucket(32, 5))
    assert size == SampleSize(5, True, V)
    row = Row(params, drafts=[1, 2])
    told = rules.step_draw([row], flat([row]), num_logprobs=V).logprobs[0]
    assert told.top_ids[0].tolist() == [list(range(V))] * 3
    assert np.isfinite(told.top_value).all()


def test_custom_ids_are_told_of_drafts_too():
    """vLLM loses a request's own ids in a step with drafts."""
    named = SamplingParams(logprob_token_ids=[40, 3, 17])
    rows = [Row(drafts=[1, 2]), Row(named, drafts=[1, 2]), Row(named), Row(named, drafts=[4])]
    told = rules.step_draw(rows, flat(rows), num_logprobs=V).logprobs[0]
    for row, ids, values in zip(rows, told.top_ids, told.top_value, strict=True):
        for j in range(row.num_due):
            want = [40, 3, 17] if row.params == named else [0, 1, 2]
            assert ids[j, :3].tolist() == want
            np.testing.assert_allclose(values[j, :3] - values[j, 0], want[0] - np.array(want))


BROKEN = {"NaN": np.nan, "infinity": np.inf}


def compare_others(got: SamplerOutput, want: SamplerOutput, broken: int) -> None:
    """Checks that all but one request have what they had without it."""
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(np.delete(one, broken, 0), np.delete(other, broken, 0))


@pytest.mark.parametrize("value", BROKEN.values(), ids=BROKEN)
@pytest.mark.parametrize("j", range(3))
def test_logits_that_are_not_finite_are_told_of_their_own_request(j, value):
    """vLLM counts NaN by row of logits and reads the counts by request: drafts shift them."""
    rng = np.random.default_rng(0)
    rows = [Row(drafts=[1, 2], outputs=[3] * n) for n in range(5)]
    logits = rng.normal(size=(5, 3, V)).astype(np.float32)
    clean = rules.step_draw(rows, logits, num_logprobs=V)
    assert not clean.not_finite.any() and not clean.no_choice.any()
    logits[2, j, 7] = value
    got = rules.step_draw(rows, logits, num_logprobs=V)
    assert np.argwhere(got.not_finite).tolist() == [[2, j]]
    assert not got.no_choice.any()
    compare_others(got, clean, 2)


@pytest.mark.parametrize("count", [1, 7, 8, 9])
def test_top_k_keeps_the_same_tokens_at_every_batch_size(count):
    """vLLM searches for a pivot from 8 rows on, keeps all ties there, and stops when near."""
    steps = np.arange(V, dtype=np.int32)
    close = (np.float32(2.0).view(np.int32) + steps).view(np.float32)  # neighbours in float32
    tied = np.where(steps < 40, 1.5, -1.0).astype(np.float32)
    for logits, best in ((close, steps[::-1]), (tied, steps)):
        for k in (1, 2, 17, 39):
            params = [SamplingParams(top_k=k)] * count
            kept = rules.processed([logits] * count, params, rules=(top_k_top_p,)) > -np.inf
            assert all(set(np.flatnonzero(row)) == set(best[:k]) for row in kept)


@pytest.mark.parametrize("settings", [{}, dict(top_k=20), dict(top_p=0.9)], ids=str)
def test_a_stream_does_not_depend_on_batch_mates(settings):
    """vLLM's FlashInfer path draws unseeded rows from one generator, in the order of the batch."""
    rng = np.random.default_rng(1)
    mine, others = rng.normal(size=(3, V)), rng.normal(size=(5, 3, V))
    me = Row(SamplingParams(**settings), [1], [2], drafts=[3, 4])
    assert me.params.seed is None

    def draw(place: int, count: int, seed: int, mate: SamplingParams) -> list[int]:
        rows, logits, seeds = [Row(mate)] * count, list(others[:count]), list(range(50, 50 + count))
        rows.insert(place, me)
        logits.insert(place, mine)
        seeds.insert(place, seed)
        return rules.step_draw(rows, np.stack(logits), seeds=seeds).token_ids[place].tolist()

    top_k, greedy = SamplingParams(top_k=1), SamplingParams(temperature=0)
    drawn = [draw(0, 0, seed, greedy) for seed in range(9)]
    assert len({tuple(tokens) for tokens in drawn}) == 9
    for seed, tokens in enumerate(drawn):
        for place, count, mate in ((0, 5, top_k), (5, 5, greedy), (2, 3, SamplingParams())):
            assert draw(place, count, seed, mate) == tokens


def mask_of(*token_ids: int) -> list[np.ndarray]:
    bits = np.isin(np.arange(64), token_ids).reshape(2, 32).astype(np.uint32)
    return [(bits << np.arange(32, dtype=np.uint32)).sum(1, dtype=np.uint32).view(np.int32)]


def test_rules_that_leave_no_token_are_told_and_yield_to_the_grammar():
    """vLLM emits token 0, which the grammar may not allow, and tells nobody."""
    ends = SamplingParams(min_tokens=3)
    banned = SamplingParams(allowed_token_ids=[5, 6], bad_words=[[5], [6]], top_k=1)
    rows = [
        Row(),
        Row(ends, stop_ids=[EOS], masks=mask_of(EOS)),
        Row(SamplingParams(allowed_token_ids=[4]), masks=mask_of(33, 60)),
        Row(banned),
        Row(banned, masks=mask_of(9)),
        Row(ends, stop_ids=[EOS], masks=mask_of(EOS, 10)),
        Row(ends, outputs=[1, 1, 1], stop_ids=[EOS], masks=mask_of(EOS)),
        Row(ends, [1], [1], drafts=[1, 1], stop_ids=[EOS], masks=mask_of(EOS) * 3),
    ]
    logits = np.random.default_rng(0).normal(size=(8, 3, V))
    seen = [rules.step_draw(rows, logits, seeds=range(s, s + 8)) for s in range(0, 160, 8)]
    for drawn in seen:
        assert drawn.no_choice.any(1).tolist() == [
            False,
            True,
            True,
            True,
            True,
            False,
            False,
            True,
        ]
        assert not drawn.not_finite.any()
        first = drawn.token_ids[:, 0].tolist()
        assert first[1] == first[6] == EOS and first[2] in (33, 60) and first[4:6] == [9, 10]
        assert drawn.token_ids[7].tolist() == [EOS] * 3
    assert {d.token_ids[2, 0].item() for d in seen} == {33, 60}
    lone = [rules.step_draw([rows[0]], logits[:1], seeds=[s]) for s in range(0, 160, 8)]
    for drawn, alone in zip(seen, lone, strict=True):
        assert drawn.token_ids[0].tolist() == alone.token_ids[0].tolist()


@pytest.mark.parametrize("value", BROKEN.values(), ids=BROKEN)
def test_what_is_not_finite_is_not_told_as_no_choice(value):
    """The neighbours' tokens and all that is told of them stay bit for bit."""
    row = Row(SamplingParams(allowed_token_ids=[5], bad_words=[[5]], top_p=0.5))
    logits = np.random.default_rng(0).normal(size=(3, 3, V)).astype(np.float32)
    clean = rules.step_draw([Row(), row, Row()], logits, num_logprobs=V)
    assert clean.no_choice.any(1).tolist() == [False, True, False]
    logits[1, :, 3] = value
    got = rules.step_draw([Row(), row, Row()], logits, num_logprobs=V)
    assert got.not_finite.any(1).tolist() == [False, True, False] and not got.no_choice.any()
    compare_others(got, clean, 1)
