"""Prefixes of models with states, on a device: what goes on from a checkpoint, and what a cold run
computes, bit for bit where chunks end in the same places."""

from collections.abc import Iterator
from pathlib import Path
import random
from typing import Any

import numpy as np
import pytest

from jaxrunner import LLM, RequestOutputKind, SamplingParams
from jaxrunner.engine.make_scheduler import make_scheduler
from jaxrunner.program.state import make_state
from jaxrunner.runner.step_check import StepCheck
from jaxrunner.worker.memory_plan import num_bytes
from tests.support import hybrids, scheduling

SIZES: dict[str, Any] = hybrids.LLM_SIZES | dict(
    num_blocks=36, enable_prefix_caching=True, mamba_block_size=8, num_state_checkpoints=3
)
SEVERAL: dict[str, Any] = dict(num_decode_steps=5)
MANY: dict[str, Any] = dict(num_blocks=200, num_state_checkpoints=90)
BASE = np.random.default_rng(3).integers(0, 61, 44).tolist()
OTHER = np.random.default_rng(4).integers(0, 61, 9).tolist()
# Mamba-2 with a layer that keeps nothing.
FAMILIES = ["nemotron h"]
# A gated delta net, a convolution alone, and a layer that has both a state and keys.
SLOW = ["qwen 3 next", "lfm 2", "falcon h1"]
Told = tuple[list[int], list[Any], int]  # tokens, their logprobs, tokens that were cached


@pytest.fixture(
    scope="module",
    params=[*FAMILIES, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)],
)
def llm(request: Any, tmp_path_factory: Any) -> Iterator[LLM]:
    folder = tmp_path_factory.mktemp("hybrid")
    hybrids.save(request.param, folder)
    with LLM(folder, **SIZES) as llm:
        yield llm


def ask(llm: LLM, prompt: list[int], count: int = 9, **kwargs: Any) -> Told:
    params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, logprobs=20)
    asked = dict(prompt_token_ids=prompt) | kwargs
    [output] = llm.generate(asked, params, use_tqdm=False)
    told = output.outputs[0]
    logprobs = [{i: one.logprob for i, one in at.items()} for at in told.logprobs or ()]
    return list(told.token_ids), logprobs, output.num_cached_tokens or 0


def test_what_goes_on_from_a_checkpoint_is_what_a_cold_run_computes(llm):
    """Prefixes that end before, at and behind a checkpoint; logprobs are equal in each bit."""
    for common, found in ((7, 0), (8, 8), (17, 16), (23, 16), (40, 40)):
        prompt = BASE[:common] + OTHER
        llm.reset_prefix_cache()
        *cold, none = ask(llm, prompt)
        *again, whole = ask(llm, prompt)
        llm.reset_prefix_cache()
        ask(llm, BASE, 2)
        *shared, part = ask(llm, prompt)
        assert (none, whole, part) == (0, (len(prompt) - 1) // 8 * 8, found)
        assert again == cold and shared == cold
    told = ask(llm, BASE)[0]
    longer = [*BASE, *told, *OTHER]
    tokens, _, cached = ask(llm, longer)
    assert cached == 48  # one of its outputs, which rows that decode have computed
    assert tokens == ask(llm, longer, cache_salt="other")[0]


def test_memory_is_planned_as_it_is_made(llm):
    plan, program = llm.memory_plan, llm.engine.runner.program
    state = make_state(program)
    of_slots = [g for g in program.cache_groups if not g.kind.has_prefixes]
    assert {(g.block_size, g.num_blocks) for g in of_slots} == {(8, 4 + 1 + 3)}
    assert num_bytes(state) == plan.tables + plan.kv


def test_any_load_computes_what_each_request_would_cold(llm):
    """Requests come at random, share prefixes, are preempted and aborted, and lose checkpoints."""
    rng, engine = random.Random(7), llm.engine
    llm.reset_prefix_cache()
    before, pairs = engine.scheduler.num_preemptions, list[Any]()
    params = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in (3, 9, 21)]
    for _ in range(300):
        if len(engine.unfinished) < 7 and rng.random() < 0.5:
            base = rng.choice([BASE, BASE, OTHER * 3])
            prompt = base[: rng.randint(0, len(base))] + rng.sample(range(61), rng.randint(1, 9))
            chosen, name = rng.choice(params), str(len(pairs))
            # The second one shares with nobody.
            pairs.append(
                [engine.add(name, prompt, chosen),
                 engine.add(f"cold {name}", prompt, chosen, cache_salt=name)]
            )  # fmt: skip
        if rng.random() < 0.03 and engine.unfinished:
            engine.abort([rng.choice([*engine.unfinished])])
        engine.step()
        for g, pool in enumerate(engine.pools):
            pool.check([request.blocks[g] for request in engine.scheduler.holders])
    while engine.has_unfinished:
        engine.step()
    assert all(pool.num_free == pool.num_blocks for pool in engine.pools)
    assert engine.scheduler.num_preemptions > before
    assert sum(warm.num_cached_tokens > 0 for warm, _ in pairs) > 5
    assert not any(cold.num_cached_tokens for _, cold in pairs)
    whole = [[r.output_token_ids for r in pair] for pair in pairs
             if all(r.finish_reason == "length" for r in pair)]  # fmt: skip
    assert len(whole) > 10 and all(warm == cold for warm, cold in whole)


def test_steps_pass_the_check(llm):
    """Of a scheduler alone, whose requests share checkpoints and give way."""
    program = llm.engine.runner.program
    check, (pools, scheduler) = StepCheck(program), make_scheduler(program)
    for i, common in enumerate((40, 17, 40, 30, 44, 24, 12)):
        scheduler.add(scheduling.new(str(i), BASE[:common] + OTHER, 14))
    found = []
    while scheduler.has_unfinished:
        output = scheduling.step(scheduler)
        check.take(output)
        found += [new.num_computed for new in output.scheduled_new_reqs]
        scheduling.check(scheduler, pools)
    assert scheduler.num_preemptions and max(found) > 16


@pytest.fixture(scope="module")
def folder(tmp_path_factory: Any) -> Path:
    path = tmp_path_factory.mktemp("lfm2")
    hybrids.save("lfm 2", path)
    return path


def plain(llm: LLM, prompt: list[int], **kwargs: Any) -> tuple[list[int], int]:
    """Returns the tokens of a prompt, and how many of its own were cached."""
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    [output] = llm.generate([dict(prompt_token_ids=prompt) | kwargs], params, use_tqdm=False)
    return list(output.outputs[0].token_ids), output.num_cached_tokens or 0


def test_several_steps_in_a_launch_pass_over_checkpoints(folder):
    prompts = [BASE[:n] + OTHER for n in (3, 20, 26)]
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    asked = [dict(prompt_token_ids=prompt) for prompt in prompts]
    with LLM(folder, **SIZES | MANY | SEVERAL) as llm:
        outputs = llm.generate(asked, params, use_tqdm=False)
        told = [list(output.outputs[0].token_ids) for output in outputs]
        assert any("multi_step" in str(key) for key in llm.engine.runner.programs.ledger)
        for i, (prompt, tokens) in enumerate(zip(prompts, told, strict=True)):
            assert plain(llm, prompt, cache_salt=f"other {i}") == (tokens, 0)
            longer = [*prompt, *tokens, 5]
            cached = (len(longer) - 2) // 8 * 8  # the last token of an answer is not computed
            assert (plain(llm, longer, cache_salt=f"another {i}")[0], cached) == plain(llm, longer)


def test_checkpoints_outlive_a_snapshot_and_no_change_of_weights(folder, tmp_path):
    asked = [dict(prompt_token_ids=BASE[:n] + OTHER) for n in (40, 21, 8, 33, 16)]
    params = SamplingParams(
        temperature=0.0, max_tokens=20, ignore_eos=True, output_kind=RequestOutputKind.CUMULATIVE
    )
    with LLM(folder, **SIZES | MANY) as first:
        want = [list(o.outputs[0].token_ids) for o in first.generate(asked, params, use_tqdm=False)]
        first.reset_prefix_cache()
        parts: Any = first.stream(asked, params)
        for _ in range(9):
            next(parts)
        assert any(r.num_computed > 40 for r in first.engine.scheduler.running)
        first.save_state(tmp_path / "saved")
        parts.close()
    with LLM(folder, **SIZES | MANY) as second:
        told = {out.request_id: out for out in second.restore_state(tmp_path / "saved")}
        found = [list(out.outputs[0].token_ids) for out in told.values()]
        assert len(found) >= 3 and all(tokens in want for tokens in found)
        assert plain(second, BASE[:40] + OTHER) == (want[0], 48)
        second.sleep(1)
        second.wake_up()
        assert plain(second, BASE[:40] + OTHER) == (want[0], 0)
        assert plain(second, BASE[:40] + OTHER) == (want[0], 48)
        second.engine.update_params(second.params)
        assert plain(second, BASE[:40] + OTHER) == (want[0], 0)
