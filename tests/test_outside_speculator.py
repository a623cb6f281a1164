"""A speculator that is no part of the package: drafts change no token of an `LLM`."""

from typing import Any

from jaxrunner import SamplingParams, register_model
from jaxrunner.models.llama import llama
from tests.outside import checkpoint
from tests.outside.lookup import lookup

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
        drafts = llm.engine.runner.state.tables["proposed"].count
        assert int(drafts.sum()) > 0
