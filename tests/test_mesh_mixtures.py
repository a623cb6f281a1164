"""Mixtures of every family on meshes, and with drafts there: tokens are those of transformers."""

from collections.abc import Iterator
import itertools
from typing import Any

import pytest

from jaxrunner import LLM
from tests.support import executables
from tests.support.mixture_answers import PROMPTS, SIZES, greedy, logits_of, tokens, variants

pytestmark = [pytest.mark.slow, pytest.mark.devices(4)]
NGRAM = dict(method="ngram", num_speculative_tokens=2, prompt_lookup_min=1)
EXPERTS: dict[str, Any] = dict(tensor_parallel_size=2, enable_expert_parallel=True)
MESHES: dict[str, dict[str, Any]] = {
    "drafts": EXPERTS | dict(speculative_config=NGRAM),
    "tensor": dict(tensor_parallel_size=2),
    "data ranks": dict(data_parallel_size=3, enable_expert_parallel=True),
}


@pytest.fixture(autouse=True)
def few_maps() -> Iterator[None]:
    """Forgets executables: those of all variants are more than a process can map."""
    yield
    if executables.are_many():
        executables.forget()


def families() -> list[str]:
    """Returns a variant of each family: how others differ is told by one device.

    Without those that two devices cut in `test_mixtures` just as they would here.
    """
    from tests.support import mixtures

    found = {mixtures.VARIANTS[variant][0]: variant for variant in reversed(variants())}
    del found["DeepseekV3"], found["GptOss"]
    return [*reversed(found.values())]


@pytest.mark.parametrize(("variant", "mesh"), [*zip(families(), itertools.cycle(MESHES))])
def test_tokens_are_those_of_transformers(variant, mesh, tmp_path):
    from tests.support import mixtures

    model = mixtures.model(variant)
    model.save_pretrained(tmp_path)
    with LLM(str(tmp_path), **SIZES | MESHES[mesh]) as llm:
        told = tokens(greedy(llm, PROMPTS[:8], 12))
    for prompt, new in zip(PROMPTS, told, strict=False):
        want = logits_of(model, prompt + new)[len(prompt) - 1 : -1].argmax(-1)
        assert new == want.tolist()
