"""A speculator that is no part of the package: its drafts are right, and change no token."""

from typing import Any

import numpy as np

from jaxrunner import SamplingParams, register_model
from jaxrunner.models.llama import llama
from tests.outside import checkpoint
from tests.outside.lookup import K, lookup

NAME = "LookupForCausalLM"
drafting = llama._replace(speculator=lookup)
SETTINGS: dict[str, Any] = checkpoint.LLAMA | dict(architectures=[NAME])
PLAIN: dict[str, Any] = checkpoint.LLAMA | dict(architectures=["LlamaForCausalLM"])


def test_drafts_change_no_token(tmp_path):
    register_model(NAME, drafting)
    [folder, plain] = tmp_path / "drafting", tmp_path / "plain"
    for path, model, settings in ((folder, drafting, SETTINGS), (plain, llama, PLAIN)):
        path.mkdir()
        checkpoint.write(path, model, settings)
    prompts = checkpoint.prompts(11, 4, 17, 9)
    asked = [
        checkpoint.greedy(16),
        SamplingParams(temperature=0.4, seed=3, max_tokens=16, detokenize=False),
        SamplingParams(temperature=1.0, top_k=3, seed=4, max_tokens=9, n=2, detokenize=False),
        checkpoint.greedy(12),
    ]
    with checkpoint.start(plain) as llm:
        want = checkpoint.answers(llm, prompts, asked)
    with checkpoint.start(folder) as llm:
        assert checkpoint.answers(llm, prompts, asked) == want


def num_steps(prompt: list[int], new: list[int]) -> int:
    """Returns the steps that give a request its tokens, where drafts are looked up in Python."""
    ids, steps = [*prompt, new[0]], 1
    while len(ids) < len(prompt) + len(new):
        before = [i for i, token in enumerate(ids[:-1]) if token == ids[-1]]
        start, left = before[-1] + 1 if before else 0, new[len(ids) - len(prompt) :]
        right = [i < len(ids) and ids[i] == token for i, token in enumerate(left[:K], start)]
        ids += left[: [*right, False].index(False) + 1]
        steps += 1
    return steps


def test_drafts_and_counts_of_slots_are_those_of_a_lookup_in_python(tmp_path):
    register_model(NAME, drafting)
    checkpoint.write(tmp_path, drafting, SETTINGS)
    prompts, asked = checkpoint.prompts(5, 4, 9, seed=1), [*map(checkpoint.greedy, (36, 25, 30))]
    sizes: dict[str, Any] = dict(max_num_batched_tokens=16, token_buckets=(16,))  # all drafts fit
    with checkpoint.start(tmp_path, **sizes) as llm:
        answers = checkpoint.answers(llm, prompts, asked)
        counts = np.asarray(llm.engine.runner.state.tables["proposed"].count)
        accepted: Any = {metric.name: metric for metric in llm.get_metrics()}
    steps = [num_steps(*each) for each in zip(prompts, answers, strict=True)]
    assert sorted(counts) == sorted(K * n for n in steps)
    total = sum(map(len, answers)) - sum(steps)
    assert accepted["vllm:spec_decode_num_accepted_tokens"].value == total > 10
