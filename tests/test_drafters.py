"""Drafters with layers of their own: they change no token, and their cache is what it should be."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrunner.api.sampling_params import SamplingParams
from jaxrunner.engine.engine import Engine
from jaxrunner.hf_config import Settings
from jaxrunner.models.llama import llama
from jaxrunner.ops.backends import dense
from jaxrunner.speculators import eagle as heads
from jaxrunner.speculators.drafter import Target
from jaxrunner.types import Inputs
from tests.support import tiny
from tests.support.drafters import DRAFTERS, PROMPTS, K, run

MAX_LEN = 48


def test_a_head_for_another_model_is_refused():
    settings = Settings(tiny.SETTINGS | dict(num_hidden_layers=1, hidden_size=24))
    with pytest.raises(ValueError, match="hidden_size of an EAGLE head for this model must be 20"):
        heads.read(settings, tiny.config(), frozenset())


SMALL = dict(num_blocks=14)  # in most tests, so that programs are the same
ONE = SMALL | dict(async_depth=1)
RULES = {
    "greedy": (dict(temperature=0.0), ONE),
    "sampled and preempted": (
        dict(temperature=0.7, top_p=0.9), SMALL | dict(async_depth=3),
    ),
}  # fmt: skip
# All rules, logprobs and several steps are in the loads of `test_drafts_driver.py`.
PAIRS = [
    ("sampled and preempted", "another"),
    *(("greedy", name) for name in ("itself", "eagle", "eagle3", "mtp")),
]


@functools.cache
def plain(name):
    """Returns the tokens without drafts, and the steps that they took."""
    rule, changes = RULES[name]
    return run(llama, *tiny.model_and_params(), rule, **changes)[:2]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "drafter"), PAIRS)
def test_drafts_change_no_token(name, drafter):
    rule, changes = RULES[name]
    want, plain_steps = plain(name)
    got, steps, e = run(*DRAFTERS[drafter](), rule, **changes)
    assert got == want
    assert e.scheduler.num_preemptions
    if drafter == "itself":
        assert steps < 0.6 * plain_steps


def rejecting(drafter, rejection, rates=()):
    model, config, params = DRAFTERS[drafter]()
    assert model.speculator is not None
    speculator = model.speculator._replace(rejection=rejection, rates=rates)
    return model._replace(speculator=speculator), config, params


@pytest.mark.slow
def test_greedy_tokens_do_not_depend_on_how_drafts_are_verified():
    """By blocks, `test_suffix.py` compares them; by rules, `test_draft_logits.py`."""
    model = rejecting("eagle", "standard")
    assert run(*model, dict(temperature=0.0), **ONE)[0] == plain("greedy")[0]
    sampled, *_ = run(*model, dict(temperature=0.7), **ONE)
    assert all(len(tokens) == 20 for tokens in sampled.values())


def test_synthetic_rates_are_met_and_counted():
    rates = (1.0, 0.5, 0.0)
    model, config, params = rejecting("eagle", "synthetic", rates)
    e = Engine(model, config, tiny.engine_config(), params)
    requests = [
        e.add(str(i), [i, 1, 2], SamplingParams(max_tokens=45, temperature=0.7, seed=i))
        for i in range(20)
    ]
    while e.has_unfinished:
        e.step()
    steps, _, *accepted = np.array([r.draft_counts for r in requests]).sum(0)
    assert steps > 200
    # Near its end a request has no room for all drafts.
    assert 0.9 * steps < accepted[0] <= steps
    assert abs(accepted[1] / steps - 0.5) < 0.15 and accepted[2] == 0


@pytest.mark.parametrize(
    "drafter",
    [
        "another",
        *(pytest.param(x, marks=pytest.mark.slow) for x in ("itself", "eagle", "eagle3", "mtp")),
    ],
)
def test_drafts_are_what_the_drafter_says_without_a_cache(drafter):
    model, config, params = DRAFTERS[drafter]()
    e = Engine(model, config, tiny.engine_config(**ONE), params)
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
    tokens = np.zeros(MAX_LEN, np.int32)  # one length, one compilation
    tokens[: len(ids)] = ids
    return draft_all(params, tokens, len(ids), config).tolist()


@functools.partial(jax.jit, static_argnames="config")
def draft_all(params, tokens, num_ids, config):
    """Returns K drafts behind `num_ids` tokens, each the likeliest by the drafter's logits."""
    family, own = config.family, config.drafter
    none, drafts = (None,) * len(own.cache_kinds), []
    target = Target(
        lambda inputs: config.model.embed(config.target, params.target, inputs),
        lambda hidden: config.model.logits(config.target, params.target, hidden),
    )
    feature, last = jnp.zeros(()), num_ids - 1
    if family.is_shifted:
        inputs = inputs_of(tokens, num_ids)
        bare = (None,) * len(config.target.cache_kinds)
        hidden, _, extras = config.model.layers(
            config.target, params.target, target.embed(inputs), bare, inputs, dense(1),
            extras=own.extras,
        )  # fmt: skip
        feature = family.feature(own, params.drafter, hidden, extras)
        last = num_ids - 2  # the last position whose next token the model has sampled
    for i in range(K):
        read = jnp.roll(tokens, -1) if family.is_shifted else tokens
        inputs = inputs_of(read, num_ids + i)
        x = family.embed(own, params.drafter, inputs, target)
        out, fed, _ = family.layers(own, params.drafter, x, feature, none, inputs, dense(1))
        logits = family.logits(own, params.drafter, out[last + i], target)
        drafts.append(jnp.argmax(logits).astype(tokens.dtype))
        tokens = tokens.at[num_ids + i].set(drafts[-1], mode="drop")
        if family.is_shifted:  # the feature of a draft is what the drafter made of the one before
            feature = feature.at[last + i + 1].set(fed[last + i])
    return jnp.stack(drafts)


def inputs_of(tokens, count):
    return Inputs(tokens, jnp.arange(tokens.size), jnp.full(tokens.size, count))
