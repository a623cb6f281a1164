"""Drafters with layers of their own: they change no token, and their cache is what it should be."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrunner import pytree
from jaxrunner.api.sampling_params import SamplingParams
from jaxrunner.engine.engine import Engine
from jaxrunner.hf_config import Settings
from jaxrunner.models.llama import llama
from jaxrunner.ops.backends import dense
from jaxrunner.speculators import eagle as heads
from jaxrunner.speculators.draft_model import DraftModelConfig, draft_model
from jaxrunner.speculators.drafted import with_drafter
from jaxrunner.speculators.drafter import Drafted, Target
from jaxrunner.speculators.eagle import eagle
from jaxrunner.types import Inputs
from tests.support import tiny

K = 3
PROMPTS = {
    "a": [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5], "b": [9, 2], "c": list(range(1, 20)), "d": [7] * 9,
    "e": [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8],
}  # fmt: skip
RULED = dict(repetition_penalty=1.2, min_tokens=3, bad_words=[[5, 9]])


def random_like(cls, dims, seed):
    keys = iter(jax.random.split(jax.random.key(seed), 99))

    def make(axes, shape, dtype):
        return jax.random.normal(next(keys), shape, dtype) * 0.4

    return pytree.build(make, cls, dims | {"param": jnp.float32})


def with_itself():
    """Returns the tiny model drafted by itself: every draft is right."""
    config, params = tiny.model_and_params()
    own = DraftModelConfig(llama, config)
    model, drafted = with_drafter(llama, config, draft_model(llama), own, K)
    return model, drafted, Drafted(params, params)


def with_another():
    """Returns it drafted by a model of other sizes, and so with a cache group of its own."""
    config, params = tiny.model_and_params()
    other = tiny.config(num_key_value_heads=1, num_hidden_layers=1, head_dim=4)
    own = DraftModelConfig(llama, other)
    model, drafted = with_drafter(llama, config, draft_model(llama), own, K)
    return model, drafted, Drafted(params, tiny.random_params(other, seed=5))


def with_eagle(**changes):
    """Returns it drafted by an EAGLE head of random weights."""
    config, params = tiny.model_and_params()
    settings = Settings(tiny.SETTINGS | dict(num_hidden_layers=1) | changes)
    own = heads.read(settings, config, frozenset())
    model, drafted = with_drafter(llama, config, eagle, own, K)
    return model, drafted, Drafted(params, random_like(heads.Params, own.dims, 3))


def test_a_head_for_another_model_is_refused():
    settings = Settings(tiny.SETTINGS | dict(num_hidden_layers=1, hidden_size=24))
    with pytest.raises(ValueError, match="hidden_size of an EAGLE head for this model must be 20"):
        heads.read(settings, tiny.config(), frozenset())


DRAFTERS = dict(
    itself=with_itself, another=with_another, eagle=with_eagle,
    wide=lambda: with_eagle(num_key_value_heads=1),
)  # fmt: skip


def run(model, config, params, rule, **changes):
    """Returns tokens by request, the steps it took, and the engine."""
    e, steps = Engine(model, config, tiny.engine_config(**changes), params), 0
    requests = {
        name: e.add(name, ids, SamplingParams(max_tokens=20, seed=i, **rule))
        for i, (name, ids) in enumerate(PROMPTS.items())
    }
    while e.has_unfinished:
        e.step()
        steps += 1
    return {name: r.output_token_ids for name, r in requests.items()}, steps, e


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize(
    ("rule", "changes"),
    [
        (dict(temperature=0.0), {}),
        (dict(temperature=0.7, top_p=0.9), dict(num_blocks=14, async_depth=3)),
        (dict(temperature=0.5, logprobs=2) | RULED, dict(async_depth=1)),
        (dict(temperature=0.7), dict(num_decode_steps=3, async_depth=2)),
    ],
    ids=["greedy", "sampled and preempted", "rules and logprobs", "steps"],
)
def test_drafts_change_no_token(drafter, rule, changes):
    want, plain_steps, _ = run(llama, *tiny.model_and_params(), rule, **changes)
    got, steps, e = run(*DRAFTERS[drafter](), rule, **changes)
    assert got == want
    if changes.get("num_blocks"):
        assert e.scheduler.num_preemptions
    elif drafter == "itself" and not changes.get("num_decode_steps"):
        assert steps < 0.6 * plain_steps


def rejecting(drafter, rejection, rates=()):
    model, config, params = DRAFTERS[drafter]()
    assert model.speculator is not None
    speculator = model.speculator._replace(rejection=rejection, rates=rates)
    return model._replace(speculator=speculator), config, params


@pytest.mark.parametrize("rejection", ["standard", "block"])
def test_greedy_tokens_do_not_depend_on_how_drafts_are_verified(rejection):
    rule = dict(temperature=0.0, logprobs=1) | RULED
    want, *_ = run(llama, *tiny.model_and_params(), rule)
    got, *_ = run(*rejecting("eagle", rejection), rule)
    assert got == want
    sampled, *_ = run(*rejecting("eagle", rejection), dict(temperature=0.7))
    assert all(len(tokens) == 20 for tokens in sampled.values())


def test_synthetic_rates_are_met_and_counted():
    rates = (1.0, 0.5, 0.0)
    model, config, params = rejecting("eagle", "synthetic", rates)
    e = Engine(model, config, tiny.engine_config(max_num_seqs=5), params)
    requests = [
        e.add(str(i), [i, 1, 2], SamplingParams(max_tokens=45, temperature=0.7, seed=i))
        for i in range(20)
    ]
    while e.has_unfinished:
        e.step()
    steps, *accepted = np.array([r.draft_counts for r in requests]).sum(0)
    assert steps > 200
    # Near its end a request has no room for all drafts.
    assert 0.9 * steps < accepted[0] <= steps
    assert abs(accepted[1] / steps - 0.5) < 0.15 and accepted[2] == 0


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_drafts_are_what_the_drafter_says_without_a_cache(drafter):
    model, config, params = DRAFTERS[drafter]()
    e = Engine(model, config, tiny.engine_config(async_depth=1), params)
    greedy = SamplingParams(max_tokens=14, temperature=0.0)
    request, compared = e.add("a", PROMPTS["a"], greedy), 0
    while e.has_unfinished:
        e.step()
        if request.finish_reason is not None:
            break
        ids, requests = request.token_ids, e.runner.state.requests
        slot = e.runner.requests["a"]
        assert int(requests.total_len[slot]) == len(ids)
        got = np.asarray(requests.token_ids)[slot, len(ids) : len(ids) + K].tolist()
        room = request.max_len - len(ids)
        assert got[:room] == dense_drafts(config, params, ids)[:room]
        compared += 1
    assert compared > 2


def dense_drafts(config, params, ids):
    """Returns the drafts behind `ids`, by dense attention over all tokens each time."""
    drafts = []
    for _ in range(K):
        drafts.append(int(jnp.argmax(next_logits(config, params, ids, drafts))))
    return drafts


def next_logits(config, params, ids, drafts):
    """Returns the drafter's logits behind `ids` and `drafts`."""
    model, family, own = config.model, config.family, config.drafter
    tokens, none = jnp.array([*ids, *drafts]), (None,) * len(own.cache_kinds)
    if not family.is_shifted:
        hidden, _, _ = family.layers(
            own, params.drafter, family.embed(own, params.drafter, inputs_of(tokens), None),
            jnp.zeros(()), none, inputs_of(tokens), dense(1),
        )  # fmt: skip
        return family.logits(own, params.drafter, hidden, None)[-1]
    target = Target(
        lambda inputs: model.embed(config.target, params.target, inputs),
        lambda hidden: model.logits(config.target, params.target, hidden),
    )
    inputs = inputs_of(jnp.array(ids[:-1]))
    x = target.embed(inputs)
    bare = (None,) * len(config.target.cache_kinds)
    hidden, _, extras = model.layers(
        config.target, params.target, x, bare, inputs, dense(1), extras=own.extras
    )
    feature = family.feature(own, params.drafter, hidden, extras)
    following = inputs_of(tokens[1:])
    x = family.embed(own, params.drafter, following, target)
    # The feature of a draft is what the drafter made of the one before it.
    out = x
    for n in range(len(ids) - 1, len(tokens)):
        out, fed, _ = family.layers(
            own, params.drafter, x[:n], feature, none, inputs_of(tokens[1 : n + 1]), dense(1)
        )
        feature = jnp.concatenate([feature, fed[-1:]])
    return family.logits(own, params.drafter, out, target)[-1]


def inputs_of(tokens):
    return Inputs(tokens, jnp.arange(tokens.size), jnp.full(tokens.size, tokens.size))
