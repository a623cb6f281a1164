"""Drafts change no token, whatever is drafted: greedy or sampled, preempted or cached."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxrunner import pytree
from jaxrunner.api.sampling_params import SamplingParams
from jaxrunner.engine.engine import Engine
from jaxrunner.hf_config import Settings
from jaxrunner.models.llama import llama
from jaxrunner.programs.build import build
from jaxrunner.speculators.ngram import ngram
from jaxrunner.speculators.speculator import write_drafts
from jaxrunner.speculators.suffix import suffix
from jaxrunner.types import SamplingMetadata
from tests.outside.lookup import K, lookup
from tests.outside.recurrent import recurrent
from tests.support import tiny
from tests.support.drafters import RULED, run
from tests.support.request_table import table

MODEL = llama._replace(speculator=lookup)


def engine(model, **changes) -> Engine:
    config, params = tiny.model_and_params()
    return Engine(model, config, tiny.engine_config(**changes), params)


@pytest.mark.parametrize(
    ("rule", "changes"),
    [
        pytest.param(dict(temperature=0.0), {}, marks=pytest.mark.slow),
        (
            dict(temperature=0.5, logprobs=2) | RULED,
            dict(num_decode_steps=3, num_blocks=14, async_depth=3),
        ),
    ],
    ids=["greedy", "steps, rules and preempted"],
)
def test_drafts_change_no_token(rule, changes):
    want, plain_steps, _ = run(llama, *tiny.model_and_params(), rule)
    got, steps, e = run(MODEL, *tiny.model_and_params(), rule, **changes)
    assert got == want
    if changes.get("num_blocks"):
        assert e.scheduler.num_preemptions
    elif rule["temperature"] == 0 and "num_decode_steps" not in changes:
        assert steps < plain_steps  # some drafts stood


@pytest.mark.parametrize("kind", [ngram, suffix])
def test_engines_whose_drafts_are_alike_share_programs(kind):
    assert kind(2) == kind(2) != kind(3)


def test_rows_that_were_due_no_token_keep_what_they_have():
    """In the midst of a prompt, and padding."""
    ids = jnp.tile(jnp.arange(32, dtype=jnp.int32), (4, 1))
    due, slot = jnp.array([True, False, False]), jnp.array([0, 2, 4])
    lens = jnp.array([9, 5, 0])
    rows = SamplingMetadata(slot, lens, due, next_pos=lens, num_drafts=lens * 0)
    requests = table(token_ids=ids, total_len=[9, 12, 10, 0])
    after = write_drafts(requests, rows, jnp.full((3, 2), 50)).token_ids
    assert after.tolist() == ids.at[0, 9:11].set(50).tolist()


def test_each_slot_has_the_speculator_s_state():
    e = engine(MODEL)
    request = e.add("a", [1, 2, 3], SamplingParams(max_tokens=12, temperature=0.0))
    sampled = 0
    while e.has_unfinished:
        sampled += bool(e.step())
    assert len(request.output_token_ids) == 12
    counts = np.asarray(e.runner.state.tables["proposed"].count)
    assert counts.sum() == K * sampled and (counts > 0).sum() == 1


def test_a_state_of_all_tokens_before_refuses_drafts():
    """What a rejected draft has changed there cannot be undone."""
    config = recurrent.read(Settings(tiny.SETTINGS))
    params = pytree.abstract(recurrent.params, config.dims | {"param": "float32"})
    model = recurrent._replace(speculator=lookup)
    match = "a speculator needs caches in which a rejected token is written over, LlamaForCausalLM"
    with pytest.raises(ValueError, match=match):
        build(model, config, tiny.engine_config(), params)
