"""What drafts were drawn from: how it is drawn, kept, planned for and saved."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrunner.api.sampling_params import SamplingParams
from jaxrunner.engine.engine import Engine
from jaxrunner.engine.snapshots.snapshot import restore_engine, save_engine
from jaxrunner.models.llama import llama
from jaxrunner.program.state import make_state
from jaxrunner.programs.build import build
from jaxrunner.sampling.drafting import draw_own
from jaxrunner.speculators.draft_logits import NAME
from jaxrunner.worker.memory_plan import SizeCosts
from jaxrunner.worker.program_memory import ProgramMemory
from tests.support import tiny
from tests.support.chi_square import excess
from tests.support.drafters import PROMPTS, RULED, K, probabilistic, run

V = tiny.SETTINGS["vocab_size"]


@pytest.mark.slow
def test_greedy_tokens_are_those_without_drafts():
    """The EAGLE-3 head has some of the tokens alone: the others' logits are -inf."""
    rule, changes = dict(temperature=0.0, logprobs=1) | RULED, dict(async_depth=1)
    want, *_ = run(llama, *tiny.model_and_params(), rule, **changes)
    got, _, e = run(*probabilistic("eagle3", "standard"), rule, **changes)
    assert got == want
    kept = np.asarray(e.runner.state.tables[NAME].logits)
    assert not np.isnan(kept).any() and kept.max() == 0
    assert np.isneginf(kept).any()


def drawn(logits: list[float], num: int, *, dtype: str, params: SamplingParams, j: int = 1):
    """Returns draft j of `num` requests, each of a seed of its own, and what each was drawn of."""
    config, weights = tiny.model_and_params()
    sizes = tiny.engine_config(max_num_seqs=num, max_model_len=8, dtype=dtype)
    program = build(llama, config, sizes, weights).program
    state = make_state(program)
    rows = {rule.name: rule.row(params, 0) for rule in program.rules}
    fill = {
        name: jax.tree.map(lambda x, r: x.at[:].set(jnp.asarray(r, x.dtype)), state.tables[name], r)
        for name, r in rows.items()
        if name in ("temperature", "min_p", "top_k_top_p")
    }
    words = jnp.stack([jnp.full(num, 3, jnp.uint32), jnp.arange(num, dtype=jnp.uint32)], 1)
    fill["seed"] = replace(state.tables["seed"], words=words)
    state = replace(state, tables=state.tables | fill)
    scores = jnp.broadcast_to(jnp.asarray(logits, dtype), (num, len(logits)))
    at = jnp.full(num, j, jnp.int32)
    one = jax.jit(lambda state: draw_own(state, jnp.arange(num), scores, at, program=program))
    return jax.tree.map(np.asarray, one(state))


def shares(kept: np.ndarray) -> np.ndarray:
    chances = np.exp(kept.astype(np.float64))
    return chances / chances.sum()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_drafts_are_drawn_from_what_is_kept(dtype: str):
    """Of two bytes too: what these make of a logit is drawn from, and little is lost."""
    logits = [100.5, 101.0, 100.0, 99.5, 97.0, 98.0]
    params = SamplingParams(temperature=0.7, top_k=5)
    tokens, kept = drawn(logits, 20_000, dtype=dtype, params=params)
    assert kept.dtype == jnp.dtype(dtype) and (kept == kept[:1]).all()
    wanted = np.array(logits) / 0.7
    wanted[4] = -np.inf
    np.testing.assert_allclose(shares(kept[0]), shares(wanted), atol=1e-3, rtol=0)
    seen, likely = np.bincount(tokens, minlength=6), shares(kept[0]) > 0
    assert seen[~likely].sum() == 0
    assert excess(seen[likely], 20_000 * shares(kept[0])[likely]) < 4
    # Each draft of a step has noise of its own.
    other, _ = drawn(logits, 20_000, dtype=dtype, params=params, j=2)
    same = (tokens == other).mean()
    assert abs(same - (shares(kept[0]) ** 2).sum()) < 0.02


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_drafter_that_fails_drafts_any_token(bad: float):
    """So that what stands of its drafts is still the model's own distribution."""
    logits = [bad] * 6 if bad == -np.inf else [0.0, bad, 1.0, 0.0, 0.0, 0.0]
    tokens, kept = drawn(logits, 3000, dtype="float32", params=SamplingParams())
    assert (kept == 0).all()
    assert excess(np.bincount(tokens, minlength=6), np.full(6, 500.0)) < 4


def test_the_table_is_planned_and_there_alone_where_drafts_have_logits():
    model, config, params = probabilistic("another", "standard")
    sizes, plain = tiny.engine_config(), model._replace(speculator=None)
    programs = [build(m, config, sizes, params).program for m in (model, plain)]
    plans = [SizeCosts(p, params, ProgramMemory()).plan(48, 60) for p in programs]
    assert plans[0].tables - plans[1].tables == 5 * K * V * 4
    tables = [make_state(p).tables for p in programs]
    assert tables[0].keys() - tables[1].keys() == {NAME}
    assert tables[0][NAME].logits.shape == (5, K, V)


@pytest.mark.slow
def test_an_engine_that_was_saved_goes_on_with_the_same_drafts(tmp_path: Any):
    model, config, params = probabilistic("eagle3", "standard")
    # As above, so that programs are the same.
    rule: dict[str, Any] = dict(temperature=0.9, logprobs=1) | RULED

    def start() -> Engine:
        return Engine(model, config, tiny.engine_config(async_depth=1), params)

    def finish(e: Engine) -> None:
        while e.has_unfinished:
            e.step()

    first, second = start(), start()
    live = {
        name: first.add(name, ids, SamplingParams(max_tokens=20, seed=i, **rule))
        for i, (name, ids) in enumerate(PROMPTS.items())
    }
    for _ in range(3):
        first.step()
    save_engine(first, tmp_path / "saved")
    restored, _ = restore_engine(second, tmp_path / "saved")
    saved, kept = (np.asarray(e.runner.state.tables[NAME].logits) for e in (first, second))
    np.testing.assert_array_equal(saved, kept)
    assert kept.any() and restored.keys() == live.keys()
    finish(first)
    finish(second)
    for name, request in restored.items():
        assert request.output_token_ids == live[name].output_token_ids
        assert request.draft_counts == live[name].draft_counts
