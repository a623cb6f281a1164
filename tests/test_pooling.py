"""Decoders that pool, against transformers: embeddings, classes, scores and rewards."""

import numpy as np
import pytest

from tests.support import pooling
from tests.support.pooling import PROMPTS


@pytest.fixture(scope="module")
def embedder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("qwen3")
    module = pooling.save(folder, "Qwen3Model")
    with pooling.start(folder) as llm:
        yield module, llm


def test_embeddings_are_those_of_transformers(embedder):
    module, llm = embedder
    outputs = llm.embed(pooling.prompts(PROMPTS))
    for ids, output in zip(PROMPTS, outputs, strict=True):
        want = pooling.unit(pooling.hidden(module, ids)[-1])
        np.testing.assert_allclose(output.outputs.embedding, want, atol=1e-5)
