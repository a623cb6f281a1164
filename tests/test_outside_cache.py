"""A kind of cache that is no part of the package: a recurrent state, exact in all that happens."""

from dataclasses import replace
import functools
from typing import Any

import jax
import numpy as np
import pytest

from jaxrunner import LLM, RequestOutputKind, SamplingParams, register_model
from jaxrunner.program.state import make_state
from jaxrunner.programs.build import build
from jaxrunner.runner.model_runner import ModelRunner
from jaxrunner.worker.memory_plan import num_bytes
from tests.outside import checkpoint, float64_llama
from tests.outside.recurrent import DEPTH, STATES, expected_offsets, recurrent
from tests.support import tiny

NAME = "RecurrentForCausalLM"
SETTINGS: dict[str, Any] = checkpoint.LLAMA | dict(architectures=[NAME])
COUNT = 11
PROMPTS = checkpoint.prompts(3, 21, 9, 14, 2, 30, 5)
PROMPTS += [PROMPTS[1][:17] + PROMPTS[0], PROMPTS[1]]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The folder of a checkpoint, and its tensors."""
    register_model(NAME, recurrent)
    folder = tmp_path_factory.mktemp("recurrent")
    return folder, checkpoint.write(folder, recurrent, SETTINGS)


@pytest.fixture(scope="module", params=[1, 4], ids=["1 step a launch", "4 steps a launch"])
def llm(saved, request):
    """Too few blocks for three long requests, and chunks of 8 tokens."""
    with checkpoint.start(saved[0], num_blocks=18, num_decode_steps=request.param) as llm:
        yield llm


@pytest.fixture(scope="module")
def expected(saved):
    """The answers, by numpy and a loop over tokens in plain Python."""
    last, tensors = SETTINGS["num_hidden_layers"] - 1, saved[1]

    def logits(ids: list[int]) -> np.ndarray:
        offsets = tensors["model.offsets.weight"].astype(np.float64)[expected_offsets(ids)]
        before = functools.partial(_offset, offsets, last)
        return float64_llama.logits(tensors, SETTINGS, ids, before)

    return [float64_llama.greedy(logits, prompt, COUNT) for prompt in PROMPTS]


def _offset(offsets: np.ndarray, at: int, x: np.ndarray, layer: int) -> np.ndarray:
    return x + offsets if layer == at else x


def test_states_are_right_in_any_batch(llm, expected):
    """In chunks, beside others, in slots and blocks that others had, and after a preemption."""
    assert checkpoint.answers(llm, PROMPTS, checkpoint.greedy(COUNT)) == expected
    assert llm.engine.scheduler.num_preemptions
    assert len({tuple(tokens) for tokens in expected}) >= 7


def test_no_prefix_is_taken_for_a_state(llm, expected):
    params = SamplingParams(top_k=1, n=2, max_tokens=COUNT, detokenize=False)
    again = llm.generate([{"prompt_token_ids": PROMPTS[1]}] * 2, params, use_tqdm=False)
    told = [list(one.token_ids) for output in again for one in output.outputs]
    assert told == [expected[1]] * 4 and {output.num_cached_tokens for output in again} == {0}


def test_logprobs_of_prompts_are_of_the_states(llm, saved):
    [[scores]] = [llm.score_tokens([{"prompt_token_ids": PROMPTS[3]}], use_tqdm=False)]
    offsets = saved[1]["model.offsets.weight"].astype(np.float64)[expected_offsets(PROMPTS[3])]
    before = functools.partial(_offset, offsets, SETTINGS["num_hidden_layers"] - 1)
    logits = float64_llama.logits(saved[1], SETTINGS, PROMPTS[3], before)
    want = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    want = want[np.arange(len(PROMPTS[3]) - 1), PROMPTS[3][1:]]
    np.testing.assert_allclose(scores.logprobs, want, atol=2e-4)


def test_a_snapshot_has_the_states(llm, expected, tmp_path):
    params = checkpoint.greedy(COUNT, output_kind=RequestOutputKind.CUMULATIVE)
    parts = llm.stream([{"prompt_token_ids": ids} for ids in PROMPTS], params)
    for _ in range(5):
        next(parts)
    llm.save_state(tmp_path / "saved")
    parts.close()
    checkpoint.answers(llm, PROMPTS[::-1], checkpoint.greedy(2))  # other states in all blocks
    llm.reset_prefix_cache()
    told = {out.request_id: out for out in llm.restore_state(tmp_path / "saved")}
    found = [list(out.outputs[0].token_ids) for out in told.values()]
    assert len(found) >= 5 and all(tokens in expected for tokens in found)


def runner(llm: LLM) -> ModelRunner:
    """Returns a runner for a scheduler of one's own, whose steps are checked."""
    params = llm.params
    return ModelRunner(build(recurrent, llm.model_config, llm.engine.config, params), params)


def test_a_fork_has_states_of_its_own(llm, expected):
    """Driven by hand, which checks each step against groups of blocks of 4 tokens and of 48."""
    first = runner(llm)
    new = replace(
        tiny.new_request("a", PROMPTS[0], blocks=(), max_tokens=COUNT),
        block_ids=([3, 1, 4, 2], [2]),
    )
    other = replace(tiny.new_request("b", PROMPTS[2], blocks=()), block_ids=([3, 1, 4], [2]))
    tokens = first.step(tiny.scheduled({"a": 3}, [new])).get().sampled_token_ids[0]
    fork = first.fork()
    with pytest.raises(ValueError, match="is a block that a request has already"):
        first.step(tiny.scheduled({"b": 8}, [other]))
    first.step(tiny.scheduled({}, finished_req_ids={"a"}))
    first.step(tiny.scheduled({"b": 8}, [other])).get()
    for _ in range(COUNT - 1):
        tokens += fork.step(tiny.scheduled({"a": 1})).get().sampled_token_ids[0]
    assert tokens == expected[0]


def test_memory_is_planned_as_it_is_made(llm):
    e, plan, program = llm.engine.config, llm.memory_plan, llm.engine.runner.program
    state = make_state(program)
    assert num_bytes(state.kv) + num_bytes((state.requests, state.tables)) == plan.kv + plan.tables
    of_states = (e.max_num_seqs + 1) * (1 + DEPTH) * 4
    assert num_bytes(state.kv[-1]) == of_states == num_bytes(state.kv) - plan.kv
    assert num_bytes(llm.params) == plan.weights and STATES in llm.params.offsets.shape
    assert jax.tree.leaves(state.kv[-1])[0].dtype == np.int32
    specs = llm.engine.worker.get_kv_cache_spec()
    assert [spec.block_size for spec in specs.values()] == [4, 4, 48]
    assert [*specs.values()][-1].page_size_bytes == (1 + DEPTH) * 4
