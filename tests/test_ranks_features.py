"""What goes on over data ranks: adapters, drafts of layers, several steps a launch, contexts."""

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxrunner import LLM, LoRARequest, SamplingParams
from jaxrunner.scheduling.draft_policy import DraftPolicy
from jaxrunner.scheduling.ranks import RankedScheduler
from jaxrunner.scheduling.request import SchedulerOutput
from tests.support import lora, small_checkpoint
from tests.support.data_ranks import MIXTURE, RANKS, SIZES, D

PROMPTS = [[n, *range(9), 5] for n in range(3 * D)]
# Of one layer, whose experts and widths go into any of the numbers of devices here.
EVEN: dict[str, Any] = MIXTURE | dict(
    num_hidden_layers=1, num_experts=24, num_attention_heads=4, intermediate_size=32, vocab_size=64
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return small_checkpoint.save_family(tmp_path_factory.mktemp("mixture"), EVEN)


@pytest.fixture(scope="module")
def wanted(folder):
    return answers(folder)


def answers(folder: str, loras: Any = None, **changes: Any) -> list[list[int]]:
    """Returns the tokens of requests of unlike lengths, half of which are drawn."""
    rules = [
        SamplingParams(temperature=n % 2, seed=n, max_tokens=2 + 2 * n, ignore_eos=True)
        for n in range(len(PROMPTS))
    ]
    with LLM(folder, **SIZES | changes) as llm:
        prompts = [dict(prompt_token_ids=ids) for ids in PROMPTS]
        outputs = llm.generate(prompts, rules, on_error="raise", lora_request=loras)
        if "num_decode_steps" in changes:
            assert any(key.name == "multi_step" for key in llm.runner.programs.ready())
        if "decode_context_parallel_size" in changes:  # of so many devices, a block has each one's
            assert llm.memory_plan.num_tokens == 2 * SIZES["num_blocks"] * SIZES["block_size"]
        if "speculative_config" in changes:
            told = {metric.name: getattr(metric, "value", 0) for metric in llm.get_metrics()}
            stood, drafted = (
                told[f"vllm:spec_decode_num_{name}_tokens"] for name in ("accepted", "draft")
            )
            assert stood == drafted > 7
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.slow
@pytest.mark.devices(D)
def test_several_steps_a_launch_change_no_token(folder, wanted):
    assert answers(folder, **RANKS, num_decode_steps=3) == wanted


@pytest.mark.devices(2)
@pytest.mark.slow
def test_a_mixture_drafts_for_itself_in_one_rank(folder, wanted):
    two: dict[str, Any] = dict(tensor_parallel_size=2, enable_expert_parallel=True)
    drafts = dict(method="draft_model", model=folder, num_speculative_tokens=1)
    assert answers(folder, **two, speculative_config=drafts) == wanted


@pytest.mark.devices(D)
@pytest.mark.slow
@pytest.mark.parametrize("num_decode_steps", [1, 2])
def test_all_ranks_draft_as_many_tokens(num_decode_steps, folder, wanted, monkeypatch):
    """Or none, in turn. Ranks end one after the other."""
    numbers, seen = itertools.cycle([0, 2, 2]), list[tuple[int, int]]()

    def in_turn(_: DraftPolicy, num_rows: int) -> int:
        assert num_rows <= SIZES["max_num_seqs"]  # of a rank
        return next(numbers)

    def schedule(scheduler: RankedScheduler, num_steps: int = 1) -> SchedulerOutput:
        output = plan(scheduler, num_steps)
        ranks = {part.num_proposed for part in output.parts if part.requests}
        assert ranks <= {output.num_proposed}
        seen.append((len([part for part in output.parts if part.requests]), output.num_proposed))
        return output

    plan = RankedScheduler.schedule
    monkeypatch.setattr(DraftPolicy, "choose", in_turn)
    monkeypatch.setattr(RankedScheduler, "schedule", schedule)
    drafts = dict(
        method="draft_model", model=folder, num_speculative_tokens="auto",
        max_num_speculative_tokens=2,
    )  # fmt: skip
    steps: dict[str, Any] = {} if num_decode_steps == 1 else dict(num_decode_steps=2)
    assert answers(folder, **RANKS, **steps, speculative_config=drafts) == wanted
    first = seen.index((D, 2))  # ranks with requests, drafts of each
    assert {(D, 0), (1, 2)} <= {*seen} and 0 in [number for _, number in seen[first:-1]]


@pytest.mark.devices(8)
@pytest.mark.slow
def test_tokens_of_a_rank_are_dealt_out_to_its_devices(folder, wanted):
    eight: dict[str, Any] = dict(
        data_parallel_size=2, tensor_parallel_size=4, enable_expert_parallel=True,
        decode_context_parallel_size=2,
    )  # fmt: skip
    assert answers(folder, **eight) == wanted


@pytest.mark.slow
@pytest.mark.devices(D)
def test_adapters_of_all_ranks_share_their_places(folder):
    """Five adapters, and two places, for nine requests."""
    base = load_file(Path(folder, "model.safetensors"))
    targets = ("q_proj", "k_proj", "v_proj", "o_proj")
    made = [lora.make(base, i, targets=targets) for i in range(1, 6)]
    named = [
        LoRARequest(f"{i}", i, lora_tensors=of[0], lora_config=of[1])
        for i, of in enumerate(made, 1)
    ]
    asked = [[None, *named][n % 6] for n in range(len(PROMPTS))]
    sizes: dict[str, Any] = dict(enable_lora=True, max_loras=2, max_lora_rank=8)
    want = answers(folder, asked, **sizes)
    assert answers(folder, asked, **RANKS, **sizes) == want
    assert len({tuple(tokens[:2]) for tokens in want}) > 5 and np.size(asked) == len(PROMPTS)
