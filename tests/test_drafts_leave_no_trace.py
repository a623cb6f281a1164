"""What caches hold once drafts were rejected, the model's and the drafter's, by block tables."""

import functools

import jax
import numpy as np
import pytest

from jaxrunner.api.sampling_params import SamplingParams
from jaxrunner.caches.cache_group import distinct
from jaxrunner.engine.engine import Engine
from tests.support import tiny
from tests.support.drafters import DRAFTERS, with_ngrams

KINDS = DRAFTERS | dict(ngram=with_ngrams)
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5], [9, 2], list(range(1, 20))]
NUM_LAYERS, ALL = tiny.SETTINGS["num_hidden_layers"], slice(None)
WHOLE = dict(max_num_batched_tokens=48, token_buckets=(48,))  # prompts in one step
CLOSE = functools.partial(np.testing.assert_allclose, rtol=0, atol=2e-6)


def kept(e: Engine, request, layers: slice = ALL, count: int | None = None) -> list[np.ndarray]:
    """Returns the keys and values, [K, t, D], of a request's first `count` tokens, by layer.

    count: those that are computed where it is None.
    """
    kinds, count = e.model_config.cache_kinds, count or computed(e, request)
    groups, arrays = distinct(kinds), []
    for kind, layer in list(zip(kinds, e.runner.state.kv, strict=True))[layers]:
        blocks = np.array(request.blocks[groups.index(kind)])
        for cache in jax.tree.leaves(layer):
            _, K, _, D = cache.shape
            own = np.asarray(cache)[blocks].swapaxes(0, 1)  # [K, M, S, D]
            arrays.append(own.reshape(K, -1, D)[:, :count])
    return arrays


def computed(e: Engine, request) -> int:
    """Returns how many tokens the device has computed."""
    return int(e.runner.state.requests.num_computed[e.runner.requests[request.request_id]])


@pytest.fixture(scope="module")
def start():
    """Returns a function that gives an engine without requests, one for the same name and sizes."""

    @functools.cache
    def made(kind: str, name: str, **changes) -> Engine:
        model, config, params = KINDS[kind]()
        sizes = tiny.engine_config(async_depth=1, **WHOLE | changes)  # which share programs
        return Engine(model, config, sizes, params)

    def start(kind: str, name: str = "", **changes) -> Engine:
        e = made(kind, name, **changes)
        e.abort(list(e.scheduler.requests))
        while e.step():
            pass
        assert e.scheduler.reset_prefix_cache()
        return e

    return start


def at_work(e: Engine, rule, num_tokens: int = 17) -> list:
    """Returns requests that have `num_tokens` or more each, and end with none soon."""
    requests = [
        e.add(str(i), ids, SamplingParams(max_tokens=28, seed=i, **rule))
        for i, ids in enumerate(PROMPTS)
    ]
    while min(len(r.output_token_ids) for r in requests) < num_tokens:
        e.step()
        assert all(r.finish_reason is None for r in requests)
    return requests


@pytest.mark.parametrize(
    "drafter", ["eagle3", "ngram", pytest.param("another", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("temperature", [0.0, 0.7], ids=["greedy", "sampled"])
def test_caches_are_bit_for_bit_those_of_a_run_that_verifies_no_draft(start, drafter, temperature):
    """Both run at the same sizes, of K + 1 tokens a row, so that they round alike."""
    rule = dict(temperature=temperature, logprobs=None)
    verifying, plain = start(drafter), start(drafter, "plain")
    plain.scheduler.num_drafts = 0
    pairs = list(zip(at_work(verifying, rule), at_work(plain, rule), strict=True))
    sizes = ({c.key for c in e.runner.programs.ledger} for e in (verifying, plain))
    assert next(sizes) == next(sizes)
    behind = []
    for got, want in pairs:
        n = min(len(got.output_token_ids), len(want.output_token_ids))
        assert got.output_token_ids[:n] == want.output_token_ids[:n]
        count = min(computed(verifying, got), computed(plain, want))
        assert count >= len(want.prompt_token_ids) + 16
        for x, y in zip(kept(verifying, got), kept(plain, want), strict=True):
            np.testing.assert_array_equal(x[:, :count], y[:, :count])
        behind.append(rejected_behind(verifying, plain, got, want))
    assert not any(any(request.draft_counts) for _, request in pairs)
    # Some drafts were rejected, and a key that one leaves is told from that of the token.
    assert any(behind)


def rejected_behind(verifying: Engine, plain: Engine, got, want) -> bool:
    """Whether, behind what stands, the model's cache holds a key of no token that followed."""
    count = computed(verifying, got)
    while computed(plain, want) <= count:
        plain.step()
    first = slice(NUM_LAYERS)
    x, y = (kept(e, r, first, count + 1)[0] for e, r in ((verifying, got), (plain, want)))
    return bool((x[:, count] != y[:, count]).any())


@pytest.mark.parametrize(
    "drafter", ["another", *(pytest.param(d, marks=pytest.mark.slow) for d in ("eagle3", "wide"))]
)
def test_the_drafter_s_cache_is_that_of_all_tokens_at_once(start, drafter):
    decoding, dense = (
        start(drafter, long_prefill_token_threshold=7),
        start(drafter, enable_prefix_caching=False),
    )
    own = slice(NUM_LAYERS, None)
    for request in at_work(decoding, dict(temperature=0.0), num_tokens=9):
        greedy = SamplingParams(max_tokens=8, temperature=0.0)
        one = dense.add(f"all of {request.request_id}", request.token_ids, greedy)
        dense.step()
        assert computed(dense, one) == request.num_tokens
        # The last key depends on a token that the other engine may not have sampled.
        count = computed(decoding, request)
        ours, theirs = kept(decoding, request, own), kept(dense, one, own)
        assert ours and count == request.num_tokens - 1
        for x, y in zip(ours, theirs, strict=True):
            CLOSE(x, y[:, :count])
        dense.abort([one.request_id])


@pytest.mark.parametrize("drafter", ["another", "eagle3"])
def test_the_drafter_s_keys_of_a_cached_prefix_come_along(start, drafter):
    sharing, alone = start(drafter), start(drafter, enable_prefix_caching=False)
    prefix, greedy = [3, 1, 4, 1, 5, 9, 2, 6], SamplingParams(max_tokens=8, temperature=0.0)
    sharing.add("before", [*prefix, 7, 7, 7], greedy)
    while sharing.has_unfinished:
        sharing.step()
    pair = [(e, e.add("after", [*prefix, 11, 12, 13], greedy)) for e in (sharing, alone)]
    for e, _ in pair:
        e.step()
    assert [request.num_cached_tokens for _, request in pair] == [len(prefix), 0]
    # The key of a prefix's last token is of the token behind it where a head reads two tokens: that
    # of the request which computed it. It changes which drafts are made, and no token.
    last = [len(prefix) - 1] if drafter == "eagle3" else []
    own = slice(NUM_LAYERS, None)
    for x, y in zip(*(kept(*one, own) for one in pair), strict=True):
        CLOSE(np.delete(x, last, 1), np.delete(y, last, 1))


def test_drafts_behind_the_last_token_that_a_request_may_have_write_no_key(start):
    """Its table names blocks there of the request that had its slot before."""
    e, greedy = start("another"), SamplingParams(max_tokens=28, temperature=0.0)
    e.add("before", PROMPTS[2], greedy)
    while e.has_unfinished:
        e.step()
    caches = [np.array(x) for x in jax.tree.leaves(e.runner.state.kv)]
    request, own = e.add("short", PROMPTS[0][:10], SamplingParams(max_tokens=2)), set()
    while e.has_unfinished:
        e.step()
        own |= {block for group in request.blocks for block in group}
    assert own and request.max_len % e.config.block_size == 0  # another block begins behind it
    others = [block for block in range(e.config.num_blocks) if block not in own]
    for x, y in zip(caches, jax.tree.leaves(e.runner.state.kv), strict=True):
        np.testing.assert_array_equal(x[others], np.asarray(y)[others])
