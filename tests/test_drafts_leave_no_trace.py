"""What caches hold once drafts were rejected: the model's and the drafter's, read by block tables.

To 2e-6 and not by bits: a step that verifies has another shape, so its sums are rounded otherwise.
"""

import functools

import jax
import numpy as np
import pytest

from jaxrunner.api.sampling_params import SamplingParams
from jaxrunner.caches.cache_group import distinct
from jaxrunner.engine.engine import Engine
from jaxrunner.models.llama import llama
from tests.support import tiny
from tests.support.drafters import DRAFTERS, with_ngrams

KINDS = DRAFTERS | dict(ngram=with_ngrams)
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5], [9, 2], list(range(1, 20))]
NUM_LAYERS = tiny.SETTINGS["num_hidden_layers"]
CLOSE = functools.partial(np.testing.assert_allclose, rtol=0, atol=2e-6)
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("wide", "eagle", "itself")]


def kept(e: Engine, request, layers: slice) -> list[np.ndarray]:
    """Returns the keys and values, [K, t, D], of the computed tokens of a request, by layer."""
    kinds, count = e.model_config.cache_kinds, computed(e, request)
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


def start(kind, **changes) -> Engine:
    """Returns an engine, of the model alone where `kind` is None."""
    parts = (llama, *tiny.model_and_params()) if kind is None else KINDS[kind]()
    model, config, params = parts
    return Engine(model, config, tiny.engine_config(async_depth=1, **changes), params)


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


@pytest.mark.parametrize("drafter", ["another", "eagle3", "ngram", *SLOW])
@pytest.mark.parametrize("temperature", [0.0, 0.7], ids=["greedy", "sampled"])
def test_the_model_s_cache_is_that_of_a_run_without_drafts(drafter, temperature):
    rule = dict(temperature=temperature, logprobs=None)
    plain, drafting = start(None), start(drafter)
    pairs = zip(at_work(plain, rule), at_work(drafting, rule), strict=True)
    for want, got in pairs:
        n = min(len(want.output_token_ids), len(got.output_token_ids))
        assert got.output_token_ids[:n] == want.output_token_ids[:n]
        count = min(computed(plain, want), computed(drafting, got))
        assert count >= len(want.prompt_token_ids) + 16
        layers = slice(NUM_LAYERS)
        ours, theirs = kept(drafting, got, layers), kept(plain, want, layers)
        assert len(ours) == 2 * NUM_LAYERS
        for x, y in zip(ours, theirs, strict=True):
            CLOSE(x[:, :count], y[:, :count])
    if drafter not in ("itself", "ngram"):
        # Some drafts were rejected, else nothing was shown.
        steps, *stood = np.sum([r.draft_counts for r in drafting.scheduler.running], 0)
        assert sum(stood) < 0.9 * len(stood) * steps


@pytest.mark.parametrize("drafter", ["another", "eagle3", *SLOW])
@pytest.mark.parametrize("changes", [{}, dict(max_num_batched_tokens=16, token_buckets=(16,))],
                         ids=["whole", "in chunks"])  # fmt: skip
def test_the_drafter_s_cache_is_that_of_all_tokens_at_once(drafter, changes):
    whole = dict(max_num_batched_tokens=48, token_buckets=(48,), enable_prefix_caching=False)
    decoding, dense = start(drafter, **changes), start(drafter, **whole)
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
def test_the_drafter_s_keys_of_a_cached_prefix_come_along(drafter):
    whole = dict(max_num_batched_tokens=48, token_buckets=(48,))
    sharing = start(drafter, **whole)
    alone = start(drafter, **whole, enable_prefix_caching=False)
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
