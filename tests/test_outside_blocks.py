"""Cache groups whose blocks differ in size: prefixes, preemption, snapshots, memory and checks."""

import functools
from typing import Any

import pytest

from jaxrunner import RequestOutputKind, register_model
from jaxrunner.engine.make_scheduler import make_scheduler
from jaxrunner.program.state import make_state
from jaxrunner.programs.build import build
from jaxrunner.runner.step_check import StepCheck
from jaxrunner.worker.memory_plan import num_bytes
from tests.outside import checkpoint, float64_llama
from tests.outside.resized_blocks import resized
from tests.support import scheduling

NAME = "ResizedForCausalLM"
SETTINGS: dict[str, Any] = checkpoint.LLAMA | dict(architectures=[NAME])
PROMPTS = checkpoint.prompts(3, 26, 9, 15)
PROMPTS += [PROMPTS[1][:19] + PROMPTS[0], PROMPTS[1]]
GREEDY = checkpoint.greedy(10)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The folder of a checkpoint, and its tensors."""
    register_model(NAME, resized)
    folder = tmp_path_factory.mktemp("resized")
    return folder, checkpoint.write(folder, resized, SETTINGS)


@pytest.fixture(scope="module")
def llm(saved):
    with checkpoint.start(saved[0], num_blocks=18, max_num_batched_tokens=12) as llm:
        yield llm


@pytest.fixture(scope="module")
def expected(saved):
    of = functools.partial(float64_llama.logits, saved[1], SETTINGS)
    return [float64_llama.greedy(of, prompt, 10) for prompt in PROMPTS]


def test_tokens_are_those_of_one_size(llm, expected):
    assert [g.block_size for g in llm.engine.runner.program.cache_groups] == [2, 8]
    assert checkpoint.answers(llm, PROMPTS, GREEDY) == expected
    assert llm.engine.scheduler.num_preemptions
    llm.reset_prefix_cache()
    asked = {"prompt_token_ids": PROMPTS[1]}
    found = [llm.generate(asked, GREEDY, use_tqdm=False)[0] for _ in range(2)]
    assert [list(one.outputs[0].token_ids) for one in found] == [expected[1]] * 2
    assert [one.num_cached_tokens for one in found] == [0, 24]  # what both sizes divide
    # A block that both have begun is copied, and written behind its first tokens.
    llm.reset_prefix_cache()
    short = {"prompt_token_ids": PROMPTS[1][:18]}
    llm.generate(short, checkpoint.greedy(1), use_tqdm=False)
    [again] = llm.generate(asked, GREEDY, use_tqdm=False)
    assert list(again.outputs[0].token_ids) == expected[1] and again.num_cached_tokens == 18


def test_a_snapshot_goes_on(llm, expected, tmp_path):
    params = checkpoint.greedy(10, output_kind=RequestOutputKind.CUMULATIVE)
    parts = llm.stream([{"prompt_token_ids": ids} for ids in PROMPTS], params)
    for _ in range(4):
        next(parts)
    assert any(len(r.blocks[0]) > 12 for r in llm.engine.scheduler.running)
    llm.save_state(tmp_path / "saved")
    parts.close()
    checkpoint.answers(llm, PROMPTS[::-1], checkpoint.greedy(2))
    told = {out.request_id: out for out in llm.restore_state(tmp_path / "saved")}
    found = [list(out.outputs[0].token_ids) for out in told.values()]
    assert len(found) >= 3 and all(tokens in expected for tokens in found)


def test_memory_is_planned_as_it_is_made(llm):
    plan, state = llm.memory_plan, make_state(llm.engine.runner.program)
    assert (
        num_bytes(state.kv) == plan.kv and num_bytes((state.requests, state.tables)) == plan.tables
    )


def test_steps_pass_the_check(llm):
    """Of a scheduler alone, with copies of blocks, and requests that give way."""
    config, model_config = llm.engine.config, llm.model_config
    program = build(resized, model_config, config, llm.params).program
    check = StepCheck(program)
    pools, scheduler = make_scheduler(program)
    waiting, num_copies = [PROMPTS[1][:18], *PROMPTS, *PROMPTS[::-1]], 0
    for i, prompt in enumerate(waiting):
        scheduler.add(scheduling.new(str(i), prompt, 14 if i else 1))
        for _ in range(3):
            output = scheduling.step(scheduler)
            check.take(output)
            num_copies += sum(bool(new.copies) for new in output.scheduled_new_reqs)
            scheduling.check(scheduler, pools)
    while scheduler.has_unfinished:
        check.take(scheduling.step(scheduler))
    assert num_copies and scheduler.num_preemptions
