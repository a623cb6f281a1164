"""Mixtures of every family on meshes, and with drafts there: tokens are those of one device."""

from collections.abc import Iterator
import gc
from pathlib import Path
from typing import Any

import jax
import pytest
from test_mixtures import PROMPTS, SIZES, greedy, tokens, variants

from jaxrunner import LLM
from jaxrunner.device import lowering

pytestmark = [pytest.mark.slow, pytest.mark.devices(4)]
NGRAM = dict(method="ngram", num_speculative_tokens=2, prompt_lookup_min=1)
EXPERTS: dict[str, Any] = dict(tensor_parallel_size=2, enable_expert_parallel=True)
MESHES: dict[str, dict[str, Any]] = {
    "tensor": dict(tensor_parallel_size=2),
    "experts": EXPERTS,
    "drafts": EXPERTS | dict(speculative_config=NGRAM),
    "replicas of experts": EXPERTS | dict(data_parallel_size=2),
}


@pytest.fixture(scope="module", params=variants())
def mixture(request, tmp_path_factory) -> Iterator[tuple[Path, list[list[int]]]]:
    """Yields the checkpoint of a variant, and what one device answers."""
    from tests.support import mixtures

    folder = tmp_path_factory.mktemp("mixture")
    mixtures.model(request.param).save_pretrained(folder)
    with LLM(str(folder), **SIZES) as llm:
        want = tokens(greedy(llm, PROMPTS[:8], 12))
    yield folder, want
    # Executables of all variants are more than a process can map.
    lowering._lower.cache_clear()
    jax.clear_caches()
    gc.collect()


@pytest.mark.parametrize("mesh", MESHES.values(), ids=MESHES.keys())
def test_tokens_are_those_of_one_device(mixture, mesh):
    folder, want = mixture
    with LLM(str(folder), **SIZES | mesh) as llm:
        assert tokens(greedy(llm, PROMPTS[:8], 12)) == want
