"""Drafts where tokens of a step are scarce, and what an engine counts of drafts."""

from typing import Any

import numpy as np
import pytest

from jaxrunner.api.sampling_params import SamplingParams
from jaxrunner.device.buckets import step_buckets
from jaxrunner.engine.engine import Engine
from jaxrunner.engine.metrics import Counter, read_metrics
from jaxrunner.engine.snapshots.snapshot import restore_engine, save_engine
from jaxrunner.models.llama import llama
from jaxrunner.speculators.suffix import suffix
from tests.support import tiny
from tests.support.drafters import PROMPTS, K, adaptive, run, with_ngrams

GREEDY: dict[str, Any] = dict(temperature=0.0)


def with_suffixes() -> tuple[Any, ...]:
    return llama._replace(speculator=suffix(K, num_cached=64)), *tiny.model_and_params()


@pytest.mark.parametrize("num_tokens", [K, pytest.param(8, marks=pytest.mark.slow)])
def test_several_steps_a_launch_need_tokens_for_all_drafts_and_else_are_one(num_tokens: int):
    want, *_ = run(llama, *tiny.model_and_params(), GREEDY)
    rows = min(5, num_tokens)
    sizes: dict[str, Any] = dict(
        max_num_batched_tokens=num_tokens, token_buckets=(num_tokens,), decode_buckets=(rows,),
        max_num_seqs=rows, num_decode_steps=3,
    )  # fmt: skip
    got, _, e = run(*with_ngrams(), GREEDY, **sizes)
    assert got == want
    launched = {c.key.name for c in e.runner.programs.ledger}
    # Two requests verify K drafts each in 8 tokens, none does in K.
    assert ("multi_step" in launched) == (num_tokens == 8)
    assert all(bucket.num_rows for bucket in step_buckets(e.config, llama.speculator))


def test_drafts_that_were_not_there_are_not_counted():
    model, config, params = with_suffixes()
    e = Engine(model, config, tiny.engine_config(async_depth=1), params)
    request = e.add("a", PROMPTS["a"], SamplingParams(max_tokens=30, seed=3))
    steps = drafts = empty = 0
    while e.has_unfinished:
        e.step()
        table, n = np.asarray(e.runner.state.requests.token_ids), request.num_tokens
        (row,) = [row for row in table if row[: len(PROMPTS["a"])].tolist() == PROMPTS["a"]]
        due = row[n : min(n + K, request.max_len - 1)] >= 0  # the last token is no draft
        steps, drafts = steps + bool(due.any()), drafts + int(due.sum())
        empty += due.size > 0 and not due.any()
    assert request.draft_counts[:2] == (steps, drafts)
    assert 0 < steps < drafts < K * steps and empty


def test_adaptive_engines_count_the_drafts_that_they_planned():
    sizes: dict[str, Any] = dict(max_num_batched_tokens=16, token_buckets=(16,))
    model, config, params = adaptive(*with_suffixes())
    e = Engine(model, config, tiny.engine_config(**sizes), params)
    planned, schedule = [], e.scheduler.schedule

    def watched(num_steps: int = 1) -> Any:
        output = schedule(num_steps)
        planned.append(max(output.num_drafts.values(), default=0))
        return output

    e.scheduler.schedule = watched
    requests = [
        e.add(name, ids, SamplingParams(max_tokens=20, **GREEDY)) for name, ids in PROMPTS.items()
    ]
    while e.has_unfinished:
        e.step()
    steps, drafts, *accepted = np.array([r.draft_counts for r in requests]).sum(0).tolist()
    assert max(planned) == K - 1  # 16 tokens hold no more of five requests
    assert steps <= drafts <= (K - 1) * steps
    assert drafts >= sum(accepted) and accepted[0] <= steps


def test_metrics_tell_drafts_as_they_were_counted():
    totals = {f"drafts {i}": count for i, count in enumerate((5, 9, 4, 2, 1))}
    found = {m.name: m.value for m in read_metrics([], totals) if isinstance(m, Counter)}
    names = "num_drafts", "num_draft_tokens", "num_accepted_tokens"
    assert [found[f"vllm:spec_decode_{name}"] for name in names] == [5, 9, 7]


def test_an_engine_that_was_saved_goes_on_with_the_same_corpus(tmp_path: Any):
    model, config, params = with_suffixes()
    first, second = (
        Engine(model, config, tiny.engine_config(async_depth=1), params) for _ in range(2)
    )
    first.add("ended", PROMPTS["a"], SamplingParams(max_tokens=12, **GREEDY))
    while first.has_unfinished:
        first.step()
    rule = SamplingParams(max_tokens=12, temperature=0.9, seed=1)
    live = {name: first.add(name, ids, rule) for name, ids in PROMPTS.items()}
    for _ in range(3):
        first.step()
    save_engine(first, tmp_path / "saved")
    restored, _ = restore_engine(second, tmp_path / "saved")
    of_first, of_second = (e.runner.state.tables["suffix"] for e in (first, second))
    for name, saved in vars(of_first).items():
        np.testing.assert_array_equal(saved, getattr(of_second, name))
    assert np.asarray(of_second.tokens).any() and restored
    for e in (first, second):
        while e.has_unfinished:
            e.step()
    for name, request in restored.items():
        assert request.output_token_ids == live[name].output_token_ids
        assert request.draft_counts == live[name].draft_counts
