"""Drafts by suffixes are those of a search, from the request and from outputs of ended ones."""

from typing import Any

import jax
import numpy as np
import pytest

from jaxrunner.api.sampling_params import SamplingParams
from jaxrunner.engine.engine import Engine
from jaxrunner.model import Model
from jaxrunner.models.llama import llama
from jaxrunner.pytree import host_value
from jaxrunner.speculators.suffix import Corpus, lookup, suffix
from tests.support import tiny
from tests.support.drafters import RULED, run

B, L, G, K = 5, 18, 32, 4
C = 64  # tokens of the corpus of an engine
DRAFTING = llama._replace(speculator=suffix(3, num_cached=C))  # engines of one model share programs
SIZES = "num_drafts", "max_len", "max_factor", "min_share"
find = jax.jit(lookup, static_argnames=SIZES)


def matches(last: list[int], text: list[int], max_len: int) -> dict[int, int]:
    """Returns the length of the match that ends at each place of a text that goes on."""
    found = {}
    for end in range(len(text) - 1):
        n = 0
        while n < min(max_len, len(last), end + 1) and text[end - n] == last[-1 - n]:
            n += 1
        if n and text[end + 1] is not None:
            found[end] = n
    return found


def search(own: list[int], past: list[Any], *, factor: float, share: float, max_len: int):
    """Returns the drafts behind `own`: the longest match, own ones first, then the latest.

    past: tokens of ended requests, oldest first, None behind each.
    """
    found = [matches(own, text, max_len) for text in (own, past)]
    longest = max((n for some in found for n in some.values()), default=0)
    places = [[end for end, n in some.items() if n == longest] for some in found]
    if not longest:
        return [-1] * K
    if places[0]:
        period = own[places[0][-1] + 1 :]
        drafts = [period[j % len(period)] for j in range(K)]
    else:
        drafts = [*past[places[1][-1] + 1 :], *[None] * K][:K]
    kept = []
    for j, token in enumerate(drafts):
        going = [
            text[end + 1 : end + 2 + j]
            for text, ends in zip((own, past), places, strict=True)
            for end in ends
        ]
        known = [some for some in going if len(some) == j + 1 and None not in some]
        alike = [some for some in going if some == drafts[: j + 1]]
        if token is None or j + 1 > factor * longest or len(alike) < share * len(known):
            break
        kept.append(token)
    return [*kept, *[-1] * (K - len(kept))]


def ring(past: list[Any], end: int) -> Corpus:
    """Returns the corpus that holds `past` up to place `end`."""
    tokens = np.zeros(G, np.int32)
    for i, token in enumerate(reversed(past)):
        tokens[(end - 1 - i) % G] = 0 if token is None else token + 1
    private = np.zeros(B, np.bool_)
    return host_value(Corpus, tokens=tokens, end=np.array([end], np.int32), is_private=private)


@pytest.mark.parametrize(
    ("vocab", "sizes"),
    [
        (2, dict(factor=1.0, share=0.1, max_len=6)),
        (3, dict(factor=16.0, share=0.0, max_len=3)),
        (3, dict(factor=1.5, share=0.6, max_len=4)),
        (9, dict(factor=16.0, share=0.34, max_len=8)),
    ],
    ids=["as in vLLM", "all", "sure ones", "many tokens"],
)
def test_drafts_are_what_a_search_finds(vocab: int, sizes: dict[str, Any]):
    rng, own_ones, others = np.random.default_rng(vocab), 0, 0
    names = dict(max_factor=sizes["factor"], min_share=sizes["share"], max_len=sizes["max_len"])
    for turn in range(30):
        ids = rng.integers(vocab, size=(B, L)).astype(np.int32)
        total = rng.integers(1, L + 1, size=B).astype(np.int32)
        past: list[Any] = []
        while len(past) < G * (turn % 3):
            past += [*rng.integers(vocab, size=rng.integers(1, 9)).tolist(), None]
        past, reads = past[-G:], rng.random(B) < 0.7
        encoded = np.where(np.arange(L) < total[:, None], ids + 1, 0)
        corpus = ring(past, int(rng.integers(G)))
        got = np.asarray(find(encoded, total, corpus, reads, num_drafts=K, **names))
        for b in range(B):
            own = ids[b, : total[b]].tolist()
            alone = search(own, [], **sizes)
            want = search(own, past if reads[b] else [], **sizes)
            assert got[b].tolist() == want
            own_ones, others = own_ones + (alone[0] >= 0), others + (alone != want)
    assert own_ones > 9 and others > 9


@pytest.mark.parametrize(
    ("rule", "changes"),
    [
        pytest.param(dict(temperature=0.0), {}, marks=pytest.mark.slow),
        (dict(temperature=0.7, logprobs=2) | RULED, dict(async_depth=3, num_blocks=14)),
        (dict(temperature=0.0), dict(num_decode_steps=3, async_depth=2)),
    ],
    ids=["greedy", "sampled by rules and preempted", "steps"],
)
def test_an_engine_s_tokens_stay(rule: dict[str, Any], changes: dict[str, Any]):
    want, plain_steps, _ = run(llama, *tiny.model_and_params(), rule)
    got, steps, e = run(DRAFTING, *tiny.model_and_params(), rule, **changes)
    assert got == want
    assert (e.scheduler.num_preemptions > 0) == ("num_blocks" in changes)
    assert changes or steps < plain_steps
    assert np.asarray(e.runner.state.tables["suffix"].tokens).any()


def speculating(model: Model = DRAFTING) -> Engine:
    config, params = tiny.model_and_params()
    return Engine(model, config, tiny.engine_config(async_depth=1), params)


def verified(**changes: Any) -> Model:
    assert DRAFTING.speculator is not None
    return DRAFTING._replace(speculator=DRAFTING.speculator._replace(**changes))


def ask(e: Engine, name: str, **options: Any) -> list[int]:
    """Returns how many steps verified drafts, these drafts, and how many steps accepted each."""
    sampled = SamplingParams(max_tokens=30, temperature=1.0, seed=3)
    request = e.add(name, [3, 1, 4, 1, 5, 9, 2, 6], sampled, **options)
    while e.has_unfinished:
        e.step()
    assert len(request.output_token_ids) == 30
    return list(request.draft_counts)


def test_what_a_request_said_is_drafted_for_the_next_that_asks_the_same():
    e = speculating()
    num_drafts, tokens, *accepted = ask(e, "first")
    assert 0 < num_drafts <= tokens < 2 * num_drafts  # a short match is followed by few
    assert accepted[0] < 0.5 * num_drafts  # noise repeats nothing
    num_drafts, tokens, *accepted = ask(e, "second")
    assert sum(accepted) > 0.9 * tokens > 0.8 * 3 * num_drafts
    assert num_drafts <= 8  # of 30 tokens, 4 a step


def test_requests_with_a_salt_neither_read_nor_leave_outputs():
    e = speculating()
    first = ask(e, "salted", cache_salt="a")
    assert not np.asarray(e.runner.state.tables["suffix"].tokens).any()
    assert ask(e, "plain") == first
    assert ask(e, "again", cache_salt="a") == first
    assert ask(e, "plain again") != first


def test_a_corpus_of_no_tokens_keeps_none():
    e = speculating(llama._replace(speculator=suffix(3, num_cached=0)))
    assert ask(e, "first") == ask(e, "second")


def test_the_ring_holds_the_latest_tokens():
    e, outputs = speculating(), []
    for i, length in enumerate((20, 11, 7, 18)):
        request = e.add(str(i), [i, 60], SamplingParams(max_tokens=length, temperature=0.0))
        while e.has_unfinished:
            e.step()
        outputs += [*(token + 1 for token in request.token_ids), 0]
    table = e.runner.state.tables["suffix"]
    end = int(table.end[0])
    assert len(outputs) > C and end == len(outputs) % C
    assert np.roll(np.asarray(table.tokens), -end).tolist() == outputs[-C:]


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (dict(num_drafts=0), "num_drafts=0 is out of range"),
        (dict(num_drafts=1, num_cached=-1), "num_cached=-1 is out of range"),
        (dict(num_drafts=1, max_depth=65), "max_depth=65 is out of range"),
        (dict(num_drafts=4, max_depth=4), "max_depth=4 holds 4 drafts and no token that they fol"),
    ],
)
def test_sizes_that_mean_nothing_are_refused(sizes: dict[str, int], message: str):
    with pytest.raises(ValueError, match=message):
        suffix(**sizes)


def test_synthetic_acceptance_gives_tokens_where_there_is_no_draft():
    e = speculating(verified(rejection="synthetic", rates=(1.0, 1.0, 1.0)))
    request = e.add("a", [3, 1, 4, 9, 2], SamplingParams(max_tokens=30, temperature=1.0, seed=3))
    while e.has_unfinished:
        e.step()
    assert len(request.output_token_ids) == 30 and min(request.output_token_ids) >= 0


def test_greedy_tokens_do_not_depend_on_how_drafts_are_verified():
    greedy, config = dict(temperature=0.0), tiny.model_and_params()
    want, *_ = run(llama, *config, greedy)
    assert run(verified(rejection="block"), *config, greedy)[0] == want
