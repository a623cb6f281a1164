"""Every rule against an oracle in float64 that looks at one token at a time, drafts included."""

from dataclasses import replace
import functools

import jax.numpy as jnp
import numpy as np
import pytest

from jaxrunner import step
from jaxrunner.api.sampling_params import SamplingParams
from jaxrunner.program.bucket import SampleSize
from tests.support import rules
from tests.support.random_rows import KINDS, OF_SEED, REMOVES, random_logits, row_of
from tests.support.rules import Row

V = 61  # no multiple of 32
WIDE = 128256


@functools.cache
def batch(seed: int, size: int, num_drafts: int = 2):
    """Returns one batch: a request of each kind, their logits, and what they became."""
    rng = np.random.default_rng([seed, size])
    rows = [row_of(kind, rng, size, num_drafts) for kind in KINDS]
    logits = random_logits(rng, seed, (len(KINDS), 1 + num_drafts, size))
    if size == WIDE:
        logits *= 3  # so that few tokens hold most of the mass
    function = rules.processor(rules.program())
    return rows, logits, rules.run(function, rows, logits, J=1 + num_drafts)


def check_kind(kind: str, seed: int, size: int, num_drafts: int) -> None:
    i = KINDS.index(kind)
    rows, logits, got = batch(seed, size, num_drafts)
    for j in range(1 + num_drafts):
        want, out = rules.expected(rows[i], j, logits[i, j]), got[i].logits[j]
        np.testing.assert_array_equal(out > -np.inf, want.logits > -np.inf)
        np.testing.assert_allclose(out, want.logits, rtol=1e-5, atol=1e-5)
        assert got[i].no_choice[j] == want.no_choice
        if kind in (*REMOVES, "nothing", "greedy"):
            kept = out > -np.inf
            assert out[kept].tobytes() == logits[i, j][kept].tobytes()


@pytest.mark.parametrize("size,seed", [*((V, seed) for seed in OF_SEED), (501, 1)])
@pytest.mark.parametrize("kind", KINDS)
def test_a_rule_equals_its_oracle_among_other_rules_and_behind_drafts(kind, seed, size):
    check_kind(kind, seed, size, num_drafts=2)


@pytest.mark.parametrize(
    "kind", ["grammar", "allowed ids", "penalties", "min-p, top-p", "top-k, top-p", "all"]
)
def test_a_rule_equals_its_oracle_at_the_width_of_a_real_vocabulary(kind):
    check_kind(kind, 0, WIDE, num_drafts=0)


def test_random_batches_hold_what_they_should():
    """The tests above would pass if no rule ever had a token to change."""
    changed, no_choice = dict.fromkeys(KINDS, 0), 0
    for seed in OF_SEED:
        _, logits, got = batch(seed, V)
        no_choice += sum(out.no_choice.sum() for out in got)
        for i, kind in enumerate(KINDS):
            for j in range(3):
                changed[kind] += int((got[i].logits[j] != logits[i, j]).any())
    assert changed.pop("nothing") == changed.pop("greedy") == 0
    assert min(changed.values()) >= 4 and no_choice <= 2


@pytest.mark.parametrize("scale", [0.0, 0.5, 2.0, 6.0])
@pytest.mark.parametrize("p", [0.1, 0.5, 0.9, 0.99, 0.999])
def test_top_p_stops_where_it_should_in_a_flat_distribution(p, scale):
    rng = np.random.default_rng(0)
    logits = (rng.normal(size=WIDE) * scale).astype(np.float32)
    run = rules.processor(rules.program())
    out = rules.run(run, [Row(SamplingParams(top_p=p))], logits[None, None], J=1, size=1)
    out = out[0].logits[0]
    order = np.argsort(-logits, kind="stable").tolist()
    count = int((out > -np.inf).sum())
    assert set(np.flatnonzero(out > -np.inf)) == set(order[:count])
    mass = np.exp(np.sort(logits.astype(np.float64))[::-1])
    before, after = mass[: count - 1].sum() / mass.sum(), mass[:count].sum() / mass.sum()
    assert before < p + 2e-6 and after > p - 2e-6


def rows_out(rows, logits, **rest) -> list[np.ndarray]:
    """Returns the logits of small hand-made rows; logits: [V'], or one for each row and token."""
    logits = np.asarray(logits, np.float32)
    wide = np.full((len(rows), 3, V), -np.inf, np.float32)
    wide[..., : logits.shape[-1]] = logits
    return [out.logits for out in rules.run(rules.processor(rules.program()), rows, wide, **rest)]


PENALTIES = SamplingParams(repetition_penalty=2, frequency_penalty=0.5, presence_penalty=0.25)


def test_penalties_have_the_values_of_the_paper():
    row = Row(PENALTIES, prompt=[1, 4], outputs=[0, 3, 0, 4], drafts=[0, 0])
    first, second, third = rows_out([row], [3.0, -3.0, 3.0, -3.0, 3.0])[0][:, :5].tolist()
    assert first == [0.25, -6.0, 3.0, -6.75, 0.75]
    assert second == [-0.25, -6.0, 3.0, -6.75, 0.75]
    assert third == [-0.75, -6.0, 3.0, -6.75, 0.75]


def test_penalties_count_drafts_and_forget_rejected_ones():
    params = SamplingParams(frequency_penalty=1)
    row = Row(params, prompt=[5], outputs=[9, 5], drafts=[5, 5])
    assert rows_out([row], np.zeros(V))[0][:, 5].tolist() == [-1.0, -2.0, -3.0]
    state, due = rules.state_of([row])
    sampled = (
        jnp.full((rules.SIZE, 3), 7, jnp.int32).at[0, 0].set(5)
    )  # takes the first, not the second
    after, num, *_ = step.advance(state.requests, due, sampled)
    assert int(num[0]) == 2
    next_row = Row(params, prompt=[5], outputs=[9, 5, 5, 7])
    state = rules.state_of([row])[0]  # the parameters, and what the device has behind the tokens
    state = replace(state, requests=after)
    out = rows_out([next_row], np.zeros(V), state=state)[0][0]
    assert out[[5, 7, 9]].tolist() == [-2.0, -1.0, -1.0]


def test_min_tokens_outweighs_a_bias_for_exactly_so_many_tokens():
    params = SamplingParams(min_tokens=4, logit_bias={8: 100})
    past = [Row(params, [1, 2], [3] * n, stop_ids=[8]) for n in range(7)]
    best = [int(out[0].argmax()) for out in rows_out(past, np.arange(12.0))]
    assert best == [11, 11, 11, 11, 8, 8, 8]
    drafted = Row(params, [1, 2], [3] * 3, drafts=[3, 3], stop_ids=[8])
    assert rows_out([drafted], np.arange(12.0))[0].argmax(1).tolist() == [11, 8, 8]


def test_a_bias_gives_back_no_token_that_is_not_allowed():
    params = SamplingParams(allowed_token_ids=[5, 9], logit_bias={7: 50, 9: 1.5})
    out = rows_out([Row(params)], np.arange(12.0))[0][0]
    assert out[7] == -np.inf and np.flatnonzero(out > -np.inf).tolist() == [5, 9]
    assert out[[5, 9]].tolist() == [5.0, 10.5]


def test_1024_ids_are_accepted_and_one_more_is_refused():
    ids = list(range(0, 4096, 4))
    assert SamplingParams(allowed_token_ids=ids).allowed_token_ids == tuple(ids)
    assert len(SamplingParams(logit_bias=dict.fromkeys(ids, 1.0)).logit_bias or ()) == 1024
    message = "has 1025 distinct elements, it may have 1024: give fewer"
    with pytest.raises(ValueError, match=f"allowed_token_ids {message}"):
        SamplingParams(allowed_token_ids=[*ids, 1])
    with pytest.raises(ValueError, match=f"logit_bias {message}"):
        SamplingParams(logit_bias=dict.fromkeys([*ids, 1], 1.0))


def test_1024_ids_all_have_their_effect():
    ids = np.random.default_rng(0).choice(4099, 1024, replace=False).tolist()
    every = [
        SamplingParams(allowed_token_ids=ids),
        SamplingParams(logit_bias=dict.fromkeys(ids, -9.5)),
        SamplingParams(bad_words=[ids[i : i + 8] for i in range(0, 1024, 8)]),
    ]
    past = [Row(p, outputs=ids[1016:1023]) for p in every]
    logits = np.ones((3, 1, 4099), np.float32)
    run = rules.run(rules.processor(rules.program()), past, logits, J=1, size=3)
    allowed, biased, bad = (out.logits[0] for out in run)
    assert sorted(np.flatnonzero(allowed > -np.inf)) == sorted(ids)
    assert sorted(np.flatnonzero(biased == -8.5)) == sorted(ids)
    assert np.flatnonzero(bad == -np.inf).tolist() == [ids[-1]]


def banned(out: np.ndarray) -> list[list[int]]:
    return [np.flatnonzero(row == -np.inf).tolist() for row in out]


def test_bad_words_are_banned_behind_their_start():
    params = SamplingParams(bad_words=[[8, 9]])
    pasts = [
        Row(params, [1], [8]),
        Row(params, [1], [], drafts=[8, 3]),
        Row(params, [1, 8], []),
        Row(params, [1, 8], [8, 2]),
        Row(SamplingParams(bad_words=[[4], [8, 9]]), [], []),
        Row(SamplingParams(bad_words=[[8, 7, 9]]), [1, 8], [7]),
        Row(SamplingParams(bad_words=[[8, 7, 9]]), [1], [8], drafts=[7, 9]),
        Row(SamplingParams(bad_words=[[8, 8, 9], [8, 5]]), [], [8], drafts=[8]),
    ]
    got = [banned(out) for out in rows_out(pasts, np.zeros(V))]
    assert got == [
        [[9]], [[], [9], []], [[]], [[]], [[4]], [[]], [[], [9], []], [[5], [5, 9]],
    ]  # fmt: skip


def test_greedy_rows_take_the_lowest_of_the_likeliest():
    rows = [
        Row(SamplingParams(temperature=0)),
        Row(SamplingParams(temperature=0, top_k=1, top_p=0.1, min_p=0.9)),
        Row(SamplingParams(temperature=0, frequency_penalty=1), outputs=[2]),
        Row(SamplingParams(temperature=0, allowed_token_ids=[3, 0])),
    ]
    logits = np.full((4, 1, V), -9.0, np.float32)
    logits[..., [1, 2, 3, 6]] = [0, 5, 5, 5]
    for seeds in (range(4), range(2**40, 2**40 + 4)):
        drawn = rules.step_draw(rows, np.repeat(logits, 4, axis=1), seeds=seeds)
        assert drawn.token_ids[:, 0].tolist() == [2, 2, 3, 3]


def mask_of(token_ids, size: int = V) -> np.ndarray:
    """Returns a mask of so many words that has these tokens alone."""
    words = np.zeros(-(-size // 32), np.uint32)
    for token in token_ids:
        words[token // 32] |= np.uint32(1 << token % 32)
    return words.view(np.int32)


@pytest.mark.parametrize("token", [0, 1, 30, 31, 32, 33, 59, 60])
def test_a_mask_allows_the_tokens_of_its_bits_alone(token):
    masks = np.stack([mask_of([token]), ~mask_of([token]), mask_of([token, 60, 31])])
    row = Row(drafts=[1, 2], masks=masks)
    one, rest, few = rows_out([row], np.zeros(V))[0]
    assert np.flatnonzero(one == 0).tolist() == [token]
    assert np.flatnonzero(rest == -np.inf).tolist() == [token]
    assert np.flatnonzero(few == 0).tolist() == sorted({token, 60, 31})


def test_the_sign_bit_is_the_last_token_of_a_word():
    row = Row(drafts=[1], masks=np.array([[-(2**31), 0], [0, -1]], np.int32))
    first, second = rows_out([row], np.zeros(V))[0]
    assert np.flatnonzero(first == 0).tolist() == [31]
    assert np.flatnonzero(second == 0).tolist() == list(range(32, V))


def test_each_draft_has_its_own_mask():
    tokens = np.array([[31, 32, 60, 7], [0, 59, 31, 33], [5, 5, 6, 32]])
    rows = [Row(drafts=t[:3].tolist(), masks=[mask_of([x]) for x in t]) for t in tokens]
    rows.insert(1, Row(SamplingParams(allowed_token_ids=[9]), drafts=[4]))  # without a grammar
    logits = np.random.default_rng(0).normal(size=(4, 4, V))
    drawn = rules.step_draw(rows, logits).token_ids
    assert drawn[[0, 2, 3]].tolist() == tokens.tolist() and set(drawn[1].tolist()) == {9}


def test_no_mask_is_a_mask_of_all_tokens():
    logits = np.random.default_rng(1).normal(size=(rules.SIZE, 4, V)).astype(np.float32)
    state, due = rules.state_of([Row(drafts=[1, 2, 3])] * 3)
    draw = rules.drawer(rules.program(), SampleSize(rules.SIZE, True))
    masks = None, rules.masks_of([], 4, V)
    without, with_all = (draw(logits, state, due, mask) for mask in masks)
    np.testing.assert_array_equal(without.token_ids, with_all.token_ids)
