"""Models that pool on several devices: each text is pooled by one engine, as by one alone."""

from typing import Any

import numpy as np
import pytest

from jaxrunner.pooling.late_interaction import LateInteractionParams
from jaxrunner.pooling.params import PoolingParams
from tests.support import pooling
from tests.support.pooling import PROMPTS

pytestmark = pytest.mark.devices(2)
TEXTS = pooling.prompts(PROMPTS)


def arrays(outputs: list[Any]) -> list[np.ndarray]:
    return [np.asarray(output.outputs.data) for output in outputs]


@pytest.mark.parametrize(
    "name, changes",
    [
        ("BertModel", pooling.WHOLE),
        ("LlamaForSequenceClassification", {}),
        pytest.param("Qwen3Model", {}, marks=pytest.mark.slow),
    ],
)
def test_arrays_are_those_of_one_engine(tmp_path, name, changes):
    pooling.save(tmp_path, name)
    with pooling.start(tmp_path, **changes) as llm:
        want = arrays(llm.encode(TEXTS))
    with pooling.start(tmp_path, **changes, data_parallel_size=2) as llm:
        got = arrays(llm.encode(TEXTS))
        assert all(engine.runner.traffic for engine in llm.engine.engines)
    for one, other in zip(got, want, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)


def test_a_query_of_one_engine_is_compared_with_documents_of_both(tmp_path):
    pooling.save_colbert(tmp_path, "BertModel", 20)
    asked = dict(hf_overrides=dict(architectures=["HF_ColBERT"]))
    with pooling.start(tmp_path, **pooling.WHOLE | asked) as llm:
        query, *documents = arrays(llm.encode(TEXTS[::-1]))
    want = [(query @ document.T).max(1).sum() for document in documents]
    kept = LateInteractionParams(mode="cache_query", query_key="a", query_uses=len(documents))
    one = LateInteractionParams(mode="score_doc", query_key="a")
    with pooling.start(tmp_path, **pooling.WHOLE | asked, data_parallel_size=2) as llm:
        llm.encode(TEXTS[-1], PoolingParams(late_interaction_params=kept))
        got = arrays(llm.encode(TEXTS[-2::-1], PoolingParams(late_interaction_params=one)))
        assert all(engine.runner.traffic for engine in llm.engine.engines)
        assert len(llm.queries) == 0
    np.testing.assert_allclose(got, want, rtol=1e-5)
